// N4: tensors of more than 2^31 and 2^32 elements on the GPU, where a 32-bit size or index
// anywhere would leave elements out or update them twice. The contents repeat with a period
// that no power of two shares, so that the result of every element is known from one period
// on the CPU, and element i differs from element i modulo 2^32. All are compared.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include <pacer/kernels/adam.h>

#include "support/catch.h"
#include "support/kernels/adam_arrays.h"
#include "support/kernels/cuda_adam.h"

namespace pacer::kernels::testing {
namespace {

using pacer::testing::check_cuda;
using pacer::testing::has_gpu;
using pacer::testing::wants_small_tests;

constexpr int64_t kPeriod = 1000003;  // a prime
constexpr int64_t kFirstElement = 3;

int64_t beyond_power(int exponent) {
  return (int64_t{1} << (wants_small_tests() ? exponent - 10 : exponent)) + 1;
}

bool fits_on_gpu(AdamStorage storage, int64_t count) {
  size_t free = 0, total = 0;
  check_cuda(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  size_t needed = size_t{4} << 30;
  for (const int array : {kGradient, kParameter, kExpAvg, kExpAvgSq, kExtra}) {
    needed += static_cast<size_t>(count) * bytes_of(type_of(storage, array));
  }
  return needed < free;
}

// One tensor without amsgrad whose elements repeat those of one period.
class PeriodicTensor {
 public:
  PeriodicTensor(AdamArrays& period, int64_t count) : period_(period), count_(count) {
    for (const int array : kKept) {
      memory_.emplace_back(static_cast<size_t>(count) * period.element(array));
      repeat(array);
    }
  }

  void step(const RuleSettings& settings, int64_t t) {
    AdamGroupScalars scalars;
    scalars.set(0, period_.storage(), settings, t);
    const DeviceArray<StepScalars> device_scalars(scalars.all());
    const CutTiles cut = cut_for_gpu(period_.storage(), {count_}, Cut::blocks);
    const DeviceArray<Tile> tiles(cut.tiles);
    const DeviceArray<AdamTensor> tensor(std::vector<AdamTensor>{
        {at(kParameter), at(kExpAvg), at(kExpAvgSq), nullptr, nullptr, kFirstElement}});
    const DeviceArray<AdamGradient> gradient(std::vector<AdamGradient>{{at(kGradient), 0}});
    adam_cuda({period_.storage(), false}, {tiles.data(), cut.block_tiles, cut.warp_tiles}, tensor.data(),
              gradient.data(), device_scalars.data(), nullptr);
    synchronize();
  }

  // Elements of parameter and moments, of all `count`, that differ from those of the period.
  int64_t differing_from(const AdamArrays& period) const {
    constexpr int64_t kPeriodsAtOnce = 32;
    int64_t differing = 0;
    for (const int array : {kParameter, kExpAvg, kExpAvgSq}) {
      const size_t width = period.element(array);
      std::vector<unsigned char> chunk(static_cast<size_t>(kPeriodsAtOnce * kPeriod) * width);
      for (int64_t first = 0; first < count_; first += kPeriodsAtOnce * kPeriod) {
        const int64_t size = std::min(kPeriodsAtOnce * kPeriod, count_ - first);
        of(array).download(chunk.data(), static_cast<size_t>(size) * width,
                           static_cast<size_t>(first) * width);
        for (int64_t i = 0; i < size; i += kPeriod) {
          const unsigned char* mine = chunk.data() + static_cast<size_t>(i) * width;
          const int64_t length = std::min(kPeriod, size - i);
          if (std::memcmp(mine, period.data(array), static_cast<size_t>(length) * width) == 0) continue;
          for (int64_t k = 0; k < length; ++k) {
            const size_t offset = static_cast<size_t>(k) * width;
            differing += std::memcmp(mine + offset, period.data(array) + offset, width) != 0;
          }
        }
      }
    }
    return differing;
  }

  // Whether element i of parameter and moments is that of `one`, a tensor of one element.
  bool has(int64_t i, const AdamArrays& one) const {
    for (const int array : {kParameter, kExpAvg, kExpAvgSq}) {
      unsigned char mine[8];
      of(array).download(mine, one.element(array), static_cast<size_t>(i) * one.element(array));
      if (std::memcmp(mine, one.data(array), one.element(array)) != 0) return false;
    }
    return true;
  }

 private:
  static constexpr int kKept[] = {kGradient, kParameter, kExpAvg, kExpAvgSq};

  const DeviceMemory& of(int array) const { return memory_[static_cast<size_t>(array)]; }
  void* at(int array) const { return of(array).data(); }

  // Uploads one period and doubles what is there until all is filled.
  void repeat(int array) {
    DeviceMemory& memory = memory_[static_cast<size_t>(array)];
    size_t filled = std::min(period_.size(array), memory.size());
    memory.upload(period_.data(array), filled);
    while (filled < memory.size()) {
      const size_t more = std::min(filled, memory.size() - filled);
      check_cuda(cudaMemcpy(memory.data() + filled, memory.data(), more, cudaMemcpyDeviceToDevice), "a copy");
      filled += more;
    }
    check_cuda(cudaDeviceSynchronize(), "a copy");
  }

  AdamArrays& period_;
  int64_t count_;
  std::vector<DeviceMemory> memory_;
};

AdamArrays random_period(AdamStorage storage) {
  Samples samples(1);
  AdamArrays period(storage, kPeriod);
  period.fill(samples, Fill::plain);
  return period;
}

// Empty if every element of a tensor of this size was updated once and as on the CPU.
std::string flaw_in_large_step(AdamStorage storage, int64_t count) {
  AdamArrays period = random_period(storage);
  PeriodicTensor tensor(period, count);
  if (tensor.differing_from(period) != 0) return "the tensor was not filled";
  const RuleSettings settings = settings_with(WeightDecay::decoupled);
  tensor.step(settings, 4);
  AdamArrays expected(storage, kPeriod);
  expected.copy_from(period);
  step_on_cpu(expected, false, settings, 4);
  const int64_t differing = tensor.differing_from(expected);
  return differing == 0 ? "" : std::to_string(differing) + " elements differ";
}

}  // namespace

TEST_CASE("N4: a bf16 tensor of 2^31 + 1 elements is updated to its end", "[kernels][adam][gpu][large]") {
  if (!has_gpu()) PACER_SKIP("no NVIDIA GPU");
  if (!fits_on_gpu(AdamStorage::bf16, beyond_power(31))) PACER_SKIP("the GPU has too little memory");
  CHECK(flaw_in_large_step(AdamStorage::bf16, beyond_power(31)) == "");
}

TEST_CASE("N4: a bf16 tensor of 2^32 + 1 elements is updated to its end", "[kernels][adam][gpu][large]") {
  if (!has_gpu()) PACER_SKIP("no NVIDIA GPU");
  if (!fits_on_gpu(AdamStorage::bf16, beyond_power(32))) PACER_SKIP("the GPU has too little memory");
  CHECK(flaw_in_large_step(AdamStorage::bf16, beyond_power(32)) == "");
}

TEST_CASE("N4: an fp32 tensor of 2^31 + 1 elements is updated to its end", "[kernels][adam][gpu][large]") {
  if (!has_gpu()) PACER_SKIP("no NVIDIA GPU");
  if (!fits_on_gpu(AdamStorage::f32, beyond_power(31))) PACER_SKIP("the GPU has too little memory");
  CHECK(flaw_in_large_step(AdamStorage::f32, beyond_power(31)) == "");
}

TEST_CASE("N4: stochastic rounding draws by 64-bit indices", "[kernels][adam][gpu][large]") {
  if (!has_gpu()) PACER_SKIP("no NVIDIA GPU");
  constexpr AdamStorage kStorage = AdamStorage::bf16_stochastic;
  const int64_t count = beyond_power(32);
  if (!fits_on_gpu(kStorage, count)) PACER_SKIP("the GPU has too little memory");
  AdamArrays period = random_period(kStorage);
  PeriodicTensor tensor(period, count);
  const RuleSettings settings = settings_with(WeightDecay::decoupled);
  tensor.step(settings, 2);

  Samples samples(2);
  std::vector<int64_t> indices{0, 1, count / 2 - 1, count / 2, count - 2, count - 1};
  while (indices.size() < 10000) indices.push_back(samples.below(count));
  int64_t wrong = 0;
  for (const int64_t i : indices) {
    AdamArrays one(kStorage, 1);
    for (int array = 0; array < kAdamArrays; ++array) {
      std::memcpy(one.data(array), period.at(array, i % kPeriod), one.element(array));
    }
    step_on_cpu(one, false, settings, 2, 1, kFirstElement + i);
    wrong += !tensor.has(i, one);
  }
  CHECK(wrong == 0);
}

}  // namespace pacer::kernels::testing
