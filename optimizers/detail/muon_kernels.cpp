#include <pacer/optimizers/detail/muon_kernels.h>

#include <algorithm>
#include <cmath>

#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/linalg_vector_norm.h>

#include <pacer/optimizers/detail/orthogonalize.h>
#include <pacer/optimizers/detail/product_share.h>
#include <pacer/optimizers/detail/tile_loop.h>

namespace pacer::detail {
namespace {

// So many elements at most are orthogonalised at once, because the products need some three times the memory.
constexpr int64_t kElementsAtOnce = int64_t{1} << 26;
// Added to a root before something is divided by it, as in NorMuon.
constexpr double kSmallestRoot = 1e-10;

}  // namespace

void MuonKernels::send(const std::vector<kernels::AdamGradient>& gradients) {
  directions_.send(device_);
  if (settings_.normalizes_rows) rows_.send(device_);
  for (size_t i = 0; i < matrices_; ++i) {
    const auto [gradient, scalars] = gradients[i];
    updates_.set(i, {gradient == nullptr ? nullptr : results_[i], scalars});
    if (share_ != nullptr) own_gradients_.set(i, {makes_direction_[i] != 0 ? gradient : nullptr, scalars});
  }
  updates_.send(device_);
  if (share_ != nullptr) own_gradients_.send(device_);
}

// Matrices that sit the step out are orthogonalised with the others, and nobody reads them.
void MuonKernels::orthogonalize(const Batch& batch, const at::Tensor& into, double scale,
                                const Step* like_rows) const {
  const auto [rows, columns] = piece_of(batch);
  // On a CPU one by one, so that its bits do not depend on how many there are, and on where results lie.
  const int64_t at_once = device_.is_cpu() ? 1 : std::max<int64_t>(1, kElementsAtOnce / batch.like.numel());
  for (int64_t first = batch.begin; first < batch.end; first += at_once) {
    const int64_t now = std::min(at_once, batch.end - first);
    const std::vector<int64_t> pieces = {now * settings_.split, rows, columns};
    const int64_t place = first - batch.first_direction;
    const at::Tensor directions = batch.directions.narrow(0, place, now).reshape(pieces);
    const at::Tensor to = into.narrow(0, place, now);
    // The last product writes there where it can.
    const bool is_direct = device_.is_cuda() && like_rows == nullptr && to.is_contiguous() &&
                           to.scalar_type() == directions.scalar_type();
    at::Tensor made = orthogonalized(directions, settings_.coefficients, settings_.iterations,
                                     like_rows ? 1 : scale, is_direct ? to.view(pieces) : at::Tensor());
    if (is_direct) continue;
    if (like_rows) made = with_like_rows(batch, first, made, scale, *like_rows);
    to.copy_(made.view(to.sizes()));
  }
}

void MuonKernels::make_results(const Batch& batch, const Step& step) const {
  const auto [rows, columns] = piece_of(batch);
  const double adjustment =
      settings_.adjustment == MuonAdjustment::match_rms_adamw
          ? 0.2 * std::sqrt(static_cast<double>(std::max(rows, columns)))
          : std::sqrt(std::max(1.0, static_cast<double>(rows) / static_cast<double>(columns)));
  orthogonalize(batch, share_ ? batch.directions : batch.results, adjustment,
                settings_.normalizes_rows ? &step : nullptr);
}

// While one batch travels the next one is made.
void MuonKernels::make_results_of_parts(const Step& step) {
  std::vector<Work> coming, going;
  for (const Batch& batch : batches_) coming.push_back(batch.parts.gather(share_->ranks()));
  for (size_t b = 0; b < batches_.size(); ++b) {
    const Batch& batch = batches_[b];
    coming[b].wait();
    make_results(batch, step);
    going.push_back(batch.parts.scatter(share_->ranks()));
    if (settings_.normalizes_rows) going.push_back(share_->gather(batch.fresh, batch.bounds));
  }
  for (Work& work : going) work.wait();
  if (!result_parts_.is_same(direction_parts_)) result_parts_.copy_(direction_parts_);
}

void MuonKernels::make_shared_results(const Step& step) {
  std::vector<Work> under_way;
  for (const Batch& batch : batches_) {
    make_results(batch, step);
    const int64_t count = batch.like.numel();
    const at::Tensor flat = batch.directions.as_strided({batch.directions.size(0), count}, {count, 1});
    under_way.push_back(share_->gather(flat, batch.bounds));
    if (settings_.normalizes_rows) under_way.push_back(share_->gather(batch.fresh, batch.bounds));
  }
  for (Work& work : under_way) work.wait();
  for (const Batch& batch : batches_) {
    if (!batch.results.is_same(batch.directions)) batch.results.copy_(batch.directions);
  }
}

// Each of them so that the root of its mean square is 1, because matrices of all shapes may share a scale. Those
// that sit the step out bring nothing.
void MuonKernels::bring_own_directions() {
  for (const Batch& batch : batches_) {
    const auto [rows, columns] = piece_of(batch);
    const double scale = std::sqrt(static_cast<double>(std::max(rows, columns)));
    orthogonalize(batch, batch.directions, scale, /*like_rows=*/nullptr);
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
    return loops_.momentum_cuda(launch, tiles, step.tensors, step.gradients, directions, step.scalars,
                                current_stream(device_));
  }
  for_each_tile(units, [&](int64_t i) {
    loops_.momentum_cpu(launch, units[static_cast<size_t>(i)], step.tensors, step.gradients, directions,
                        step.scalars);
  });
}

void MuonKernels::orthogonalize(const Step& step, const std::vector<Tile>& units,
                                const kernels::AdamTiles& tiles) {
  Step of_part = step;
  if (share_ != nullptr) of_part.gradients = own_gradients_.pointer();
  run_momentum(directions_.pointer(), of_part, units, tiles);
  if (exchange_ != nullptr) return bring_own_directions();
  if (share_ != nullptr) return parts_.empty() ? make_shared_results(step) : make_results_of_parts(step);
  for (const Batch& batch : batches_) make_results(batch, step);
}

void MuonKernels::take_mean(const Step& step) {
  at::_foreach_copy_(own_, shared_);
  for (const Batch& batch : batches_) make_results(batch, step);
}

const kernels::AdamGradient* MuonKernels::step(const Step& step, const std::vector<Tile>& units,
                                               const kernels::AdamTiles& tiles) {
  run_momentum(nullptr, step, units, tiles);
  run_rows(0, static_cast<int64_t>(rows_.host().size()), /*stores=*/true, step);
  return updates_.pointer();
}

}  // namespace pacer::detail
