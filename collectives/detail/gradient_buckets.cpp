#include <pacer/collectives/detail/gradient_buckets.h>

#include <map>
#include <utility>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>

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

}  // namespace

std::vector<Bucket> make_buckets(std::vector<BucketedParameter>& parameters, const std::vector<size_t>& order,
                                 int64_t bucket_bytes, int64_t first_bucket_bytes) {
  std::vector<Bucket> buckets;
  std::vector<int64_t> lengths;  // elements, by bucket
  std::vector<int64_t> offsets(parameters.size());
  std::map<std::pair<at::ScalarType, bool>, size_t> open;  // the bucket that fills, by kind of gradient
  for (const size_t position : order) {
    BucketedParameter& entry = parameters[position];
    const auto size = static_cast<int64_t>(entry.parameter.element_size());
    const int64_t padded = round_up(entry.parameter.numel(), kAlignment);
    const auto [found, is_new] =
        open.emplace(std::make_pair(entry.parameter.scalar_type(), entry.may_stay_local), buckets.size());
    const int64_t limit = found->second == 0 ? first_bucket_bytes : bucket_bytes;
    const bool full = !is_new && lengths[found->second] * size >= limit;
    if (full) found->second = buckets.size();
    if (is_new || full) {
      buckets.emplace_back();
      lengths.push_back(0);
    }
    entry.bucket = found->second;
    offsets[position] = lengths[entry.bucket];
    lengths[entry.bucket] += padded;
    buckets[entry.bucket].parameters.push_back(position);
  }
  for (size_t b = 0; b < buckets.size(); ++b) {
    const at::Tensor& first = parameters[buckets[b].parameters.front()].parameter;
    buckets[b].flat = at::empty({lengths[b]}, first.options().requires_grad(false));
    buckets[b].flat.zero_();  // the padding travels, too
    for (const size_t position : buckets[b].parameters) {
      BucketedParameter& entry = parameters[position];
      entry.view = view_like(buckets[b].flat, offsets[position], entry.parameter);
    }
  }
  return buckets;
}

}  // namespace pacer::detail
