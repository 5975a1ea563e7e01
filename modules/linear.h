// A linear layer with the parameters, names and initial values of torch::nn::Linear that can compute in 8-bit
// floats: while an Fp8Scope of a scaling that knows it is alive, as Precision::fp8 has it, else as
// torch::nn::Linear does.
#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/options/linear.h>
#include <torch/nn/pimpl.h>

namespace pacer::nn {

class LinearImpl : public torch::nn::Cloneable<LinearImpl> {
 public:
  LinearImpl(int64_t in_features, int64_t out_features)
      : LinearImpl(torch::nn::LinearOptions(in_features, out_features)) {}
  explicit LinearImpl(const torch::nn::LinearOptions& options);

  void reset() override;
  void reset_parameters();
  void pretty_print(std::ostream& stream) const override;

  // x [..., in_features] -> [..., out_features]. In 8-bit floats the result has the dtype of autocast;
  // without autocast that of x, or bf16 where x is fp32.
  at::Tensor forward(const at::Tensor& x);

  torch::nn::LinearOptions options;
  at::Tensor weight;  // [out_features, in_features]
  at::Tensor bias;    // [out_features]; undefined with options.bias(false)
};
TORCH_MODULE(Linear);

}  // namespace pacer::nn
