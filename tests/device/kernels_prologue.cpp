// The prologue on the GPU: counts and scalars to the bit of the host's,
// held while a gradient is non-finite; and prologue and update recorded as a
// CUDA graph whose settings change in device memory between replays.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include <pacer/kernels/adam.h>

#include "support/catch.h"
#include "support/kernels/adam_arrays.h"
#include "support/kernels/cuda_adam.h"

namespace pacer::kernels::testing {
namespace {

using pacer::testing::CapturedGraph;
using pacer::testing::CudaStream;
using pacer::testing::has_gpu;
using pacer::testing::wants_small_tests;

StepGroup random_group(Samples& samples) {
  RuleSettings s;
  s.learning_rate = samples.log_uniform(1e-12, 10);
  s.beta1 = samples.chance(0.2) ? 0.0 : 1 - samples.log_uniform(1e-8, 1);
  s.beta2 = samples.chance(0.5) ? 0.999 : 1 - samples.log_uniform(1e-8, 1);
  s.epsilon = samples.log_uniform(1e-20, 1);
  s.weight_decay = samples.log_uniform(1e-6, 1);
  s.factor = samples.log_uniform(1e-6, 1e6);
  s.seed = samples.bits();
  s.decay_mode = samples.one_of({WeightDecay::none, WeightDecay::l2, WeightDecay::decoupled});
  s.bias_correction = samples.chance(0.8);
  if (samples.chance(0.3)) s.rule = UpdateRule::schedule_free;
  s.averaging = {samples.below(100), samples.chance(0.5) ? 0.0 : samples.log_uniform(0.01, 4),
                 samples.chance(0.5) ? 2.0 : samples.log_uniform(0.01, 4)};
  return {s, samples.chance(0.5) ? 1u : 0u, samples.chance(0.9) ? 1u : 0u};
}

template <class Real>
bool has_scalars(const StepScalars& scalars, AdamScalars<Real> expected, bool skip) {
  expected.skip = skip;
  // Between the decay mode and the seed, and behind the step, there may be padding.
  const auto* begin = reinterpret_cast<const unsigned char*>(&expected);
  const auto* end = reinterpret_cast<const unsigned char*>(&expected.decay_mode + 1);
  const auto& found = scalars.as<AdamScalars<Real>>();
  return std::memcmp(&found, begin, static_cast<size_t>(end - begin)) == 0 && found.seed == expected.seed &&
         found.step == expected.step;
}

// Of the step behind that count, which it then has in it.
template <class Real>
AdamScalars<Real> next_scalars(const RuleSettings& settings, StepCount& count) {
  ++count.steps;
  return settings.rule == UpdateRule::schedule_free
             ? schedule_free_scalars<Real>(settings, count.steps, count.average)
             : adam_scalars<Real>(settings, count.steps);
}

bool has_next_scalars(const StepScalars& scalars, const StepGroup& group, StepCount& count, bool skip) {
  return group.is_double ? has_scalars(scalars, next_scalars<double>(group.settings, count), skip)
                         : has_scalars(scalars, next_scalars<float>(group.settings, count), skip);
}

bool same_count(const StepCount& a, const StepCount& b) {
  return a.steps == b.steps && a.average == b.average;
}

GradientCheck check_with(double factor, bool non_finite) {
  GradientCheck check;
  check.factor = factor;
  check.non_finite = non_finite;
  return check;
}

std::vector<StepScalars> untouched(size_t count) {
  std::vector<StepScalars> scalars(count);
  for (StepScalars& s : scalars) std::memset(&s, 0xEE, sizeof s);
  return scalars;
}

// Step groups, step counts and scalars on the GPU.
struct Prologue {
  explicit Prologue(const std::vector<StepGroup>& settings, const std::vector<StepCount>& step_counts)
      : groups(settings),
        counts(step_counts),
        scalars(untouched(settings.size())),
        check(std::vector<GradientCheck>(1)),
        count(static_cast<int64_t>(settings.size())) {}

  void enqueue(Stream stream, const GradientCheck* seen) {
    adam_prologue_cuda(groups.data(), count, counts.data(), scalars.data(), seen, stream);
  }
  void run(const GradientCheck* seen) {
    enqueue(nullptr, seen);
    synchronize();
  }

  DeviceArray<StepGroup> groups;
  DeviceArray<StepCount> counts;
  DeviceArray<StepScalars> scalars;
  DeviceArray<GradientCheck> check;
  int64_t count;
};

}  // namespace

TEST_CASE("the prologue gives the scalars of the host to the bit", "[kernels][adam][gpu]") {
  if (!has_gpu()) PACER_SKIP("no NVIDIA GPU");
  Samples samples(1);
  std::vector<StepGroup> groups(wants_small_tests() ? 70 : 1000);
  std::vector<StepCount> counts(groups.size());
  for (StepGroup& group : groups) group = random_group(samples);
  for (StepCount& count : counts) {
    count.steps = samples.chance(0.3) ? samples.below(3) : static_cast<int64_t>(samples.log_uniform(1, 1e10));
    if (count.steps > 0) count.average = {samples.log_uniform(1e-6, 1e6), samples.log_uniform(1e-6, 1)};
  }
  Prologue prologue(groups, counts);
  for (int round = 0; round < 3; ++round) {
    const bool skips = round == 1;
    const double factor = samples.log_uniform(1e-6, 1);
    prologue.check.set(0, check_with(factor, skips));
    // Null means that nobody looked at the gradients: the factor of the settings holds.
    prologue.run(round == 2 ? nullptr : prologue.check.data());
    const std::vector<StepScalars> scalars = prologue.scalars.get();
    int64_t wrong = 0;
    for (size_t i = 0; i < groups.size(); ++i) {
      if (!groups[i].active) continue;
      StepGroup group = groups[i];
      if (round != 2) group.settings.factor *= factor;
      StepCount next = counts[i];
      wrong += !has_next_scalars(scalars[i], group, next, skips);
      if (!skips) counts[i] = next;
    }
    CHECK(wrong == 0);
    const std::vector<StepCount> found = prologue.counts.get();
    CHECK(std::equal(found.begin(), found.end(), counts.begin(), counts.end(), same_count));
  }
}

TEST_CASE("the prologue tells inactive step groups to skip and leaves what lies behind the last one alone",
          "[kernels][adam][gpu]") {
  if (!has_gpu()) PACER_SKIP("no NVIDIA GPU");
  for (const size_t count : {1, 31, 32, 33, 65}) {
    std::vector<StepGroup> groups(count + 1);
    for (size_t i = 0; i < groups.size(); ++i) groups[i] = {settings_with(WeightDecay::l2), 0, i % 3 == 0};
    Prologue prologue(groups, std::vector<StepCount>(count + 1, StepCount{40, {}}));
    prologue.count = static_cast<int64_t>(count);
    prologue.run(nullptr);
    const std::vector<StepCount> counts = prologue.counts.get();
    const std::vector<StepScalars> scalars = prologue.scalars.get();
    for (size_t i = 0; i < groups.size(); ++i) {
      const bool touched = i < count && groups[i].active != 0;
      CHECK(counts[i].steps == (touched ? 41 : 40));
      CHECK((scalars[i].adam.skip != 0xEEEEEEEE) == (i < count));
      if (i < count) CHECK(scalars[i].as<MomentScalars<float>>().skip == !groups[i].active);
    }
  }
}

TEST_CASE("steps queued back to back wait for each other", "[kernels][adam][gpu]") {
  if (!has_gpu()) PACER_SKIP("no NVIDIA GPU");
  // Gradients are copied, the prologue runs and two dtype sets are updated, over and over without the host
  // waiting: a kernel that starts before the one ahead of it is done reads old scalars, gradients or state.
  const int64_t count = wants_small_tests() ? 5000 : 1000000, rounds = wants_small_tests() ? 3 : 20;
  const RuleSettings settings = settings_with(WeightDecay::l2);
  Samples samples(3);
  std::vector<AdamArrays> singles, brains, pool;
  for (int i = 0; i < 2; ++i) {
    pool.emplace_back(AdamStorage::f32, count);
    pool.back().fill(samples, Fill::plain);
  }
  singles.emplace_back(AdamStorage::f32, count);
  singles[0].fill(samples, Fill::plain);
  brains.emplace_back(AdamStorage::bf16, count);
  brains[0].fill(samples, Fill::plain);
  DeviceAdamList single_list(singles, Cut::mixed, false), brain_list(brains, Cut::mixed, false);
  std::vector<DeviceMemory> device_pool;
  for (const AdamArrays& arrays : pool) {
    device_pool.emplace_back(arrays.size(kGradient));
    device_pool.back().upload(arrays.data(kGradient), arrays.size(kGradient));
  }
  Prologue prologue({{settings, 0, 1}}, {StepCount()});
  const CudaStream stream;
  auto* gradient = const_cast<void*>(single_list.gradients()[0].gradient);
  for (int64_t round = 0; round < rounds; ++round) {
    const DeviceMemory& source = device_pool[static_cast<size_t>(round % 2)];
    pacer::testing::check_cuda(
        cudaMemcpyAsync(gradient, source.data(), source.size(), cudaMemcpyDeviceToDevice, stream.get()),
        "a copy");
    prologue.enqueue(stream.get(), nullptr);
    single_list.enqueue(prologue.scalars.data(), stream.get());
    brain_list.enqueue(prologue.scalars.data(), stream.get());
    brain_list.enqueue(prologue.scalars.data(), stream.get());  // the same tensors at once again
  }
  synchronize();
  for (int64_t round = 0; round < rounds; ++round) {
    std::memcpy(singles[0].data(kGradient), pool[static_cast<size_t>(round % 2)].data(kGradient),
                singles[0].size(kGradient));
    step_on_cpu(singles[0], false, settings, round + 1);
    step_on_cpu(brains[0], false, settings, round + 1);
    step_on_cpu(brains[0], false, settings, round + 1);
  }
  CHECK(single_list.differing_from(singles) == 0);
  CHECK(brain_list.differing_from(brains) == 0);
}

TEST_CASE("a recorded step follows its settings and its flag from replay to replay", "[kernels][adam][gpu]") {
  if (!has_gpu()) PACER_SKIP("no NVIDIA GPU");
  for (const AdamStorage storage : kAllStorages) {
    INFO(name_of(storage));
    Samples samples(2);
    std::vector<AdamArrays> tensors;
    for (const int64_t count : {5, 3000, 128, 64, 700}) {
      tensors.emplace_back(storage, count, static_cast<int>(count % 3));
      tensors.back().fill(samples, Fill::mixed);
    }
    DeviceAdamList list(tensors, Cut::mixed, false);
    const uint32_t is_double = storage == AdamStorage::f64;
    RuleSettings settings = settings_with(WeightDecay::decoupled);
    Prologue prologue({{settings, is_double, 1}}, {StepCount()});
    const CudaStream stream;
    const CapturedGraph graph(stream, [&](cudaStream_t capturing) {
      prologue.enqueue(capturing, prologue.check.data());
      list.enqueue(prologue.scalars.data(), capturing);
    });
    REQUIRE(list.differing_from(tensors) == 0);  // recording runs nothing
    int64_t applied = 0;
    for (int attempt = 0; attempt < 12; ++attempt) {
      const bool skip = attempt % 5 == 3;
      settings.learning_rate = samples.log_uniform(1e-4, 0.1);
      settings.decay_mode = kAllDecays[static_cast<size_t>(attempt % 3)];
      settings.factor = samples.log_uniform(0.1, 1);
      prologue.groups.set(0, {settings, is_double, 1});
      const double clip = samples.log_uniform(0.1, 1);
      prologue.check.set(0, check_with(clip, skip));
      settings.factor *= clip;
      graph.replay(stream);
      if (!skip) {
        ++applied;
        int64_t first_element = 0;
        for (AdamArrays& tensor : tensors) {
          step_on_cpu(tensor, false, settings, applied, int64_t{1} << 30, first_element);
          first_element += tensor.count();
        }
      }
      REQUIRE(list.differing_from(tensors) == 0);
      REQUIRE(prologue.counts.get()[0].steps == applied);
    }
  }
}

}  // namespace pacer::kernels::testing
