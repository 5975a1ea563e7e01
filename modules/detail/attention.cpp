#include <pacer/modules/detail/attention.h>

#include <ATen/ops/scaled_dot_product_attention.h>

#include <pacer/core/error.h>

namespace pacer::detail {
namespace {

// Whether LibTorch's own form of shared heads is fast: only a GPU's kernels for 16 bits without a mask are sure to have
// it. Others may take the attention apart, with all its weights in memory.
bool shares_heads_itself(const at::Tensor& q, const std::optional<at::Tensor>& mask) {
  return q.is_cuda() && q.scalar_type() != at::kFloat && !mask;
}

// [batch, heads, sequence, channels], each head `times` times in a row.
at::Tensor repeated(const at::Tensor& x, int64_t times) {
  return x.unsqueeze(2).expand({-1, -1, times, -1, -1}).flatten(1, 2);
}

}  // namespace

at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     const std::optional<at::Tensor>& mask, double dropout, bool is_causal) {
  const int64_t heads = q.size(1), shared = k.size(1);
  if (shared == heads) return at::scaled_dot_product_attention(q, k, v, mask, dropout, is_causal);
  require(shared > 0 && heads % shared == 0 && v.size(1) == shared,
          "attention needs as many heads of keys as of values, which divide those of queries, not ", heads,
          ", ", shared, " and ", v.size(1));
  if (shares_heads_itself(q, mask)) {
    return at::scaled_dot_product_attention(q, k, v, mask, dropout, is_causal, /*scale=*/std::nullopt,
                                            /*enable_gqa=*/true);
  }
  const int64_t times = heads / shared;
  return at::scaled_dot_product_attention(q, repeated(k, times), repeated(v, times), mask, dropout,
                                          is_causal);
}

}  // namespace pacer::detail
