// Convolutions with the options, parameters, names and initial values of torch::nn::Conv1d, Conv2d and Conv3d,
// and their results to the bit, that take low-rank adapters (lora.h).
//
// An adapter's A is a convolution of the layer's input to r channels with the layer's kernel size, stride,
// padding, dilation and padding mode, without groups; its B one of 1 x 1 kernels with the layer's groups. The
// layer computes conv(x, W) + bias + scale * B(A(drop(x))).
#pragma once

#include <memory>
#include <optional>
#include <ostream>
#include <string>

#include <ATen/core/Tensor.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/options/conv.h>
#include <torch/nn/pimpl.h>

#include <pacer/modules/lora_layer.h>

namespace pacer::modules {

// What the three have in common; D is the number of dimensions.
template <size_t D, class Derived>
class ConvolutionImpl : public torch::nn::ConvNdImpl<D, Derived>, public LoraLayer {
 public:
  // Error of LibTorch for sizes that do not go together.
  explicit ConvolutionImpl(const torch::nn::ConvOptions<D>& options);

  void reset() override;
  void pretty_print(std::ostream& stream) const override;
  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<torch::Device>& device = std::nullopt) const override;

  // x [N, in_channels, L...] or [in_channels, L...] -> [N, out_channels, L'...] or without N. Adapters are
  // cast to the dtype of x, or by autocast, which the result has, too.
  at::Tensor forward(const at::Tensor& x);

  LoraMatrices lora_matrices(int64_t r) const override;
  std::string why_no_adapter(const LoraOptions& lora) const override;
  std::string why_no_merge() const override;
  at::Tensor stored_weight() const override { return this->weight; }

 private:
  torch::nn::Module& module() override { return *this; }
  at::Tensor padded(const at::Tensor& x) const;
  at::Tensor convolved(const at::Tensor& padded_x, const at::Tensor& weight, const at::Tensor& bias,
                       int64_t groups) const;
};

// torch::nn::Conv1d, of x [N, in_channels, L], that takes adapters.
class Conv1dImpl : public ConvolutionImpl<1, Conv1dImpl> {
 public:
  Conv1dImpl(int64_t in_channels, int64_t out_channels, torch::ExpandingArray<1> kernel_size)
      : Conv1dImpl(torch::nn::Conv1dOptions(in_channels, out_channels, kernel_size)) {}
  explicit Conv1dImpl(const torch::nn::Conv1dOptions& options) : ConvolutionImpl(options) {}
};
TORCH_MODULE(Conv1d);

// torch::nn::Conv2d, of x [N, in_channels, H, W], that takes adapters.
class Conv2dImpl : public ConvolutionImpl<2, Conv2dImpl> {
 public:
  Conv2dImpl(int64_t in_channels, int64_t out_channels, torch::ExpandingArray<2> kernel_size)
      : Conv2dImpl(torch::nn::Conv2dOptions(in_channels, out_channels, kernel_size)) {}
  explicit Conv2dImpl(const torch::nn::Conv2dOptions& options) : ConvolutionImpl(options) {}
};
TORCH_MODULE(Conv2d);

// torch::nn::Conv3d, of x [N, in_channels, D, H, W], that takes adapters.
class Conv3dImpl : public ConvolutionImpl<3, Conv3dImpl> {
 public:
  Conv3dImpl(int64_t in_channels, int64_t out_channels, torch::ExpandingArray<3> kernel_size)
      : Conv3dImpl(torch::nn::Conv3dOptions(in_channels, out_channels, kernel_size)) {}
  explicit Conv3dImpl(const torch::nn::Conv3dOptions& options) : ConvolutionImpl(options) {}
};
TORCH_MODULE(Conv3d);

extern template class ConvolutionImpl<1, Conv1dImpl>;
extern template class ConvolutionImpl<2, Conv2dImpl>;
extern template class ConvolutionImpl<3, Conv3dImpl>;

}  // namespace pacer::modules
