// The weight of a linear layer in 4 bits: NF4 with or without double quantisation (Dettmers et al., "QLoRA",
// arXiv:2305.14314). quantize() in nf4.h makes it of a pacer::modules::Linear, of which it is the child
// "weight"; so its buffers are called LAYER.weight.codes, LAYER.weight.absmax and so on. It is frozen.
#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>

namespace pacer::modules {

class Nf4WeightImpl : public torch::nn::Cloneable<Nf4WeightImpl> {
 public:
  // Zeros. `weight_dtype` (Float, BFloat16 or Half) is that of the weight that was, and will be again by
  // dequantize().
  Nf4WeightImpl(int64_t out_features, int64_t in_features, at::ScalarType weight_dtype,
                bool double_quantization);
  // The 4-bit form of weight [out, in], which is finite and in Float, BFloat16 or Half.
  Nf4WeightImpl(const at::Tensor& weight, bool double_quantization);

  void reset() override;
  void pretty_print(std::ostream& stream) const override;

  // Codes and scales keep their dtypes; what is asked for becomes `dtype`, where it is one that a weight can
  // have.
  void to(at::Device device, at::ScalarType dtype, bool non_blocking = false) override;
  void to(at::ScalarType dtype, bool non_blocking = false) override;
  void to(at::Device device, bool non_blocking = false) override;

  // [out, in] in Float, BFloat16, Half or Double, each element rounded once.
  at::Tensor decode(at::ScalarType to_dtype) const;
  // The bytes of codes and scales.
  int64_t bytes() const;

  int64_t out_features, in_features;
  at::ScalarType dtype;
  bool double_quantization;

  at::Tensor codes;   // uint8 [ceil(out * in / 2), 1], two elements a byte, the first in the high nibble
  at::Tensor absmax;  // [blocks of 64 elements] fp32, or uint8 with double quantisation
  // With double quantisation, else undefined:
  at::Tensor nested_absmax;     // fp32 [blocks of 256 scales]
  at::Tensor nested_quant_map;  // fp32 [256], what the codes of scales stand for
  at::Tensor nested_offset;     // fp32 [], the mean of the scales
};
TORCH_MODULE(Nf4Weight);

}  // namespace pacer::modules
