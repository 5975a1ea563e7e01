// The Adam kernels on the GPU against those on the CPU: the same bits (all NaNs are equal) in every dtype set
// and mode, for any mixture of sizes, alignments and tiles.
#include <cmath>
#include <cstdint>
#include <vector>

#include <pacer/kernels/adam.h>

#include "support/catch.h"
#include "support/kernels/adam_arrays.h"
#include "support/kernels/cuda_adam.h"

namespace pacer::kernels::testing {
namespace {

using pacer::testing::has_gpu;
using pacer::testing::wants_small_tests;

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

std::vector<int64_t> odd_counts() {
  std::vector<int64_t> counts{0,   1,   3,   4,   0,   31,  32,   33,   127,  128,  129,  255,  256, 257,
                              511, 512, 513, 777, 800, 900, 1023, 2047, 2048, 2049, 4097, 5003, 0};
  if (!wants_small_tests()) counts.push_back(20011);
  return counts;
}

void step_all_on_cpu(std::vector<AdamArrays>& tensors, bool amsgrad, const RuleSettings& settings,
                     int64_t step) {
  int64_t first_element = 0;
  for (AdamArrays& tensor : tensors) {
    step_on_cpu(tensor, amsgrad, settings, step, int64_t{1} << 30, first_element);
    first_element += tensor.count();
  }
}

AdamGroupScalars one_group(AdamStorage storage, const RuleSettings& settings, int64_t step,
                           bool skip = false) {
  AdamGroupScalars scalars;
  scalars.set(0, storage, settings, step, skip);
  return scalars;
}

const char* name_of(Cut cut) {
  return cut == Cut::mixed ? "block and warp tiles" : cut == Cut::blocks ? "block tiles" : "warp tiles";
}

}  // namespace

TEST_CASE("the GPU updates to the bits of the CPU in every dtype set and mode", "[kernels][adam][gpu]") {
  if (!has_gpu()) PACER_SKIP("no NVIDIA GPU");
  for_every_mode([](AdamStorage storage, WeightDecay decay, bool amsgrad) {
    for (const Cut cut : {Cut::mixed, Cut::blocks, Cut::warps}) {
      if (cut != Cut::mixed && wants_small_tests()) continue;
      const bool unaligned = cut != Cut::blocks;
      std::vector<AdamArrays> tensors = random_tensors(storage, odd_counts(), Fill::wild, 1, unaligned);
      DeviceAdamList list(tensors, cut, amsgrad);
      const RuleSettings settings = settings_with(decay);
      for (int64_t step = 1; step <= 3; ++step) {
        INFO(name_of(storage, decay, amsgrad) << ", " << name_of(cut) << ", step " << step);
        list.step(one_group(storage, settings, step));
        step_all_on_cpu(tensors, amsgrad, settings, step);
        REQUIRE(list.differing_from(tensors) == 0);
      }
    }
  });
}

TEST_CASE("denormal updates have the same bits on GPU and CPU", "[kernels][adam][gpu]") {
  if (!has_gpu()) PACER_SKIP("no NVIDIA GPU");
  for_every_mode([](AdamStorage storage, WeightDecay decay, bool amsgrad) {
    INFO(name_of(storage, decay, amsgrad));
    std::vector<AdamArrays> tensors;
    tensors.emplace_back(storage, 3001);
    Samples samples(2);
    for (int64_t i = 0; i < tensors[0].count(); ++i) {
      const double wide = storage == AdamStorage::f64 ? 1e-270 : 1;
      for (int array = kGradient; array <= kMaxExpAvgSq; ++array) {
        tensors[0].set(array, i, samples.log_uniform(1e-45, 1e-36) * wide);
      }
      tensors[0].set_master(i, static_cast<float>(samples.log_uniform(1e-45, 1e-36)));
      if (storage == AdamStorage::f16_master) tensors[0].set(kGradient, i, samples.log_uniform(6e-8, 1e-4));
    }
    RuleSettings settings = settings_with(decay);
    settings.epsilon = samples.one_of({1.0, 1e-30});
    DeviceAdamList list(tensors, Cut::mixed, amsgrad);
    list.step(one_group(storage, settings, 1));
    step_all_on_cpu(tensors, amsgrad, settings, 1);
    CHECK(list.differing_from(tensors) == 0);
  });
}

TEST_CASE("quotients and roots of any size have the same bits on GPU and CPU", "[kernels][adam][gpu]") {
  if (!has_gpu()) PACER_SKIP("no NVIDIA GPU");
  const int64_t count = wants_small_tests() ? 2000 : 300000;
  for (const AdamStorage storage : {AdamStorage::f32, AdamStorage::f64}) {
    std::vector<AdamArrays> tensors;
    tensors.emplace_back(storage, count);
    Samples samples(3);
    const double low = storage == AdamStorage::f64 ? 1e-300 : 1e-38, high = 1 / low;
    for (int64_t i = 0; i < count; ++i) {
      tensors[0].set(kGradient, i, samples.sign() * samples.log_uniform(low, std::sqrt(high)));
      tensors[0].set(kParameter, i, 0.0);  // the update itself is left, unrounded by what it is added to
      tensors[0].set(kExpAvg, i, samples.sign() * samples.log_uniform(low, high));
      tensors[0].set(kExpAvgSq, i, samples.log_uniform(low, high));
      tensors[0].set(kMaxExpAvgSq, i, 0.0);
      if (i % 16 < 4) tensors[0].set(kExpAvg, i, i % 2 == 0 ? 0.0 : -0.0);
      if (i % 16 < 8) tensors[0].set(kGradient, i, 0.0);
      if (i % 16 < 2) tensors[0].set(kExpAvgSq, i, 0.0);   // 0 / 0
      if (i % 16 == 4) tensors[0].set(kExpAvgSq, i, 0.0);  // a number / 0
    }
    RuleSettings settings = settings_with(WeightDecay::none);
    settings.epsilon = 0;
    DeviceAdamList list(tensors, Cut::blocks, false);
    list.step(one_group(storage, settings, 7));
    step_all_on_cpu(tensors, false, settings, 7);
    CHECK(list.differing_from(tensors) == 0);
  }
}

TEST_CASE("one launch updates ten thousand tensors of 64 elements", "[kernels][adam][gpu]") {
  if (!has_gpu()) PACER_SKIP("no NVIDIA GPU");
  const std::vector<int64_t> counts(wants_small_tests() ? 100 : 10000, 64);
  for (const AdamStorage storage : {AdamStorage::f32, AdamStorage::bf16, AdamStorage::bf16_stochastic}) {
    INFO(name_of(storage));
    std::vector<AdamArrays> tensors = random_tensors(storage, counts, Fill::mixed, 4, true);
    DeviceAdamList list(tensors, Cut::mixed, false);
    list.step(one_group(storage, settings_with(WeightDecay::decoupled), 2));
    step_all_on_cpu(tensors, false, settings_with(WeightDecay::decoupled), 2);
    CHECK(list.differing_from(tensors) == 0);
  }
}

TEST_CASE("on the GPU a tensor without a gradient, or told to skip, is left alone", "[kernels][adam][gpu]") {
  if (!has_gpu()) PACER_SKIP("no NVIDIA GPU");
  for (const AdamStorage storage : kAllStorages) {
    INFO(name_of(storage));
    std::vector<AdamArrays> tensors = random_tensors(storage, {100, 5000, 33, 700}, Fill::mixed, 5, true);
    DeviceAdamList list(tensors, Cut::mixed, true);
    const RuleSettings settings = settings_with(WeightDecay::l2);
    list.step(one_group(storage, settings, 1, true));
    CHECK(list.differing_from(tensors) == 0);

    std::vector<AdamGradient> gradients = list.gradients();
    gradients[0].gradient = gradients[3].gradient = nullptr;
    list.set_gradients(gradients);
    list.step(one_group(storage, settings, 1));
    CHECK(list.differing_from(tensors) != 0);
    step_on_cpu(tensors[1], true, settings, 1, 4096, 100);
    step_on_cpu(tensors[2], true, settings, 1, 4096, 5100);
    CHECK(list.differing_from(tensors) == 0);
  }
}

TEST_CASE("on the GPU every tensor uses the scalars that its gradient names", "[kernels][adam][gpu]") {
  if (!has_gpu()) PACER_SKIP("no NVIDIA GPU");
  for (const AdamStorage storage : kAllStorages) {
    INFO(name_of(storage));
    std::vector<AdamArrays> tensors =
        random_tensors(storage, {100, 5000, 33, 700, 64}, Fill::mixed, 6, false);
    DeviceAdamList list(tensors, Cut::mixed, false);
    std::vector<AdamGradient> gradients = list.gradients();
    AdamGroupScalars scalars(3);
    RuleSettings settings[3];
    for (int64_t group = 0; group < 3; ++group) {
      settings[group] = settings_with(kAllDecays[static_cast<size_t>(group)]);
      settings[group].learning_rate *= static_cast<double>(group + 1);
      scalars.set(group, storage, settings[group], 10 * group + 1, group == 1);
    }
    constexpr int64_t kGroups[] = {2, 0, 1, 2, 0};
    int64_t first_element = 0;
    for (size_t t = 0; t < tensors.size(); ++t) {
      gradients[t].scalars = kGroups[t];
      if (kGroups[t] != 1) {  // step group 1 says skip
        step_on_cpu(tensors[t], false, settings[kGroups[t]], 10 * kGroups[t] + 1, 4096, first_element);
      }
      first_element += tensors[t].count();
    }
    list.set_gradients(gradients);
    list.step(scalars);
    CHECK(list.differing_from(tensors) == 0);
  }
}

TEST_CASE("a launch without any tile does nothing", "[kernels][adam][gpu]") {
  if (!has_gpu()) PACER_SKIP("no NVIDIA GPU");
  for (const AdamStorage storage : kAllStorages) {
    std::vector<AdamArrays> tensors = random_tensors(storage, {0, 0}, Fill::plain, 7, false);
    DeviceAdamList list(tensors, Cut::mixed, false);
    CHECK_NOTHROW(list.step(one_group(storage, settings_with(WeightDecay::none), 1)));
  }
}

TEST_CASE("tiles for blocks and warps are whole packets", "[kernels][adam][gpu]") {
  for (const AdamStorage storage : kAllStorages) {
    CHECK(adam_cuda_block_tile(storage) % 64 == 0);
    CHECK(adam_cuda_warp_tile(storage) % 64 == 0);
    CHECK(adam_cuda_warp_tile(storage) < adam_cuda_block_tile(storage));
  }
}

}  // namespace pacer::kernels::testing
