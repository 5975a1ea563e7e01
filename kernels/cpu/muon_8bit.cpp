// The CPU loops of Muon's momentum in 8 bits. Groups of codes are decoded and encoded while they are in the core's own
// cache; the element arithmetic is kernels/math.
#include <pacer/kernels/muon_8bit.h>

#include <algorithm>

#include <pacer/kernels/cpu/element_loop.h>
#include <pacer/kernels/math/moment_codes.h>
#include <pacer/kernels/math/muon.h>

namespace pacer::kernels {
namespace {

using First = EightBitMoments::First;
constexpr int64_t kMomentumGroup = EightBitMoments::kGroup;

// The memory of a tile.
template <class Param>
struct CodedMomentum {
  const Param* gradient;
  int8_t* exp_avg;
  Float16* scale;
  int64_t count;
};

// A function of its own, so that the loops over it vectorise.
template <class Param>
PACER_HOST_DEVICE float new_momentum(const CodedMomentum<Param>& range, int64_t i, const First& was,
                                     bool nesterov, const AdamScalars<float>& scalars, float& direction) {
  float momentum = was.decode(range.exp_avg[i]);
  direction = muon_direction(load(range.gradient[i]), nesterov, scalars, momentum);
  return momentum;
}

template <class Param, class Direction>
PACER_TARGET_CLONES void directions_of_groups(const CodedMomentum<Param>& r, Direction* directions,
                                              bool nesterov, const AdamScalars<float>& s) {
  const CodedMomentum<Param> range = r;  // local copies: nothing the loop writes can alias them
  const AdamScalars<float> scalars = s;
  for (int64_t begin = 0; begin < range.count; begin += kMomentumGroup) {
    const First was(range.scale[begin / kMomentumGroup]);
    const int64_t end = std::min(begin + kMomentumGroup, range.count);
    PACER_SIMD
    for (int64_t i = begin; i < end; ++i) {
      float direction;
      new_momentum(range, i, was, nesterov, scalars, direction);
      store(direction, directions[i]);
    }
  }
}

template <class Param>
PACER_TARGET_CLONES void momentum_of_groups(const CodedMomentum<Param>& r, const AdamScalars<float>& s) {
  const CodedMomentum<Param> range = r;
  const AdamScalars<float> scalars = s;
  for (int64_t begin = 0; begin < range.count; begin += kMomentumGroup) {
    const int64_t count = std::min(kMomentumGroup, range.count - begin);
    float momentum[kMomentumGroup];
    uint32_t largest = 0;
    const First was(range.scale[begin / kMomentumGroup]);
    PACER_SIMD
    for (int64_t i = 0; i < count; ++i) {
      float direction;
      momentum[i] = new_momentum(range, begin + i, was, /*nesterov=*/false, scalars, direction);
    }
    for (int64_t i = 0; i < count; ++i) largest = std::max(largest, First::measure(momentum[i]));
    range.scale[begin / kMomentumGroup] = EightBitMoments::First::scale_of(largest);
    const First now(range.scale[begin / kMomentumGroup]);
    PACER_SIMD
    for (int64_t i = 0; i < count; ++i) range.exp_avg[begin + i] = now.encode(momentum[i]);
  }
}

}  // namespace

const MuonLoops kMuon8BitLoops{muon_8bit_momentum_cpu, muon_8bit_momentum_cuda};

void muon_8bit_momentum_cpu(MuonLaunch launch, const Tile& tile, const AdamTensor* tensors,
                            const AdamGradient* gradients, void* const* directions,
                            const StepScalars* scalars) {
  const AdamGradient& gradient = gradients[tile.tensor];
  if (gradient.gradient == nullptr) return;
  const auto& of_step = scalars[gradient.scalars].as<AdamScalars<float>>();
  if (of_step.skip) return;
  const FullDenormals full_denormals;
  with_storage(launch.storage, [&](auto chosen) {
    using Param = typename StorageOf<chosen()>::Param;
    if constexpr (chosen() == AdamStorage::f64) {
      require(false, "the momentum of fp64 parameters has no codes in 8 bits");
    } else {
      const AdamTensor& tensor = tensors[tile.tensor];
      const CodedMomentum<Param> range{
          static_cast<const Param*>(gradient.gradient) + tile.offset,
          static_cast<int8_t*>(tensor.exp_avg) + tile.offset,
          static_cast<Float16*>(tensor.exp_avg_scale) + tile.offset / kMomentumGroup, int64_t{tile.count}};
      if (directions == nullptr) return momentum_of_groups(range, of_step);
      const auto run = [&](auto* first) {
        directions_of_groups(range, first + tile.offset, launch.nesterov, of_step);
      };
      launch.type == DirectionType::bf16 ? run(static_cast<BFloat16*>(directions[tile.tensor]))
                                         : run(static_cast<float*>(directions[tile.tensor]));
    }
  });
}

}  // namespace pacer::kernels
