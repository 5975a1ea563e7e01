// The gradient norm and the finite check on the GPU against
// those on the CPU: the same bits for any list of tensors.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include <pacer/core/reduction_order.h>
#include <pacer/core/tile.h>
#include <pacer/kernels/norm.h>

#include "support/catch.h"
#include "support/cuda_memory.h"
#include "support/kernels/norm_input.h"
#include "support/samples.h"

namespace pacer::kernels::testing {
namespace {

using pacer::testing::DeviceArray;
using pacer::testing::DeviceMemory;
using pacer::testing::has_gpu;
using pacer::testing::Samples;
using pacer::testing::synchronize;
using pacer::testing::wants_small_tests;

bool same_sum(double a, double b) { return std::memcmp(&a, &b, 8) == 0 || (std::isnan(a) && std::isnan(b)); }

// Gradients on the GPU, each with the alignment that its shift asks for; one without elements counts as none.
class DeviceGradients {
 public:
  DeviceGradients(GradientType type, const std::vector<NormInput>& host)
      : type_(type), gradients_(add(host)) {}

  // By a block for each unit, and where all are short also by a warp for each, with the same bits.
  std::vector<double> partials() const {
    const std::vector<double> by_blocks = partials(kReductionUnit);
    int64_t longest = 0;
    for (const Tile& unit : units_) longest = std::max<int64_t>(longest, unit.count);
    if (longest > kReductionColumns) return by_blocks;
    const std::vector<double> by_warps = partials(longest);
    for (size_t i = 0; i < units_.size(); ++i) REQUIRE(same_sum(by_warps[i], by_blocks[i]));
    return by_warps;
  }
  const std::vector<Tile>& units() const { return units_; }
  void forget(size_t tensor) { gradients_.set(tensor, {nullptr, 0}); }

 private:
  std::vector<double> partials(int64_t longest) const {
    DeviceArray<double> sums(std::vector<double>(units_.size(), -1.0));
    const DeviceArray<Tile> units(units_);
    sum_of_squares_cuda(type_, units.data(), static_cast<int64_t>(units_.size()), gradients_.data(), nullptr,
                        sums.data(), nullptr, longest);
    synchronize();
    return sums.get();
  }

  std::vector<AdamGradient> add(const std::vector<NormInput>& host) {
    std::vector<AdamGradient> gradients;
    std::vector<int64_t> counts;
    for (const NormInput& input : host) {
      const size_t shift = static_cast<size_t>(input.shift()) * input.width();
      const size_t bytes = static_cast<size_t>(input.count()) * input.width();
      memory_.emplace_back(shift + bytes);
      memory_.back().upload(input.data(), bytes, shift);
      gradients.push_back({memory_.back().data() + shift, 0});
      counts.push_back(input.count());
    }
    units_ = make_tiles(counts, kReductionUnit);
    return gradients;
  }

  GradientType type_;
  std::vector<DeviceMemory> memory_;
  std::vector<Tile> units_;
  DeviceArray<AdamGradient> gradients_;
};

std::vector<NormInput> random_gradients(GradientType type, bool unaligned, bool are_short = false) {
  std::vector<int64_t> counts{1, 0, 5, 2047, 2048, 2049, 5000, 32767, 32768, 32769};
  if (!wants_small_tests()) counts.insert(counts.end(), {65536, 100003, 3 * 32768});
  if (are_short) counts = {1, 0, 2, 3, 4, 5, 64, 127, 128, 129, 255, 513, 1000, 1024, 1025, 2047, 2048, 8};
  std::vector<NormInput> inputs;
  for (size_t t = 0; t < counts.size(); ++t) {
    inputs.emplace_back(type, counts[t], unaligned ? static_cast<int>(t % 8) : 0);
    inputs.back().fill(t);
  }
  return inputs;
}

// The kernel of the CPU on the same unit.
double sum_on_cpu(GradientType type, const std::vector<NormInput>& inputs, const Tile& unit) {
  const NormInput& input = inputs[unit.tensor];
  return sum_of_squares_cpu(type, input.data() + static_cast<size_t>(unit.offset) * input.width(),
                            unit.count);
}

GradientCheck check_on_gpu(const std::vector<double>& partials, const GradientCheck& before,
                           const GuardRule& rule) {
  const DeviceArray<double> device_partials(partials);
  DeviceArray<GradientCheck> check({before});
  const DeviceArray<GuardRule> device_rule({rule});
  finish_check_cuda(device_partials.data(), static_cast<int64_t>(partials.size()), device_rule.data(),
                    check.data(), nullptr);
  synchronize();
  return check.get()[0];
}

void compare_checks(const std::vector<double>& partials, const GuardRule& rule = {}, float loss_scale = 1) {
  const GradientCheck before{-1, -1, -1, 77, loss_scale, 12, 2, 4};
  const GradientCheck on_gpu = check_on_gpu(partials, before, rule);
  GradientCheck on_cpu = before;
  finish_check_cpu(partials.data(), static_cast<int64_t>(partials.size()), rule, &on_cpu);
  INFO(partials.size() << " partial sums");
  CHECK(same_sum(on_gpu.sum_of_squares, on_cpu.sum_of_squares));
  CHECK(same_sum(on_gpu.norm, on_cpu.norm));
  CHECK(on_gpu.non_finite == on_cpu.non_finite);
  CHECK(on_gpu.skipped_steps == on_cpu.skipped_steps);
  CHECK(same_sum(on_gpu.factor, on_cpu.factor));
  CHECK(on_gpu.loss_scale == on_cpu.loss_scale);
  CHECK(on_gpu.finite_steps == on_cpu.finite_steps);
  CHECK(same_sum(on_gpu.last_norm, on_cpu.last_norm));
}

void compare_early_factors(double sum_of_squares, const GuardRule& rule, const GradientCheck& before) {
  const DeviceArray<double> sum({sum_of_squares});
  DeviceArray<double> factor(std::vector<double>(1));
  const DeviceArray<GradientCheck> check({before});
  const DeviceArray<GuardRule> device_rule({rule});
  early_factor_cuda(sum.data(), 3, 5, device_rule.data(), check.data(), factor.data(), nullptr);
  synchronize();
  double expected = 0;
  early_factor_cpu(&sum_of_squares, 3, 5, rule, &before, &expected);
  CHECK(same_sum(factor.get()[0], expected));
}

}  // namespace

TEST_CASE("the sums of squares have the same bits on GPU and CPU", "[kernels][norm][gpu]") {
  if (!has_gpu()) PACER_SKIP("no NVIDIA GPU");
  for (const GradientType type : kAllGradientTypes) {
    for (const int choice : {0, 1, 2, 3}) {
      const bool unaligned = choice % 2 == 1, are_short = choice >= 2;
      INFO("type " << static_cast<int>(type) << (unaligned ? ", unaligned" : "")
                   << (are_short ? ", short" : ""));
      const std::vector<NormInput> inputs = random_gradients(type, unaligned, are_short);
      const DeviceGradients gradients(type, inputs);
      const std::vector<double> partials = gradients.partials();
      int64_t wrong = 0;
      for (size_t i = 0; i < partials.size(); ++i) {
        wrong += !same_sum(partials[i], sum_on_cpu(type, inputs, gradients.units()[i]));
      }
      CHECK(wrong == 0);
      CHECK(gradients.partials() == partials);  // run after run
    }
  }
}

TEST_CASE("on the GPU a tensor without a gradient adds zero to the norm", "[kernels][norm][gpu]") {
  if (!has_gpu()) PACER_SKIP("no NVIDIA GPU");
  for (const GradientType type : kAllGradientTypes) {
    for (const bool are_short : {false, true}) {
      const std::vector<NormInput> inputs = random_gradients(type, false, are_short);
      DeviceGradients gradients(type, inputs);
      const size_t forgotten = inputs.size() - 1;
      gradients.forget(forgotten);
      const std::vector<double> partials = gradients.partials();
      for (size_t i = 0; i < partials.size(); ++i) {
        CHECK((partials[i] == 0) == (gradients.units()[i].tensor == forgotten));
      }
    }
  }
}

TEST_CASE("on the GPU one infinity or NaN anywhere makes its sum of squares non-finite",
          "[kernels][norm][gpu]") {
  if (!has_gpu()) PACER_SKIP("no NVIDIA GPU");
  for (const GradientType type : kAllGradientTypes) {
    for (const int64_t count : {int64_t{1}, int64_t{2049}, kReductionUnit}) {
      for (const int64_t place : {int64_t{0}, count / 2, count - 1}) {
        for (const double poison : {std::nan(""), HUGE_VAL, -HUGE_VAL}) {
          std::vector<NormInput> inputs;
          for (int t = 0; t < 3; ++t) inputs.emplace_back(type, count);
          inputs[1].set(place, poison);
          const std::vector<double> partials = DeviceGradients(type, inputs).partials();
          CHECK(partials[0] == 0);
          CHECK_FALSE(std::isfinite(partials[1]));
          CHECK(partials[2] == 0);
        }
      }
    }
  }
}

TEST_CASE("the sum of squares of denormals has the same bits on GPU and CPU", "[kernels][norm][gpu]") {
  if (!has_gpu()) PACER_SKIP("no NVIDIA GPU");
  Samples samples(3);
  for (const GradientType type : kAllGradientTypes) {
    const double tiny = type == GradientType::f64 ? 1e-160 : type == GradientType::f16 ? 6e-8 : 1e-22;
    std::vector<NormInput> inputs;
    inputs.emplace_back(type, 10000);
    for (int64_t i = 0; i < inputs[0].count(); ++i) inputs[0].set(i, tiny * samples.log_uniform(0.1, 100));
    const DeviceGradients gradients(type, inputs);
    const double sum = gradients.partials()[0];
    CHECK(sum > 0);
    CHECK(same_sum(sum, sum_on_cpu(type, inputs, gradients.units()[0])));
  }
}

TEST_CASE("the finite check gives the same on GPU and CPU", "[kernels][norm][gpu]") {
  if (!has_gpu()) PACER_SKIP("no NVIDIA GPU");
  Samples samples(4);
  for (const size_t count : {0, 1, 2, 255, 256, 257, 511, 1000, 4096, 50001}) {
    std::vector<double> partials(count);
    for (double& partial : partials) partial = samples.log_uniform(1e-6, 1e12);
    compare_checks(partials);
    if (count == 0) continue;
    for (const size_t place : {size_t{0}, count / 2, count - 1}) {
      for (const double poison : {std::nan(""), HUGE_VAL}) {
        std::vector<double> poisoned = partials;
        poisoned[place] = poison;
        compare_checks(poisoned);
      }
    }
  }
  compare_checks({1e308, 1e308});  // the total overflows
  for (const float loss_scale : {1.0f, 3.0f, 65536.0f}) {
    GuardRule rule;
    rule.average = 1.0 / 3;
    rule.max_norm = 0.7;
    rule.growth_interval = 3;
    compare_checks({2.0, 3.0}, rule, loss_scale);
    compare_checks({1e308, 1e308}, rule, loss_scale);
    for (const double last_norm : {0.0, 0.5, 7.0}) {
      for (const double sum : {0.0, 1e-3, 1e3, HUGE_VAL}) {
        GradientCheck before;
        before.loss_scale = loss_scale;
        before.last_norm = last_norm;
        compare_early_factors(sum, rule, before);
      }
    }
    rule.max_norm = 0;
    rule.growth_interval = 0;
    compare_checks({2.0, 3.0}, rule, loss_scale);
  }
}

}  // namespace pacer::kernels::testing
