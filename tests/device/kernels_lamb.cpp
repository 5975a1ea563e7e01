// The LAMB kernels on the GPU against those on the CPU: the same bits (all NaNs are equal) of parameters,
// moments and trust ratios in every dtype set, for any mixture of sizes, alignments and units.
#include <cmath>
#include <cstdint>
#include <vector>

#include <pacer/kernels/lamb.h>

#include "support/catch.h"
#include "support/kernels/cuda_lamb.h"

namespace pacer::kernels::testing::lamb {
namespace {

using pacer::testing::CapturedGraph;
using pacer::testing::check_cuda;
using pacer::testing::CudaStream;
using pacer::testing::has_gpu;
using pacer::testing::wants_small_tests;

std::vector<int64_t> odd_counts() {
  std::vector<int64_t> counts{0,   1,   3,    4,    0,    31,   33,    127,   128,   129,   255,   512,
                              513, 900, 2047, 2048, 2049, 4097, 30721, 32767, 32768, 32769, 40000, 0};
  if (!wants_small_tests()) counts.insert(counts.end(), {200003, 65536, 98304, 1});
  return counts;
}

std::vector<AdamArrays> random_tensors(AdamStorage storage, const std::vector<int64_t>& counts, Fill fill,
                                       uint64_t seed, bool unaligned) {
  Samples samples(seed);
  std::vector<AdamArrays> tensors;
  for (const int64_t count : counts) {
    tensors.emplace_back(storage, count, unaligned ? static_cast<int>(samples.below(9)) : 0);
    tensors.back().fill(samples, fill);
  }
  return tensors;
}

std::vector<LambRatio> step_all_on_cpu(std::vector<AdamArrays>& tensors, const RuleSettings& settings,
                                       int64_t step) {
  int64_t first_element = 0;
  std::vector<LambRatio> ratios;
  for (AdamArrays& tensor : tensors) {
    ratios.push_back(lamb_step_on_cpu(tensor, settings, step, int64_t{1} << 30, first_element).ratio);
    first_element += tensor.count();
  }
  return ratios;
}

int64_t differing_ratios(const std::vector<LambRatio>& a, const std::vector<LambRatio>& b) {
  int64_t differing = a.size() == b.size() ? 0 : -1;
  for (size_t i = 0; i < a.size() && i < b.size(); ++i) differing += !same_ratio(a[i], b[i]);
  return differing;
}

LambGroupScalars one_group(AdamStorage storage, const RuleSettings& settings, int64_t step,
                           bool skip = false) {
  LambGroupScalars scalars;
  scalars.set(0, storage, settings, step, skip);
  return scalars;
}

}  // namespace

TEST_CASE("a LAMB step has the bits of the CPU in every dtype set", "[kernels][lamb][gpu]") {
  if (!has_gpu()) PACER_SKIP("no NVIDIA GPU");
  for (const AdamStorage storage : kAllStorages) {
    for (const Fill fill : {Fill::plain, Fill::mixed}) {
      for (const Cut cut : {Cut::mixed, Cut::blocks}) {
        for (const bool unaligned : {false, true}) {
          std::vector<AdamArrays> tensors = random_tensors(storage, odd_counts(), fill, 1, unaligned);
          DeviceLambList list(tensors, cut);
          RuleSettings settings = lamb_settings_with(fill == Fill::plain ? 0.1 : 0);
          settings.min_coeff = 1e-6;
          settings.max_coeff = 1e6;
          for (int64_t step = 1; step <= 3; ++step) {
            INFO(name_of(storage) << ", fill " << static_cast<int>(fill) << ", cut " << static_cast<int>(cut)
                                  << (unaligned ? ", unaligned" : "") << ", step " << step);
            list.step(one_group(storage, settings, step));
            const std::vector<LambRatio> ratios = step_all_on_cpu(tensors, settings, step);
            REQUIRE(differing_ratios(list.ratios(), ratios) == 0);
            REQUIRE(list.differing_from(tensors) == 0);
          }
        }
      }
    }
  }
}

TEST_CASE("NaNs, infinities and denormals in LAMB have the bits of the CPU", "[kernels][lamb][gpu]") {
  if (!has_gpu()) PACER_SKIP("no NVIDIA GPU");
  for (const AdamStorage storage : kAllStorages) {
    for (const bool adapt : {false, true}) {
      INFO(name_of(storage) << (adapt ? ", adaptive" : ""));
      std::vector<AdamArrays> tensors =
          random_tensors(storage, {1, 5, 128, 3000, 40000}, Fill::wild, 2, true);
      tensors.emplace_back(storage, 3001);
      Samples samples(3);
      for (int64_t i = 0; i < 3001; ++i) {
        for (int array = kGradient; array <= kExpAvgSq; ++array) {
          tensors.back().set(array, i, samples.log_uniform(1e-45, 1e-36));
        }
        tensors.back().set_master(i, static_cast<float>(samples.log_uniform(1e-45, 1e-36)));
      }
      RuleSettings settings = lamb_settings_with();
      settings.adapt = adapt;
      DeviceLambList list(tensors, Cut::mixed);
      list.step(one_group(storage, settings, 1));
      const std::vector<LambRatio> ratios = step_all_on_cpu(tensors, settings, 1);
      CHECK(differing_ratios(list.ratios(), ratios) == 0);
      CHECK(list.differing_from(tensors) == 0);
    }
  }
}

TEST_CASE("ten thousand tensors of 64 elements take LAMB steps of their own", "[kernels][lamb][gpu]") {
  if (!has_gpu()) PACER_SKIP("no NVIDIA GPU");
  const std::vector<int64_t> counts(wants_small_tests() ? 100 : 10000, 64);
  for (const AdamStorage storage : {AdamStorage::f32, AdamStorage::bf16, AdamStorage::bf16_stochastic}) {
    for (const Cut cut : {Cut::mixed, Cut::blocks}) {
      INFO(name_of(storage));
      std::vector<AdamArrays> tensors = random_tensors(storage, counts, Fill::plain, 4, true);
      DeviceLambList list(tensors, cut);
      list.step(one_group(storage, lamb_settings_with(), 2));
      const std::vector<LambRatio> ratios = step_all_on_cpu(tensors, lamb_settings_with(), 2);
      CHECK(differing_ratios(list.ratios(), ratios) == 0);
      CHECK(list.differing_from(tensors) == 0);
    }
  }
}

TEST_CASE("on the GPU LAMB leaves alone what has no gradient or is told to skip, ratios included",
          "[kernels][lamb][gpu]") {
  if (!has_gpu()) PACER_SKIP("no NVIDIA GPU");
  for (const AdamStorage storage : kAllStorages) {
    INFO(name_of(storage));
    const std::vector<int64_t> counts{100, 5000, 33, 32768, 0};
    std::vector<AdamArrays> tensors = random_tensors(storage, counts, Fill::mixed, 5, false);
    DeviceLambList list(tensors, Cut::mixed);
    const RuleSettings settings = lamb_settings_with();
    list.step(one_group(storage, settings, 1, true));
    CHECK(list.differing_from(tensors) == 0);
    CHECK(differing_ratios(list.ratios(), std::vector<LambRatio>(5, LambRatio{-1, -1})) == 0);

    // Three step groups: the second says skip; tensors 1 and 2 sit out.
    LambGroupScalars scalars(3);
    RuleSettings slow = settings;
    slow.learning_rate = 1e-3;
    scalars.set(0, storage, settings, 7);
    scalars.set(1, storage, settings, 7, true);
    scalars.set(2, storage, slow, 3);
    std::vector<AdamGradient> gradients = list.list().gradients();
    gradients[0].scalars = 2;
    gradients[1].gradient = nullptr;
    gradients[2].scalars = 1;
    list.list().set_gradients(gradients);
    list.step(scalars);
    std::vector<LambRatio> expected(5, LambRatio{-1, -1});
    expected[0] = lamb_step_on_cpu(tensors[0], slow, 3).ratio;
    expected[3] = lamb_step_on_cpu(tensors[3], settings, 7, int64_t{1} << 30, 5133).ratio;
    expected[4] = lamb_step_on_cpu(tensors[4], settings, 7).ratio;
    CHECK(expected[4].ratio == 1);
    CHECK(differing_ratios(list.ratios(), expected) == 0);
    CHECK(list.differing_from(tensors) == 0);
  }
}

TEST_CASE("prologue and LAMB replay from a CUDA graph with a learning rate that changes",
          "[kernels][lamb][gpu]") {
  if (!has_gpu()) PACER_SKIP("no NVIDIA GPU");
  for (const AdamStorage storage : kAllStorages) {
    INFO(name_of(storage));
    std::vector<AdamArrays> tensors =
        random_tensors(storage, {5, 100, 40000, 70000, 0}, Fill::plain, 6, false);
    DeviceLambList list(tensors, Cut::mixed);
    StepGroup group{lamb_settings_with(), storage == AdamStorage::f64, 1};
    group.settings.rule = UpdateRule::lamb;
    DeviceArray<StepGroup> groups(std::vector<StepGroup>{group});
    DeviceArray<StepCount> counts(std::vector<StepCount>(1));
    DeviceArray<GradientCheck> check(std::vector<GradientCheck>(1));
    DeviceArray<StepScalars> scalars(std::vector<StepScalars>(1));
    CudaStream stream;
    const CapturedGraph graph(stream, [&](cudaStream_t captured) {
      adam_prologue_cuda(groups.data(), 1, counts.data(), scalars.data(), check.data(), captured);
      list.enqueue(scalars.data(), captured, /*follows_prologue=*/true);
    });
    int64_t applied = 0;
    for (int replay = 0; replay < 6; ++replay) {
      group.settings.learning_rate = 0.01 * (replay + 1);
      groups.set(0, group);
      GradientCheck seen;
      seen.factor = 0.5 + replay;
      seen.non_finite = replay == 3;
      check.set(0, seen);
      graph.replay(stream);
      if (!seen.non_finite) {
        RuleSettings settings = group.settings;
        settings.factor *= seen.factor;
        const auto ratios = step_all_on_cpu(tensors, settings, ++applied);
        CHECK(differing_ratios(list.ratios(), ratios) == 0);
      }
      CHECK(counts.get()[0].steps == applied);
      CHECK(list.differing_from(tensors) == 0);
    }
  }
}

TEST_CASE("trust ratios of tensors of many units have the bits of the CPU", "[kernels][lamb][gpu]") {
  if (!has_gpu()) PACER_SKIP("no NVIDIA GPU");
  // Sums as the first stage would leave them; no tiles, so that the ratios are all that is computed.
  const std::vector<int64_t> unit_counts{1, 2, 31, 33, 255, 256, 257, 700, 5000, 0};
  RuleSettings settings = lamb_settings_with();
  settings.min_coeff = 0;
  settings.max_coeff = 1e300;
  LambGroupScalars groups;
  groups.set(0, AdamStorage::f64, settings, 1);
  Samples samples(8);
  std::vector<TileRange> units_of;
  std::vector<double> sums[2];
  for (const int64_t count : unit_counts) {
    units_of.push_back({static_cast<int64_t>(sums[0].size()), count});
    for (auto& list : sums) {
      for (int64_t i = 0; i < count; ++i) list.push_back(samples.log_uniform(1e-3, 1e3));
    }
  }
  const std::vector<AdamGradient> gradients(unit_counts.size(), AdamGradient{&settings, 0});
  std::vector<LambRatio> expected(unit_counts.size());
  for (size_t t = 0; t < unit_counts.size(); ++t) {
    lamb_ratio_cpu(AdamStorage::f64, units_of[t], gradients[t], groups.data(),
                   {sums[0].data(), sums[1].data()}, &expected[t]);
  }
  const DeviceArray<double> of_parameters(sums[0]), of_updates(sums[1]);
  const DeviceArray<TileRange> device_units(units_of);
  const DeviceArray<AdamGradient> device_gradients(gradients);
  const DeviceArray<LambRatio> ratios{std::vector<LambRatio>(expected.size())};
  const DeviceArray<StepScalars> scalars(groups.all());
  const LambWork work{{nullptr, 0, 0},
                      {nullptr, 0, 0},
                      device_units.data(),
                      static_cast<int64_t>(unit_counts.size()),
                      {of_parameters.data(), of_updates.data()},
                      ratios.data(),
                      /*averages=*/nullptr};
  lamb_cuda(AdamStorage::f64, work, nullptr, device_gradients.data(), scalars.data(), false, nullptr);
  synchronize();
  CHECK(differing_ratios(ratios.get(), expected) == 0);
}

TEST_CASE("a LAMB launch without any element does nothing", "[kernels][lamb][gpu]") {
  if (!has_gpu()) PACER_SKIP("no NVIDIA GPU");
  for (const AdamStorage storage : kAllStorages) {
    std::vector<AdamArrays> tensors = random_tensors(storage, {0, 0}, Fill::plain, 7, false);
    DeviceLambList list(tensors, Cut::mixed);
    CHECK_NOTHROW(list.step(one_group(storage, lamb_settings_with(), 1)));
    for (const LambRatio& ratio : list.ratios()) CHECK(ratio.ratio == 1);
  }
}

}  // namespace pacer::kernels::testing::lamb
