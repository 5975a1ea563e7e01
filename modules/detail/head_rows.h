// Heads of queries, keys and values as columns of rows of tokens, and what is done to them before attention: the
// pass of kernels/rotary.h on tensors, without a graph.
#pragma once

#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

namespace pacer::detail {

struct HeadRows {
  int64_t heads, kv_heads, head_dim;
  int64_t sequence;               // tokens of a sequence; rows are whole sequences
  at::Tensor cosines, sines;      // fp32 [sequence, head_dim / 2]; undefined: not rotated
  at::Tensor q_weight, k_weight;  // [head_dim], of norms; both or none
  double epsilon = 0;             // of these norms

  int64_t width() const { return (heads + 2 * kv_heads) * head_dim; }
  bool are_rotated() const { return cosines.defined(); }
  bool are_normalized() const { return q_weight.defined(); }
  // The same heads with these weights of norms, which a node of the graph has among its inputs.
  HeadRows with(at::Tensor of_q, at::Tensor of_k) const {
    HeadRows heads_with = *this;
    heads_with.q_weight = std::move(of_q);
    heads_with.k_weight = std::move(of_k);
    return heads_with;
  }
};

// q [rows, heads * head_dim], k and v [rows, kv_heads * head_dim], of qkv [rows, width]. Without norms they are its
// memory, which a rotation writes to; with norms, or in a region that keeps results, v alone is. No views as far as a graph is concerned.
std::vector<at::Tensor> split_heads(const HeadRows& of, const at::Tensor& qkv);

// The gradient of qkv, [rows, width], from those of q, k and v, of one dtype, of which some may be undefined; and of
// the weights of norms, fp32 [head_dim], where wanted. `qkv`: what split_heads read, where there are norms.
struct HeadGradients {
  at::Tensor qkv, q_weight, k_weight;
};
HeadGradients join_heads(const HeadRows& of, std::vector<at::Tensor> gradients, const at::Tensor& qkv,
                         bool for_q_weight, bool for_k_weight);

// Returns heads [rows, number * head_dim] turned by the angles of their places, or back, as a new tensor.
at::Tensor turned(const at::Tensor& heads, int64_t head_dim, const at::Tensor& cosines,
                  const at::Tensor& sines, bool back);

}  // namespace pacer::detail
