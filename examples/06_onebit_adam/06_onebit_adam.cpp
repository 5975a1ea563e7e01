// 1-bit Adam beside AdamW: the same byte model, the same data, once with gradients averaged in full precision
// and once with the signs of the momentum. What to look at: the loss, which is about the same, and the bytes
// that each rank sends, which are not.
//
//   06_onebit_adam --processes 2                    ranks on this machine, on its CPU
//   torchrun --no-python --nproc-per-node 2 06_onebit_adam
//   mpirun -n 2 06_onebit_adam                      also srun
//   06_onebit_adam                                  one process: nothing to send, so nothing is compressed
#include <cstdio>
#include <memory>
#include <vector>

#include <torch/nn.h>
#include <torch/utils.h>

#include <pacer/pacer.h>

#include "support/byte_model.h"
#include "support/program.h"

namespace {

constexpr int64_t kBatch = 64;  // of all ranks together
constexpr int64_t kSteps = 600;
constexpr int64_t kFreezeStep = kSteps / 5;  // warm-up: a fifth of the run is a good first guess
constexpr double kRate = 3e-3;
constexpr double kBeta1 = 0.9, kBeta2 = 0.99;  // a variance that looks back on 100 steps: within the warm-up

using World = std::shared_ptr<pacer::Communicator>;

// Trains and says what it took; `optimizer` is over the parameters of `model`.
void train(const char* name, torch::nn::Sequential model, torch::optim::Optimizer& optimizer,
           const World& world) {
  const int64_t sent_before = world->bytes_sent();
  const auto windows = examples::read_windows(PACER_TORCH_INCLUDE_DIR "/ATen/core/TensorBody.h");
  const int64_t share = kBatch / world->world_size();
  pacer::EpochSampler sampler(static_cast<size_t>(windows.size(0)), /*seed=*/1, *world);
  pacer::Session session(*model, optimizer, world);
  session.use(pacer::GradientClipping(1.0))
      .use(pacer::LearningRate(pacer::warmup_cosine({kSteps / 10, kSteps})))
      .use(sampler);
  double loss_sum = 0;  // over the last tenth
  while (session.progress().step < kSteps) {
    auto rows = sampler.next(static_cast<size_t>(share));
    if (!rows) {
      sampler.reset();
      continue;
    }
    const std::vector<int64_t> chosen(rows->begin(), rows->end());
    const auto batch = windows.index_select(0, torch::tensor(chosen));
    auto [x, y] = session.begin(batch.narrow(1, 0, examples::kContext), batch.select(1, examples::kContext));
    const auto loss = torch::cross_entropy_loss(model->forward(x), y);
    session.backward(loss);
    session.step();
    if (session.progress().step > kSteps - kSteps / 10) loss_sum += loss.item<double>();
  }
  session.finish();
  const auto loss = torch::full({1}, loss_sum / (kSteps / 10.0) / world->world_size(), torch::kDouble);
  world->all_reduce(loss).wait();
  if (world->rank() != 0) return;
  std::printf("%-12s loss %.3f nats per byte over the last %lld of %lld steps, %.2f MB sent per rank\n", name,
              loss.item<double>(), static_cast<long long>(kSteps / 10), static_cast<long long>(kSteps),
              static_cast<double>(world->bytes_sent() - sent_before) / 1e6);
}

void compare(const World& world) {
  pacer::require(kBatch % world->world_size() == 0, "a batch of ", kBatch, " cannot be shared evenly by ",
                 world->world_size(), " processes; start 1, 2, 4, 8 ...");
  torch::set_num_threads(1);  // so small a model gains nothing from a second one
  {
    auto model = examples::make_byte_model();
    pacer::FusedAdamW optimizer(model->named_parameters(),
                                pacer::FusedAdamWOptions(kRate).betas({kBeta1, kBeta2}).weight_decay(0.1));
    train("FusedAdamW", model, optimizer, world);
  }
  auto model = examples::make_byte_model();
  const auto options = pacer::OneBitAdamOptions(kRate).betas({kBeta1, kBeta2}).weight_decay(0.1);
  pacer::OneBitAdam optimizer(model->named_parameters(),
                              pacer::OneBitAdamOptions(options).freeze_step(kFreezeStep), world);
  train("OneBitAdam", model, optimizer, world);
  if (world->rank() != 0) return;
  std::printf("OneBitAdam averaged gradients for %lld steps; in the %lld after them each rank sent %.2f MB\n",
              static_cast<long long>(*optimizer.frozen_at()),
              static_cast<long long>(optimizer.attempts() - *optimizer.frozen_at()),
              static_cast<double>(optimizer.bytes_sent()) / 1e6);
}

}  // namespace

int main(int argument_count, char** arguments) {
  constexpr const char* kAbout =
      "Trains a byte model with AdamW and with 1-bit Adam, and says the loss and the bytes that each rank\n"
      "sends.\n";
  return examples::run_as_ranks(argument_count, arguments, kAbout, compare,
                                pacer::CommunicatorOptions().backend(pacer::Backend::gloo));
}
