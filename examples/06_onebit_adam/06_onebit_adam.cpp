// 1-bit Adam beside AdamW: the same byte model, the same data, once with gradients averaged in full precision
// and once with the signs of the momentum. What to look at: the loss, which is about the same, and the bytes
// that each rank sends, which are not.
//
//   06_onebit_adam --processes 2                    ranks on this machine, on its CPU
//   torchrun --no-python --nproc-per-node 2 06_onebit_adam
//   mpirun -n 2 06_onebit_adam                      also srun
//   06_onebit_adam                                  one process: nothing to send, so nothing is compressed
#include <memory>

#include <torch/utils.h>

#include <pacer/pacer.h>

#include "support/byte_model.h"
#include "support/byte_training.h"
#include "support/program.h"

namespace {

constexpr int64_t kBatch = 64;  // of all ranks together
constexpr int64_t kSteps = 600;
constexpr int64_t kFreezeStep = kSteps / 5;  // warm-up: a fifth of the run is a good first guess
constexpr double kRate = 3e-3;
constexpr double kBeta1 = 0.9, kBeta2 = 0.99;  // a variance that looks back on 100 steps: within the warm-up

using World = std::shared_ptr<pacer::Communicator>;

void compare(const World& world) {
  torch::set_num_threads(1);  // so small a model gains nothing from a second one
  const examples::ByteTraining training{
      examples::read_windows(PACER_TORCH_INCLUDE_DIR "/ATen/core/TensorBody.h"), kBatch, kSteps, world};
  {
    auto model = examples::make_byte_model();
    pacer::FusedAdamW optimizer(model->named_parameters(),
                                pacer::FusedAdamWOptions(kRate).betas({kBeta1, kBeta2}).weight_decay(0.1));
    training.run("FusedAdamW", model, optimizer);
  }
  auto model = examples::make_byte_model();
  const auto options = pacer::OneBitAdamOptions(kRate).betas({kBeta1, kBeta2}).weight_decay(0.1);
  pacer::OneBitAdam optimizer(model->named_parameters(),
                              pacer::OneBitAdamOptions(options).freeze_step(kFreezeStep), world);
  training.run("OneBitAdam", model, optimizer);
  training.print_phases("OneBitAdam", optimizer);
}

}  // namespace

int main(int argument_count, char** arguments) {
  constexpr const char* kAbout =
      "Trains a byte model with AdamW and with 1-bit Adam, and says the loss and the bytes that each rank\n"
      "sends.\n";
  return examples::run_as_ranks(argument_count, arguments, kAbout, compare,
                                pacer::CommunicatorOptions().backend(pacer::CommunicatorBackend::gloo));
}
