// Muon's loops on a CPU: gradients and momentum are read for the directions, and again for the momentum.
#include <pacer/kernels/muon.h>

#include <type_traits>

#include <pacer/kernels/cpu/element_loop.h>
#include <pacer/kernels/math/muon.h>

namespace pacer::kernels {

const MuonLoops kMuonLoops{muon_momentum_cpu, muon_momentum_cuda};
const UpdateLoops kMuonUpdate{elements_cpu<MuonUpdate<false>>, muon_update_cuda};
const UpdateLoops kCautiousMuonUpdate{elements_cpu<MuonUpdate<true>>, cautious_muon_update_cuda};

namespace {

template <AdamStorage kStorage, class Direction>
PACER_TARGET_CLONES void directions_of_range(const AdamRange<kStorage>& r, Direction* directions,
                                             bool nesterov,
                                             const AdamScalars<typename StorageOf<kStorage>::Real>& s) {
  using Real = typename StorageOf<kStorage>::Real;
  const AdamRange<kStorage> range = r;  // local copies: nothing the loop writes can alias them
  const AdamScalars<Real> scalars = s;
  PACER_SIMD
  for (int64_t i = 0; i < range.count; ++i) {
    Real momentum = load(range.exp_avg[i]);
    store(muon_direction<Real>(load(range.gradient[i]), nesterov, scalars, momentum), directions[i]);
  }
}

template <AdamStorage kStorage>
PACER_TARGET_CLONES void momentum_of_range(const AdamRange<kStorage>& r,
                                           const AdamScalars<typename StorageOf<kStorage>::Real>& s) {
  using Real = typename StorageOf<kStorage>::Real;
  const AdamRange<kStorage> range = r;
  const AdamScalars<Real> scalars = s;
  PACER_SIMD
  for (int64_t i = 0; i < range.count; ++i) {
    Real momentum = load(range.exp_avg[i]);
    muon_direction<Real>(load(range.gradient[i]), /*nesterov=*/false, scalars, momentum);
    store(momentum, range.exp_avg[i]);
  }
}

}  // namespace

void muon_momentum_cpu(MuonLaunch launch, const Tile& tile, const AdamTensor* tensors,
                       const AdamGradient* gradients, void* const* directions, const StepScalars* scalars) {
  const AdamGradient& gradient = gradients[tile.tensor];
  if (gradient.gradient == nullptr) return;
  const FullDenormals full_denormals;
  with_storage(launch.storage, [&](auto chosen) {
    using Real = typename StorageOf<chosen()>::Real;
    const auto& of_step = scalars[gradient.scalars].template as<AdamScalars<Real>>();
    if (of_step.skip) return;
    const auto range = range_of<chosen()>(tile, tensors[tile.tensor], gradient.gradient);
    if (directions == nullptr) return momentum_of_range(range, of_step);
    const auto run = [&](auto* first) {
      directions_of_range(range, first + tile.offset, launch.nesterov, of_step);
    };
    if constexpr (std::is_same_v<Real, double>) {
      run(static_cast<double*>(directions[tile.tensor]));
    } else if (launch.type == DirectionType::bf16) {
      run(static_cast<BFloat16*>(directions[tile.tensor]));
    } else {
      run(static_cast<float*>(directions[tile.tensor]));
    }
  });
}

void muon_rows_cpu(MuonRowsLaunch launch, const MuonRows* rows, int64_t count, const AdamGradient* gradients,
                   const StepScalars* scalars) {
  const FullDenormals full_denormals;
  with_storage(launch.storage, [&](auto chosen) {
    using Real = typename StorageOf<chosen()>::Real;
    const auto one_minus_beta = static_cast<Real>(1 - launch.beta);
    for (int64_t i = 0; i < count; ++i) {
      const AdamGradient& gradient = gradients[rows[i].matrix];
      if (gradient.gradient == nullptr) continue;
      if (scalars[gradient.scalars].template as<AdamScalars<Real>>().skip) continue;
      auto* const moments = static_cast<Real*>(rows[i].moments);
      auto* const fresh = static_cast<Real*>(rows[i].fresh);
      for (int64_t r = 0; r < rows[i].count; ++r) {
        if (launch.stores) {
          moments[r] = fresh[r];
        } else {
          fresh[r] = muon_row_moment(fresh[r], one_minus_beta, moments[r]);
        }
      }
    }
  });
}

}  // namespace pacer::kernels
