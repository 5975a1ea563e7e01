// Adam with moments in 8 bits in the CPU loop of coded_loop.h, and the conversion of whole tensors.
#include <pacer/kernels/adam_8bit.h>

#include <algorithm>

#include <pacer/kernels/cpu/adam_decay.h>
#include <pacer/kernels/cpu/coded_loop.h>
#include <pacer/kernels/math/moment_codes.h>

namespace pacer::kernels {
namespace {

using Codes = EightBitMoments;
static_assert(Codes::kGroup == kMomentGroup);

void adam_8bit_cpu(AdamLaunch launch, const Tile& tile, const AdamTensor* tensors,
                   const AdamGradient* gradients, const StepScalars* scalars) {
  const AdamGradient& gradient = gradients[tile.tensor];
  if (gradient.gradient == nullptr) return;
  const auto& of_step = scalars[gradient.scalars].as<AdamScalars<float>>();
  if (of_step.skip) return;
  const FullDenormals full_denormals;
  with_storage(launch.storage, [&](auto storage) {
    if constexpr (storage() == AdamStorage::f64) {
      require(false, "the moments of fp64 parameters have no codes in 8 bits");
    } else {
      with_decay<false>(of_step.decay_mode, [&](auto rule) {
        step_coded_tile<decltype(rule), Codes, storage()>(tile, tensors[tile.tensor], gradient.gradient,
                                                          of_step);
      });
    }
  });
}

template <class Visit>
void with_moment(Moment moment, const Visit& visit) {
  moment == Moment::first ? visit(Codes::First(Float16{}), Codes::FirstCode{})
                          : visit(Codes::Second(Float16{}), Codes::SecondCode{});
}

}  // namespace

const UpdateLoops kAdam8BitUpdate{adam_8bit_cpu, adam_8bit_cuda};

void encode_moments_cpu(Moment moment, const float* values, int64_t count, void* codes, uint16_t* scales) {
  const FullDenormals full_denormals;
  with_moment(moment, [&](auto kind, auto code) {
    auto* const written = static_cast<decltype(code)*>(codes);
    for (int64_t begin = 0; begin < count; begin += kMomentGroup) {
      const int64_t end = std::min(begin + kMomentGroup, count);
      uint32_t largest = 0;
      for (int64_t i = begin; i < end; ++i) largest = std::max(largest, kind.measure(values[i]));
      const Float16 scale = kind.scale_of(largest);
      const decltype(kind) group(scale);
      for (int64_t i = begin; i < end; ++i) written[i] = group.encode(values[i]);
      scales[begin / kMomentGroup] = scale.bits;
    }
  });
}

void decode_moments_cpu(Moment moment, const void* codes, const uint16_t* scales, int64_t count,
                        float* values) {
  const FullDenormals full_denormals;
  with_moment(moment, [&](auto kind, auto code) {
    const auto* const read = static_cast<const decltype(code)*>(codes);
    for (int64_t i = 0; i < count; ++i) {
      values[i] = decltype(kind)(Float16{scales[i / kMomentGroup]}).decode(read[i]);
    }
  });
}

}  // namespace pacer::kernels
