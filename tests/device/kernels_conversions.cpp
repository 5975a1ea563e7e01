// The GPU's own conversions between float and 16-bit formats against those of the host, seen through an Adam
// step that leaves the numbers as they are: on every boundary of rounding, and for every 16-bit number.
#include <cstdint>
#include <vector>

#include <pacer/kernels/adam.h>

#include "support/catch.h"
#include "support/kernels/adam_arrays.h"
#include "support/kernels/cuda_adam.h"
#include "support/kernels/half_reference.h"

namespace pacer::kernels::testing {
namespace {

using pacer::testing::for_floats_around_every_boundary;
using pacer::testing::has_gpu;
using pacer::testing::wants_small_tests;

// No learning rate and no memory: the parameter stays and the first moment becomes the gradient.
RuleSettings settings_that_keep_numbers() {
  RuleSettings settings;
  settings.learning_rate = 0;
  settings.beta1 = 0;
  settings.beta2 = 0;
  settings.epsilon = 1;
  settings.bias_correction = 0;
  return settings;
}

// Elements whose parameter is, one after the other, each of the values; everything else is zero.
std::vector<AdamArrays> with_parameters(AdamStorage storage, const std::vector<float>& values) {
  std::vector<AdamArrays> tensors;
  tensors.emplace_back(storage, static_cast<int64_t>(values.size()));
  AdamArrays& tensor = tensors.back();
  for (int64_t i = 0; i < tensor.count(); ++i) {
    for (int array = 0; array < kExtra; ++array) tensor.set(array, i, 0.0);
    tensor.set_master(i, values[static_cast<size_t>(i)]);
  }
  return tensors;
}

int64_t differing_after_a_step(std::vector<AdamArrays>& tensors) {
  AdamGroupScalars scalars;
  scalars.set(0, tensors[0].storage(), settings_that_keep_numbers(), 1);
  DeviceAdamList list(tensors, Cut::mixed, false);
  list.step(scalars);
  step_on_cpu(tensors[0], false, settings_that_keep_numbers(), 1);
  return list.differing_from(tensors);
}

}  // namespace

TEST_CASE("floats on every boundary of rounding are converted alike on GPU and CPU", "[kernels][half][gpu]") {
  if (!has_gpu()) PACER_SKIP("no NVIDIA GPU");
  for (const AdamStorage storage : {AdamStorage::bf16_master, AdamStorage::f16_master,
                                    AdamStorage::bf16_remainder, AdamStorage::bf16_correction}) {
    INFO(name_of(storage));
    std::vector<float> values;
    const int kept = wants_small_tests() ? 12 : storage == AdamStorage::f16_master ? 19 : 16;
    for_floats_around_every_boundary(kept, [&](float value) { values.push_back(value); });
    std::vector<AdamArrays> tensors = with_parameters(storage, values);
    // The step must compute the 16-bit parameter from the master value, so it must not be there before.
    if (storage == AdamStorage::bf16_master || storage == AdamStorage::f16_master) {
      for (int64_t i = 0; i < tensors[0].count(); ++i) tensors[0].set(kParameter, i, 0.0);
    }
    CHECK(differing_after_a_step(tensors) == 0);
  }
}

TEST_CASE("every bf16 with a correction is read and stored alike on GPU and CPU", "[kernels][half][gpu]") {
  if (!has_gpu()) PACER_SKIP("no NVIDIA GPU");
  const int count = wants_small_tests() ? 2 : 16;
  for (int c = 0; c < 256; c += 256 / count) {
    std::vector<AdamArrays> tensors =
        with_parameters(AdamStorage::bf16_correction, std::vector<float>(1 << 16, 0.0f));
    for (int64_t i = 0; i < tensors[0].count(); ++i) {
      const auto bits = static_cast<uint16_t>(i);
      const auto correction = static_cast<int8_t>((c + i) & 0xFF);  // also those that no float becomes
      std::memcpy(tensors[0].at(kParameter, i), &bits, sizeof bits);
      std::memcpy(tensors[0].at(kExtra, i), &correction, sizeof correction);
    }
    CHECK(differing_after_a_step(tensors) == 0);
  }
}

TEST_CASE("every 16-bit gradient is read alike on GPU and CPU", "[kernels][half][gpu]") {
  if (!has_gpu()) PACER_SKIP("no NVIDIA GPU");
  for (const AdamStorage storage : {AdamStorage::bf16_master, AdamStorage::f16_master, AdamStorage::bf16}) {
    INFO(name_of(storage));
    std::vector<AdamArrays> tensors = with_parameters(storage, std::vector<float>(1 << 16, 0.0f));
    for (int64_t i = 0; i < tensors[0].count(); ++i) {
      const uint16_t bits = static_cast<uint16_t>(i);
      std::memcpy(tensors[0].at(kGradient, i), &bits, sizeof bits);
    }
    CHECK(differing_after_a_step(tensors) == 0);
    CHECK(tensors[0].get(kExpAvg, 0x3C00) == tensors[0].get(kGradient, 0x3C00));
  }
}

}  // namespace pacer::kernels::testing
