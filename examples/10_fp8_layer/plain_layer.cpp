#include "plain_layer.h"

#include <cmath>
#include <limits>

namespace {

torch::nn::LayerNorm layer_norm(int64_t width) {
  return torch::nn::LayerNorm(torch::nn::LayerNormOptions({width}));
}

}  // namespace

PlainLayerImpl::PlainLayerImpl(const Shape& shape, const Task& task, bool is_written_out)
    : norm1(register_module("norm1", layer_norm(shape.hidden))),
      norm2(register_module("norm2", layer_norm(shape.hidden))),
      qkv(register_module("qkv", torch::nn::Linear(shape.hidden, 3 * shape.hidden))),
      projection(register_module("projection", torch::nn::Linear(shape.hidden, shape.hidden))),
      fc1(register_module("fc1", torch::nn::Linear(shape.hidden, shape.ffn))),
      fc2(register_module("fc2", torch::nn::Linear(shape.ffn, shape.hidden))),
      shape_(shape),
      task_(task),
      is_written_out_(is_written_out) {}

torch::Tensor PlainLayerImpl::attention(const torch::Tensor& q, const torch::Tensor& k,
                                        const torch::Tensor& v) const {
  const double dropout = is_training() ? task_.dropout : 0.0;
  if (!is_written_out_) return at::scaled_dot_product_attention(q, k, v, {}, dropout, task_.is_causal);
  torch::Tensor weights = torch::matmul(q, k.transpose(-1, -2)) / std::sqrt(double(q.size(-1)));
  if (task_.is_causal) {
    const auto future = torch::ones({q.size(-2), k.size(-2)}, q.options().dtype(torch::kBool)).triu(1);
    weights = weights.masked_fill(future, -std::numeric_limits<float>::infinity());
  }
  return torch::matmul(torch::dropout(weights.softmax(-1), dropout, is_training()), v);
}

torch::Tensor PlainLayerImpl::forward(const torch::Tensor& x) {
  const int64_t width = shape_.hidden / shape_.heads;
  const auto parts = qkv(norm1(x)).view({x.size(0), x.size(1), 3, shape_.heads, width}).unbind(2);
  const auto mixed = attention(parts[0].transpose(1, 2), parts[1].transpose(1, 2), parts[2].transpose(1, 2));
  const auto branch = projection(mixed.transpose(1, 2).reshape(x.sizes()));
  const auto s = x + torch::dropout(branch, task_.dropout, is_training());
  return s + fc2(torch::gelu(fc1(norm2(s)), "tanh"));
}
