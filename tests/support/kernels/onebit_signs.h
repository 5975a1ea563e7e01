// The 1-bit optimizers by hand, for comparing back-ends and devices: a list of odd parameters, gradients that
// every rank has of its own, and the settings worth trying.
#pragma once

#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ops/randn.h>
#include <torch/types.h>

#include <pacer/collectives/communicator.h>
#include <pacer/optimizers/onebit_adam.h>
#include <pacer/optimizers/onebit_lamb.h>

#include "support/both_devices.h"
#include "support/session/registry.h"

namespace pacer::testing {

// What a case trains: all parameters but the last group's are compressed.
using SignsMaker = std::function<std::unique_ptr<OneBitOptimizer>(
    const std::vector<Tensor>& compressed, const std::vector<Tensor>& full, bool alone,
    const std::shared_ptr<Communicator>& world)>;

struct SignsCase {
  std::string name;
  SignsMaker make;
  std::vector<at::ScalarType> dtypes;  // of the parameters, in turn
};

template <class Optimizer, class Options>
SignsMaker making_signs(const Options& given) {
  return [given](const std::vector<Tensor>& compressed, const std::vector<Tensor>& full, bool alone,
                 const std::shared_ptr<Communicator>& world) {
    const auto options = Options(given).compress_alone(alone);
    std::vector<torch::optim::OptimizerParamGroup> groups;
    groups.emplace_back(compressed, std::make_unique<Options>(options));
    groups.emplace_back(full, std::make_unique<Options>(Options(options).compress(false)));
    return std::make_unique<Optimizer>(groups, options, world);
  };
}

// All that changes which kernels run.
inline std::vector<SignsCase> signs_cases(bool hierarchical = false) {
  const auto adam = [=](auto change) {
    auto options = OneBitAdamOptions(0.01).weight_decay(0.1).freeze_step(5).allow_early_freeze(true);
    options.hierarchical(hierarchical);
    change(options);
    return making_signs<OneBitAdam>(options);
  };
  const auto lamb = [=](auto change) {
    auto options =
        OneBitLambOptions(0.01).weight_decay(0.1).factor_max(4).freeze_step(5).allow_early_freeze(true);
    options.hierarchical(hierarchical);
    change(options);
    return making_signs<OneBitLamb>(options);
  };
  const auto f32 = at::kFloat, bf16 = at::kBFloat16, f16 = at::kHalf;
  return {
      {"fp32", adam([](auto& o) { o.refresh_variance_every(7); }), {f32}},
      {"fp32, l1, by blocks", adam([](auto& o) { o.scale(ScaleNorm::l1).block_scales(true); }), {f32}},
      {"fp32, by blocks, refreshed",
       adam([](auto& o) { o.block_scales(true).refresh_variance_every(3); }),
       {f32}},
      {"fp32, l1, not corrected, no floor",
       adam([](auto& o) { o.scale(ScaleNorm::l1).bias_correction(false).variance_floor(0); }),
       {f32}},
      {"bf16, remainders", adam([](auto& o) { o.refresh_variance_every(5); }), {bf16}},
      {"bf16, 8-bit remainders", adam([](auto& o) { o.master_weights(MasterWeights::remainder_8); }), {bf16}},
      {"bf16, master copies", adam([](auto& o) { o.master_weights(MasterWeights::fp32); }), {bf16}},
      {"fp16", adam([](auto&) {}), {f16}},
      {"mixed", adam([](auto& o) { o.refresh_variance_every(4); }), {f32, bf16, f32, f16}},
      {"mixed, in buckets, refreshed",
       adam([](auto& o) { o.bucket_bytes(1000).refresh_variance_every(4); }),
       {f32, bf16, f32, f16}},
      {"signs off", adam([](auto& o) { o.one_bit(false).refresh_variance_every(4); }), {f32, bf16}},
      {"LAMB, fp32", lamb([](auto&) {}), {f32}},
      {"LAMB, fp32, corrected, no decay, l1",
       lamb([](auto& o) { o.bias_correction(true).weight_decay(0).scale(ScaleNorm::l1); }),
       {f32}},
      {"LAMB, fp32, in buckets", lamb([](auto& o) { o.bucket_bytes(100'000); }), {f32}},
      {"LAMB, mixed, by blocks, no floor",
       lamb([](auto& o) { o.block_scales(true).variance_floor(0); }),
       {f32, bf16, f32, f16}},
      {"LAMB, bf16, master copies, not adapted",
       lamb([](auto& o) { o.master_weights(MasterWeights::fp32).adapt(false); }),
       {bf16}},
      {"LAMB, bf16, 8-bit remainders",
       lamb([](auto& o) { o.master_weights(MasterWeights::remainder_8); }),
       {bf16}},
      {"LAMB, signs off", lamb([](auto& o) { o.one_bit(false); }), {f32, bf16}},
  };
}

// The optimizer of one rank. The last parameter is not compressed.
struct SignsRun {
  std::vector<Tensor> parameters;
  std::unique_ptr<OneBitOptimizer> optimizer;

  SignsRun(const SignsCase& c, const std::shared_ptr<Communicator>& world, const std::vector<int64_t>& sizes,
           bool alone = false) {
    const auto random = at::make_generator<at::CPUGeneratorImpl>(7);
    std::vector<Tensor> compressed, full;
    for (size_t i = 0; i < sizes.size(); ++i) {
      const Tensor value = at::randn({sizes[i]}, random, at::kFloat).to(c.dtypes[i % c.dtypes.size()]);
      parameters.push_back(value.to(world->device()).requires_grad_());
      (i + 1 < sizes.size() ? compressed : full).push_back(parameters.back());
    }
    optimizer = c.make(compressed, full, alone, world);
  }

  // Gradients of that rank; some are missing, and some steps are spoilt on one rank.
  void step(int rank, int64_t number) {
    for (size_t i = 0; i < parameters.size(); ++i) {
      Tensor& parameter = parameters[i];
      const auto random = at::make_generator<at::CPUGeneratorImpl>(
          static_cast<uint64_t>((number * 64 + rank) * 1009 + static_cast<int64_t>(i)));
      const Tensor values =
          at::randn({parameter.numel()}, random, at::kFloat) * std::pow(0.1, static_cast<double>(i % 3));
      parameter.mutable_grad() = values.to(parameter.scalar_type()).to(parameter.device());
      const bool left_out = number > 5 && (number + static_cast<int64_t>(i)) % 11 == 0;
      if (left_out) parameter.mutable_grad().zero_();
    }
    if (number % 13 == 8 && rank == 0) parameters[0].mutable_grad()[0] = std::nan("");
    optimizer->step();
  }

  NamedTensors state() const {
    NamedTensors state = optimizer->export_state();
    for (auto& [name, tensor] : optimizer->export_rank_state()) state["of rank " + name] = tensor;
    for (size_t i = 0; i < parameters.size(); ++i) state["parameter " + std::to_string(i)] = parameters[i];
    NamedTensors copy;
    for (const auto& [name, tensor] : state) copy[name] = tensor.detach().cpu().clone();
    return copy;
  }
};

// Around the boundaries of granules, rows and units.
inline std::vector<int64_t> signs_sizes() {
  return {5000, 1, 0, 127, 128, 129, 70'001, 2'048, 33'000, 64, 300};
}

}  // namespace pacer::testing
