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

#include <torch/nn.h>
#include <torch/utils.h>

#include <pacer/pacer.h>

#include "support/byte_model.h"
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
  pacer::require(kBatch % world->world_size() == 0, "a batch of ", kBatch, " cannot be shared evenly by ",
                 world->world_size(), " processes; start 1, 2, 4, 8 ...");
  torch::set_num_threads(1);  // so small a model gains nothing from a second one
  {
    auto model = examples::make_byte_model();
    const auto options = recipe<pacer::FusedLambOptions>();
    pacer::FusedLamb optimizer(make_groups(model, options), options);
    train("FusedLamb", model, optimizer, world);
  }
  auto model = examples::make_byte_model();
  const auto options = recipe<pacer::OneBitLambOptions>().freeze_step(kFreezeStep);
  pacer::OneBitLamb optimizer(make_groups(model, options), options, world);
  train("OneBitLamb", model, optimizer, world);
  if (world->rank() != 0) return;
  std::printf("OneBitLamb averaged gradients for %lld steps; in the %lld after them each rank sent %.2f MB\n",
              static_cast<long long>(*optimizer.frozen_at()),
              static_cast<long long>(optimizer.attempts() - *optimizer.frozen_at()),
              static_cast<double>(optimizer.bytes_sent()) / 1e6);
  print_tensors(model, optimizer);
}

}  // namespace

int main(int argument_count, char** arguments) {
  constexpr const char* kAbout =
      "Trains a byte model in large batches with LAMB and with 1-bit LAMB, and says the loss, the bytes\n"
      "that each rank sends, and each tensor's coefficient, factor and scale.\n";
  return examples::run_as_ranks(argument_count, arguments, kAbout, compare,
                                pacer::CommunicatorOptions().backend(pacer::Backend::gloo));
}
