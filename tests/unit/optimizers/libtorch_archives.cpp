// Archives that each version of LibTorch wrote load in every other. tests/data/archives has a file of each.
// With a version that has none yet, this writes it there:
//   PACER_ARCHIVES=tests/data/archives pacer-unit-tests "an archive of this version loads again"
#include "support/catch.h"

#include <cmath>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include <torch/nn/modules/linear.h>
#include <torch/serialize.h>
#include <torch/version.h>

#include <pacer/optimizers/fused_lamb.h>

#include "support/optimizers/optimizers.h"
#include "support/temporary_folder.h"

namespace pacer::testing {
namespace {

constexpr int kTrainedSteps = 3;
constexpr double kTrainedRate = 0.125, kBeta1 = 0.75, kBeta2 = 0.5, kDecay = 0.25;

double initial_value(int64_t i) { return 0.5 * static_cast<double>(i + 1); }
double gradient_value(int64_t i) { return static_cast<double>(i + 1) * (i % 2 == 0 ? 1 : -1); }

// A layer of 2 x 3 weights and 2 biases whose gradients are the same in every step, and the optimizers.
struct Trained {
  torch::nn::Linear layer{3, 2};
  torch::optim::AdamW adamw;
  FusedAdamW fused_adamw;
  FusedLamb fused_lamb;

  Trained()
      : adamw(groups<torch::optim::AdamWOptions>()),
        fused_adamw(groups<FusedAdamWOptions>()),
        fused_lamb(groups<FusedLambOptions>()) {}

  template <class Options>
  std::vector<torch::optim::OptimizerParamGroup> groups() {
    layer->to(at::kDouble);
    const auto options = Options(kTrainedRate).betas({kBeta1, kBeta2}).eps(1e-300).weight_decay(kDecay);
    std::vector<torch::optim::OptimizerParamGroup> groups;
    groups.emplace_back(std::vector<Tensor>{layer->weight}, std::make_unique<Options>(options));
    groups.emplace_back(std::vector<Tensor>{layer->bias},
                        std::make_unique<Options>(Options(options).lr(2 * kTrainedRate)));
    return groups;
  }

  template <class Optimizer>
  void train(Optimizer& optimizer) {
    const torch::NoGradGuard no_grad;
    for (Tensor& parameter : layer->parameters()) {
      double* const value = parameter.data_ptr<double>();
      parameter.mutable_grad() = torch::empty_like(parameter);
      double* const gradient = parameter.mutable_grad().data_ptr<double>();
      for (int64_t i = 0; i < parameter.numel(); ++i) {
        value[i] = initial_value(i);
        gradient[i] = gradient_value(i);
      }
    }
    for (int step = 0; step < kTrainedSteps; ++step) optimizer.step();
  }
};

std::string file_of(const std::string& folder, const std::string& version) {
  return folder + "/libtorch-" + version + ".pt";
}

template <class Part>
void read_part(torch::serialize::InputArchive& archive, const std::string& name, Part& part) {
  torch::serialize::InputArchive of_part;
  archive.read(name, of_part);
  part.load(of_part);
}

template <class Part>
void write_part(torch::serialize::OutputArchive& archive, const std::string& name, const Part& part) {
  torch::serialize::OutputArchive of_part(archive.compilation_unit());
  part.save(of_part);
  archive.write(name, of_part);
}

// What a gradient g that never changes leaves: m = (1 - beta1^t) g, v = (1 - beta2^t) g^2.
template <class Optimizer>
void check_state(Optimizer& optimizer, const std::vector<Tensor>& parameters) {
  for (size_t g = 0; g < 2; ++g) {
    const auto& options = static_cast<const OptionsOf<Optimizer>&>(optimizer.param_groups()[g].options());
    CHECK(options.lr() == kTrainedRate * static_cast<double>(g + 1));
    CHECK(options.betas() == std::make_tuple(kBeta1, kBeta2));
    CHECK(options.eps() == 1e-300);
    CHECK(options.weight_decay() == kDecay);
    const auto& state = static_cast<const ParamStateOf<Optimizer>&>(
        *optimizer.state().at(parameters[g].unsafeGetTensorImpl()));
    CHECK(state.step() == kTrainedSteps);
    const std::vector<double> exp_avg = to_doubles(state.exp_avg());
    const std::vector<double> exp_avg_sq = to_doubles(state.exp_avg_sq());
    REQUIRE(exp_avg.size() == static_cast<size_t>(parameters[g].numel()));
    for (size_t i = 0; i < exp_avg.size(); ++i) {
      const double gradient = gradient_value(static_cast<int64_t>(i));
      CHECK(exp_avg[i] == Catch::Approx(gradient * (1 - std::pow(kBeta1, kTrainedSteps))).epsilon(1e-14));
      CHECK(exp_avg_sq[i] ==
            Catch::Approx(gradient * gradient * (1 - std::pow(kBeta2, kTrainedSteps))).epsilon(1e-14));
    }
  }
}

void write_archive(const std::string& file) {
  Trained trained;
  trained.train(trained.adamw);
  trained.train(trained.fused_lamb);
  trained.train(trained.fused_adamw);  // the last one, whose weights are written
  torch::serialize::OutputArchive archive;
  write_part(archive, "layer", *trained.layer);
  write_part(archive, "AdamW", trained.adamw);
  write_part(archive, "FusedAdamW", trained.fused_adamw);
  write_part(archive, "FusedLamb", trained.fused_lamb);
  archive.save_to(file);
}

void check_archive(const std::string& file) {
  Trained loaded, crossed;
  torch::serialize::InputArchive archive;
  archive.load_from(file);
  read_part(archive, "layer", *loaded.layer);
  read_part(archive, "AdamW", loaded.adamw);
  read_part(archive, "FusedAdamW", loaded.fused_adamw);
  read_part(archive, "FusedLamb", loaded.fused_lamb);
  read_part(archive, "AdamW", crossed.fused_adamw);  // torch's file, in ours
  check_state(loaded.adamw, loaded.layer->parameters());
  check_state(loaded.fused_adamw, loaded.layer->parameters());
  check_state(crossed.fused_adamw, crossed.layer->parameters());
  CHECK(options_of(loaded.fused_adamw, 1).bias_correction());
  CHECK(static_cast<FusedLambOptions&>(loaded.fused_lamb.param_groups()[1].options()).lr() ==
        2 * kTrainedRate);

  // With a gradient that never changes, a step of AdamW is lr, against its sign, after the decay.
  const auto parameters = loaded.layer->parameters();
  for (size_t g = 0; g < 2; ++g) {
    const double rate = kTrainedRate * static_cast<double>(g + 1);
    const std::vector<double> values = to_doubles(parameters[g].detach());
    for (size_t i = 0; i < values.size(); ++i) {
      double expected = initial_value(static_cast<int64_t>(i));
      for (int step = 0; step < kTrainedSteps; ++step) {
        expected = expected * (1 - rate * kDecay) - rate * (i % 2 == 0 ? 1 : -1);
      }
      CHECK(values[i] == Catch::Approx(expected).epsilon(1e-14).margin(1e-14));
    }
  }
}

}  // namespace

TEST_CASE("archives of every version of LibTorch load, of modules, torch's optimizers and ours",
          "[libtorch][archives]") {
  for (const char* const version : {"2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0"}) {
    CAPTURE(version);
    check_archive(file_of(PACER_TEST_DATA "/archives", version));
  }
}

TEST_CASE("an archive of this version loads again", "[libtorch][archives]") {
  const char* const kept = std::getenv("PACER_ARCHIVES");
  const TemporaryFolder folder;
  const std::string file = file_of(kept != nullptr ? kept : folder.path(), TORCH_VERSION);
  write_archive(file);
  check_archive(file);
}

}  // namespace pacer::testing
