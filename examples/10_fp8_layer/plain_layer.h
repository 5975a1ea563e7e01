// The transformer layer of the comparison, of LibTorch's modules only.
#pragma once

#include <torch/nn.h>
#include <torch/types.h>

struct Shape {
  int64_t hidden, heads, ffn, batch, sequence;
};

// What is computed: dropout of attention weights and behind the projection, causal or all to all.
struct Task {
  double dropout;
  bool is_causal;
};

// x + drop(projection(attention(norm1 x))), then x + fc2(gelu(fc1(norm2 x))). Attention is written out, or
// LibTorch's one function for it.
struct PlainLayerImpl : torch::nn::Module {
  PlainLayerImpl(const Shape& shape, const Task& task, bool is_written_out);
  torch::Tensor forward(const torch::Tensor& x);  // [batch, sequence, hidden]

  torch::nn::LayerNorm norm1, norm2;
  torch::nn::Linear qkv, projection, fc1, fc2;

 private:
  torch::Tensor attention(const torch::Tensor& q, const torch::Tensor& k, const torch::Tensor& v) const;

  Shape shape_;
  Task task_;
  bool is_written_out_;
};
TORCH_MODULE(PlainLayer);
