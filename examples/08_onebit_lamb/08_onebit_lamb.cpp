// 1-bit LAMB beside LAMB: the byte model and text of 06_onebit_adam with eight times its batch, once with
// gradients averaged in full precision and once with the signs of the momentum. What to look at:
//
// - the loss, which is about the same, and the bytes that each rank sends, which are not;
// - the coefficient of each tensor: the mean trust ratio |p| / |u| of the warm-up, by which its steps are
//   scaled for good. Tensors differ, which is what LAMB is about; biases are exempt and have 1;
// - the factor: by how much the last step was made larger or smaller because the variance, which stands
//   still, would have moved. Between 0.5 and 4; where it leaves 1, the effective rate is no longer LAMB's;
// - the scale of the momentum, which makes it as large in every tensor as in the mean one before it travels
//   as signs of one size. How far these numbers lie apart is what one size would have lost.
//
//   08_onebit_lamb --processes 2                    ranks on this machine, on its CPU
//   torchrun --no-python --nproc-per-node 2 08_onebit_lamb
//   mpirun -n 2 08_onebit_lamb                      also srun
//   08_onebit_lamb                                  one process: nothing to send, so nothing is compressed
#include <cstdio>
#include <memory>
#include <vector>

#include <torch/utils.h>

#include <pacer/pacer.h>

#include "support/byte_model.h"
#include "support/byte_training.h"
#include "support/program.h"

namespace {

constexpr int64_t kBatch = 8 * 64;  // of all ranks together
constexpr int64_t kSteps = 300;
constexpr int64_t kFreezeStep = kSteps / 5;  // warm-up: a fifth of the run is a good first guess
constexpr double kRate = 2e-2;               // the share of its own norm by which a tensor moves in a step

using World = std::shared_ptr<pacer::Communicator>;

template <class Options>
Options recipe() {
  return Options(kRate).bias_correction(true);  // for OneBitLamb it is off by default
}

// Biases without decay and without a trust ratio of their own.
template <class Options>
std::vector<pacer::NamedParamGroup> make_groups(const torch::nn::Sequential& model, const Options& options) {
  pacer::NamedParameters weights, biases;
  for (const auto& item : model->named_parameters()) {
    (item.value().dim() > 1 ? weights : biases).insert(item.key(), item.value());
  }
  std::vector<pacer::NamedParamGroup> groups;
  groups.emplace_back(weights);
  groups.emplace_back(biases, std::make_unique<Options>(Options(options).weight_decay(0).adapt(false)));
  return groups;
}

void print_tensors(const torch::nn::Sequential& model, const pacer::OneBitLamb& optimizer) {
  std::printf("\n%-10s %10s %12s %8s %18s\n", "tensor", "elements", "coefficient", "factor",
              "scale of momentum");
  for (const auto& item : model->named_parameters()) {
    std::printf("%-10s %10lld %12.3f %8.3f %18.3f\n", item.key().c_str(),
                static_cast<long long>(item.value().numel()), optimizer.coefficient(item.value()),
                optimizer.factor(item.value()), optimizer.momentum_scale(item.value()));
  }
}

void compare(const World& world) {
  torch::set_num_threads(1);  // so small a model gains nothing from a second one
  const examples::ByteTraining training{
      examples::read_windows(PACER_TORCH_INCLUDE_DIR "/ATen/core/TensorBody.h"), kBatch, kSteps, world};
  {
    auto model = examples::make_byte_model();
    const auto options = recipe<pacer::FusedLambOptions>();
    pacer::FusedLamb optimizer(make_groups(model, options), options);
    training.run("FusedLamb", model, optimizer);
  }
  auto model = examples::make_byte_model();
  // The paper's bound of the factor. By default it is 1, and there is little to see.
  const auto options = recipe<pacer::OneBitLambOptions>().freeze_step(kFreezeStep).factor_max(4);
  pacer::OneBitLamb optimizer(make_groups(model, options), options, world);
  training.run("OneBitLamb", model, optimizer);
  training.print_phases("OneBitLamb", optimizer);
  if (world->rank() == 0) print_tensors(model, optimizer);
}

}  // namespace

int main(int argument_count, char** arguments) {
  constexpr const char* kAbout =
      "Trains a byte model in large batches with LAMB and with 1-bit LAMB, and says the loss, the bytes\n"
      "that each rank sends, and each tensor's coefficient, factor and scale.\n";
  return examples::run_as_ranks(argument_count, arguments, kAbout, compare,
                                pacer::CommunicatorOptions().backend(pacer::CommunicatorBackend::gloo));
}
