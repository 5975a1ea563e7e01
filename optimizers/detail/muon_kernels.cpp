#include <pacer/optimizers/detail/muon_kernels.h>

#include <algorithm>
#include <cmath>

#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/zeros.h>

#include <pacer/optimizers/detail/direction_exchange.h>
#include <pacer/optimizers/detail/orthogonalize.h>
#include <pacer/optimizers/detail/tile_loop.h>

namespace pacer::detail {
namespace {

// So many elements at most are orthogonalised at once, because the products need some three times the memory.
constexpr int64_t kElementsAtOnce = int64_t{1} << 26;
// Added to a root before something is divided by it, as in NorMuon.
constexpr double kSmallestRoot = 1e-10;

}  // namespace

at::ScalarType MuonKernels::type_of_products() const {
  if (storage_ == kernels::AdamStorage::f64) return at::kDouble;
  const bool in_bf16 = settings_.precision == MuonPrecision::automatic
                           ? device_.is_cuda()
                           : settings_.precision == MuonPrecision::bf16;
  return in_bf16 ? at::kBFloat16 : at::kFloat;
}

at::ScalarType MuonKernels::type_of_rows() const {
  return storage_ == kernels::AdamStorage::f64 ? at::kDouble : at::kFloat;
}

void MuonKernels::add(const ParameterEntry& entry) {
  auto batch = std::find_if(batches_.begin(), batches_.end(), [&](const Batch& other) {
    return other.like.sizes() == entry.memory.sizes() && same_layout(other.like, entry.memory);
  });
  if (batch == batches_.end()) {
    batch = batches_.emplace(batch);
    batch->like = entry.memory;
  }
  batch->members.push_back(matrices_++);
  exchanged_.push_back(entry.exchanged.value_or(0));
  row_moments_.push_back(entry.state->row_moment());
}

void MuonKernels::build() {
  directions_.host().assign(matrices_, nullptr);
  results_.assign(matrices_, nullptr);
  updates_.host().assign(matrices_, {nullptr, 0});
  const auto options = at::TensorOptions().device(device_);
  for (Batch& batch : batches_) {
    const auto count = static_cast<int64_t>(batch.members.size());
    std::vector<int64_t> sizes = batch.like.sizes().vec(), strides = batch.like.strides().vec();
    sizes.insert(sizes.begin(), count);
    strides.insert(strides.begin(), batch.like.numel());
    const auto make = [&](at::ScalarType dtype) {
      // Zeros, as the first step may leave matrices out.
      return at::zeros({count * batch.like.numel()}, options.dtype(dtype)).as_strided(sizes, strides);
    };
    batch.directions = make(type_of_products());
    const at::ScalarType of_parameters = batch.like.scalar_type();
    batch.results = of_parameters == type_of_products() ? batch.directions : make(of_parameters);
    if (settings_.normalizes_rows) {
      batch.fresh = at::zeros({count, batch.like.size(0)}, options.dtype(type_of_rows()));
      batch.first_rows = static_cast<int64_t>(rows_.host().size());
    }
    for (int64_t k = 0; k < count; ++k) {
      const size_t matrix = batch.members[static_cast<size_t>(k)];
      directions_.host()[matrix] = batch.directions[k].mutable_data_ptr();
      results_[matrix] = batch.results[k].const_data_ptr();
      if (exchange_ != nullptr) {
        own_.push_back(batch.directions[k]);
        shared_.push_back(exchange_->direction(exchanged_[matrix]));
      }
      if (!settings_.normalizes_rows) continue;
      rows_.host().push_back({static_cast<int64_t>(matrix), row_moments_[matrix].mutable_data_ptr(),
                              batch.fresh[k].mutable_data_ptr(), batch.like.size(0)});
    }
  }
}

void MuonKernels::send(const std::vector<kernels::AdamGradient>& gradients) {
  directions_.send(device_);
  if (settings_.normalizes_rows) rows_.send(device_);
  for (size_t i = 0; i < matrices_; ++i) {
    const void* const result = gradients[i].gradient == nullptr ? nullptr : results_[i];
    kernels::AdamGradient& update = updates_.host()[i];
    if (update.gradient == result && update.scalars == gradients[i].scalars) continue;
    update = {result, gradients[i].scalars};
    updates_.mark_changed();
  }
  updates_.send(device_);
}

template <class F>
void MuonKernels::for_orthogonalized(const Batch& batch, double scale, const F& f) const {
  const int64_t all_rows = batch.like.size(0), rows = all_rows / settings_.split,
                columns = batch.like.numel() / all_rows, count = batch.directions.size(0);
  const int64_t at_once = std::max<int64_t>(1, kElementsAtOnce / batch.like.numel());
  for (int64_t first = 0; first < count; first += at_once) {
    const int64_t now = std::min(at_once, count - first);
    const at::Tensor directions = batch.directions.narrow(0, first, now);
    f(first, orthogonalized(directions.reshape({now * settings_.split, rows, columns}),
                            settings_.coefficients, settings_.iterations, scale));
  }
}

// Matrices that sit the step out are orthogonalised with the others, and nobody reads them.
void MuonKernels::orthogonalize(const Batch& batch, const Step& step) const {
  const int64_t rows = batch.like.size(0) / settings_.split,
                columns = batch.like.numel() / batch.like.size(0);
  const double adjustment =
      settings_.adjustment == MuonAdjustment::match_rms_adamw
          ? 0.2 * std::sqrt(static_cast<double>(std::max(rows, columns)))
          : std::sqrt(std::max(1.0, static_cast<double>(rows) / static_cast<double>(columns)));
  const bool like_rows = settings_.normalizes_rows;
  for_orthogonalized(batch, like_rows ? 1 : adjustment, [&](int64_t first, const at::Tensor& matrices) {
    const at::Tensor result = like_rows ? with_like_rows(batch, first, matrices, adjustment, step) : matrices;
    const at::Tensor to = batch.results.narrow(0, first, matrices.size(0) / settings_.split);
    to.copy_(result.view(to.sizes()));
  });
}

// Each of them so that the root of its mean square is 1, because matrices of all shapes may share a scale. Those
// that sit the step out bring nothing.
void MuonKernels::bring_own_directions() {
  for (const Batch& batch : batches_) {
    const int64_t rows = batch.like.size(0) / settings_.split,
                  columns = batch.like.numel() / batch.like.size(0);
    const double scale = std::sqrt(static_cast<double>(std::max(rows, columns)));
    for_orthogonalized(batch, scale, [&](int64_t first, const at::Tensor& matrices) {
      const at::Tensor to = batch.directions.narrow(0, first, matrices.size(0) / settings_.split);
      to.copy_(matrices.view(to.sizes()));
    });
    for (size_t k = 0; k < batch.members.size(); ++k) {
      if (updates_.host()[batch.members[k]].gradient == nullptr)
        batch.directions[static_cast<int64_t>(k)].zero_();
    }
  }
  at::_foreach_copy_(shared_, own_);
}

at::Tensor MuonKernels::with_like_rows(const Batch& batch, int64_t first, const at::Tensor& matrices,
                                       double scale, const Step& step) const {
  const int64_t pieces = matrices.size(0), rows = matrices.size(1), members = pieces / settings_.split;
  const at::Tensor squares =
      at::linalg_vector_norm(matrices, 2, at::IntArrayRef({2}), /*keepdim=*/false, type_of_rows())
          .square_()
          .div_(matrices.size(2));
  const at::Tensor fresh = batch.fresh.narrow(0, first, members);
  fresh.copy_(squares.view({members, rows * settings_.split}));
  run_rows(batch.first_rows + first, members, /*stores=*/false, step);
  at::Tensor factors = fresh.view({pieces, rows}).sqrt().add_(kSmallestRoot).reciprocal_();
  const auto norm = [](const at::Tensor& of_rows) { return of_rows.sum(1, /*keepdim=*/true).sqrt_(); };
  const at::Tensor before = norm(squares), after = norm(factors.square().mul_(squares));
  factors.mul_(before.div_(after.add_(kSmallestRoot)).mul_(scale));
  return matrices.mul(factors.unsqueeze(2));
}

void MuonKernels::run_rows(int64_t first, int64_t count, bool stores, const Step& step) const {
  const kernels::MuonRowsLaunch launch{storage_, stores, settings_.row_beta};
  const kernels::MuonRows* const rows = rows_.pointer() + first;
  if (device_.is_cuda()) {
    kernels::muon_rows_cuda(launch, rows, count, step.gradients, step.scalars, current_stream(device_));
  } else {
    kernels::muon_rows_cpu(launch, rows, count, step.gradients, step.scalars);
  }
}

void MuonKernels::run_momentum(void* const* directions, const Step& step, const std::vector<Tile>& units,
                               const kernels::AdamTiles& tiles) const {
  const at::ScalarType products = type_of_products();
  const kernels::DirectionType type = products == at::kDouble     ? kernels::DirectionType::f64
                                      : products == at::kBFloat16 ? kernels::DirectionType::bf16
                                                                  : kernels::DirectionType::f32;
  const kernels::MuonLaunch launch{storage_, type, settings_.nesterov};
  if (device_.is_cuda()) {
    return kernels::muon_momentum_cuda(launch, tiles, step.tensors, step.gradients, directions, step.scalars,
                                       current_stream(device_));
  }
  for_each_tile(units, [&](int64_t i) {
    kernels::muon_momentum_cpu(launch, units[static_cast<size_t>(i)], step.tensors, step.gradients,
                               directions, step.scalars);
  });
}

void MuonKernels::orthogonalize(const Step& step, const std::vector<Tile>& units,
                                const kernels::AdamTiles& tiles) {
  run_momentum(directions_.pointer(), step, units, tiles);
  if (exchange_ != nullptr) return bring_own_directions();
  for (const Batch& batch : batches_) orthogonalize(batch, step);
}

void MuonKernels::take_mean(const Step& step) {
  at::_foreach_copy_(own_, shared_);
  for (const Batch& batch : batches_) orthogonalize(batch, step);
}

const kernels::AdamGradient* MuonKernels::step(const Step& step, const std::vector<Tile>& units,
                                               const kernels::AdamTiles& tiles) {
  run_momentum(nullptr, step, units, tiles);
  run_rows(0, static_cast<int64_t>(rows_.host().size()), /*stores=*/true, step);
  return updates_.pointer();
}

}  // namespace pacer::detail
