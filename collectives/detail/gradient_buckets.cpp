#include <pacer/collectives/detail/gradient_buckets.h>

#include <algorithm>
#include <map>
#include <utility>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <torch/csrc/autograd/utils/grad_layout_contract.h>

#include <pacer/core/tile.h>

namespace pacer::detail {
namespace {

// Views begin at multiples of this, so that kernels may use wide accesses.
constexpr int64_t kAlignment = 128;  // elements

// A view of the parameter's shape, in its memory order where that has no gaps, as autograd makes gradients.
// Autograd is not told that it is a view: it would refuse Optimizer::zero_grad, which detaches in place.
at::Tensor view_like(const at::Tensor& flat, int64_t offset, const at::Tensor& parameter) {
  const at::AutoDispatchBelowADInplaceOrView untracked;
  const at::Tensor piece = flat.narrow(0, offset, parameter.numel());
  if (!parameter.is_non_overlapping_and_dense()) return piece.view(parameter.sizes());
  return piece.as_strided(parameter.sizes(), parameter.strides(), piece.storage_offset());
}

at::Tensor empty_gradient(const at::Tensor& parameter) {
  const at::TensorOptions options = parameter.options().requires_grad(false);
  if (!parameter.is_non_overlapping_and_dense()) return at::empty(parameter.sizes(), options);
  return at::empty_strided(parameter.sizes(), parameter.strides(), options);
}

constexpr int64_t kBucketBytes = 25 << 20, kBucketBytesInPlace = 100 << 20;
constexpr int64_t kBucketsInPlace = 12;  // enough of them to travel while backward runs

}  // namespace

int64_t default_bucket_bytes(const std::vector<BucketedParameter>& parameters, bool in_place) {
  if (!in_place) return kBucketBytes;
  int64_t all = 0;
  for (const BucketedParameter& entry : parameters) all += static_cast<int64_t>(entry.parameter.nbytes());
  return std::clamp(all / kBucketsInPlace, kBucketBytes, kBucketBytesInPlace);
}

std::vector<Bucket> make_buckets(std::vector<BucketedParameter>& parameters, const std::vector<size_t>& order,
                                 int64_t bucket_bytes, int64_t first_bucket_bytes) {
  std::vector<Bucket> buckets;
  std::map<std::pair<at::ScalarType, bool>, size_t> open;  // the bucket that fills, by kind of gradient
  for (const size_t position : order) {
    BucketedParameter& entry = parameters[position];
    const auto size = static_cast<int64_t>(entry.parameter.element_size());
    const auto [found, is_new] =
        open.emplace(std::make_pair(entry.parameter.scalar_type(), entry.may_stay_local), buckets.size());
    const int64_t limit = found->second == 0 ? first_bucket_bytes : bucket_bytes;
    const bool full = !is_new && buckets[found->second].elements * size >= limit;
    if (full) found->second = buckets.size();
    if (is_new || full) buckets.emplace_back();
    entry.view = at::Tensor();
    Bucket& bucket = buckets[found->second];
    bucket.dtype = entry.parameter.scalar_type();
    bucket.elements += round_up(entry.parameter.numel(), kAlignment);
    bucket.parameters.push_back(position);
  }
  return buckets;
}

void make_flat(Bucket& bucket, std::vector<BucketedParameter>& parameters) {
  const at::Tensor& first = parameters[bucket.parameters.front()].parameter;
  bucket.flat = at::empty({bucket.elements}, first.options().requires_grad(false));
  bucket.flat.zero_();  // the padding travels, too
  int64_t offset = 0;
  for (const size_t position : bucket.parameters) {
    BucketedParameter& entry = parameters[position];
    entry.view = view_like(bucket.flat, offset, entry.parameter);
    offset += round_up(entry.parameter.numel(), kAlignment);
  }
}

void make_own(at::Tensor& gradient, const at::Tensor& parameter) {
  const bool fits = gradient.scalar_type() == parameter.scalar_type() &&
                    gradient.device() == parameter.device() && !gradient.is_neg() && !gradient.is_conj() &&
                    !gradient._is_zerotensor() &&
                    torch::autograd::utils::obeys_layout_contract(gradient, parameter);
  // Backward may still read, or another parameter have as its gradient, what this one is a view of.
  if (fits && gradient.storage().use_count() == 1) return;
  const at::NoGradGuard no_grad;
  at::Tensor copy = empty_gradient(parameter);
  copy.copy_(gradient);
  gradient = copy;
}

at::Tensor zero_gradient(const at::Tensor& parameter) {
  const at::NoGradGuard no_grad;
  return empty_gradient(parameter).zero_();
}

at::Tensor flat_view(const at::Tensor& gradient) {
  const at::AutoDispatchBelowADInplaceOrView untracked;
  return gradient.as_strided({gradient.numel()}, {1}, gradient.storage_offset());
}

}  // namespace pacer::detail
