// One decoder layer of LLaMA's shapes: RMS norms, causal attention, SwiGLU, seven linear layers without bias.
#pragma once

#include <string>
#include <vector>

#include <torch/nn.h>

#include <pacer/modules/linear.h>

namespace bench::lora {

struct Shape {
  int64_t hidden, ffn, heads, batch, sequence;
};

class LlamaLayerImpl : public torch::nn::Module {
 public:
  explicit LlamaLayerImpl(const Shape& shape) : shape_(shape) {
    const auto linear = [&](const char* name, int64_t in, int64_t out) {
      return register_module(name, pacer::modules::Linear(torch::nn::LinearOptions(in, out).bias(false)));
    };
    const int64_t h = shape.hidden, f = shape.ffn;
    q_ = linear("q_proj", h, h);
    k_ = linear("k_proj", h, h);
    v_ = linear("v_proj", h, h);
    o_ = linear("o_proj", h, h);
    gate_ = linear("gate_proj", h, f);
    up_ = linear("up_proj", h, f);
    down_ = linear("down_proj", f, h);
    norm1_ = register_parameter("norm1", torch::ones({h}));
    norm2_ = register_parameter("norm2", torch::ones({h}));
  }

  torch::Tensor forward(const torch::Tensor& x) {
    const auto heads = [&](const torch::Tensor& rows) {
      return rows.view({x.size(0), x.size(1), shape_.heads, shape_.hidden / shape_.heads}).transpose(1, 2);
    };
    const auto qkv = pacer::modules::forward_together(norm(x, norm1_), {q_, k_, v_});
    const auto mixed = at::scaled_dot_product_attention(heads(qkv[0]), heads(qkv[1]), heads(qkv[2]), {}, 0.0,
                                                        /*is_causal=*/true);
    const auto attended = x + o_(mixed.transpose(1, 2).reshape(x.sizes()));
    const auto wide = pacer::modules::forward_together(norm(attended, norm2_), {gate_, up_});
    return attended + down_(at::silu(wide[0]) * wide[1]);
  }

 private:
  torch::Tensor norm(const torch::Tensor& x, const torch::Tensor& weight) const {
    return at::rms_norm(x, {shape_.hidden}, weight, 1e-5);
  }

  Shape shape_;
  pacer::modules::Linear q_ = nullptr, k_ = nullptr, v_ = nullptr, o_ = nullptr, gate_ = nullptr,
                         up_ = nullptr, down_ = nullptr;
  torch::Tensor norm1_, norm2_;
};
TORCH_MODULE(LlamaLayer);

}  // namespace bench::lora
