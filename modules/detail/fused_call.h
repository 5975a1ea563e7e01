// What one call of a fused layer computes with: its input as rows, the dtype, and its parameters as the nodes
// of the graph behind norm_linear.h and norm_mlp.h take them.
#pragma once

#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/modules/normalization.h>

#include <pacer/kernels/math/dropout.h>
#include <pacer/modules/detail/passes.h>
#include <pacer/modules/linear.h>
#include <pacer/modules/rms_norm.h>

namespace pacer::detail {

struct LinearInputs {
  Fp8LayerPtr fp8;          // null: not in 8 bits
  at::Tensor weight, bias;  // in 8 bits the parameter itself, else of the dtype of computing; bias always
};

class FusedCall {
 public:
  // `x` [..., features], `linears`: all of the layer. Throws InvalidArgument for another shape or dtype, with
  // the name of the layer.
  FusedCall(const char* layer, const at::Tensor& x, int64_t features,
            const std::vector<const modules::LinearImpl*>& linears, bool is_training);

  const at::Tensor& x() const { return x_; }       // [rows, features], of the dtype of the residual stream
  at::ScalarType dtype() const { return dtype_; }  // of computing
  bool records() const { return pass_records(is_training_); }

  // The same call further on, where the residual stream is `x`.
  FusedCall behind(at::Tensor x) const {
    FusedCall further = *this;
    further.x_ = std::move(x);
    return further;
  }

  LinearInputs inputs_of(const modules::LinearImpl& linear) const;
  // Throw InvalidArgument for one that is not of the features of x, or of `features`, or somewhere else.
  Norm inputs_of(const torch::nn::LayerNormImpl& norm) const;
  Norm inputs_of(const modules::RmsNormImpl& norm) const { return inputs_of(norm, x_.size(1)); }
  Norm inputs_of(const modules::RmsNormImpl& norm, int64_t features) const;
  // The norm of a layer that has one of two.
  template <class Layer>
  Norm norm_of(const Layer& layer) const {
    return layer.rms_norm ? inputs_of(*layer.rms_norm) : inputs_of(*layer.norm);
  }
  // Drops with probability p, by a seed from LibTorch's generator of the CPU; nothing in eval(). Throws
  // InvalidArgument for a probability that is none, and Error while a CUDA graph is captured.
  kernels::Dropout dropout(double p) const;

 private:
  Norm checked(Norm norm, int64_t features) const;

  const char* layer_;
  at::Tensor x_;
  at::ScalarType dtype_;
  bool is_training_;
};

}  // namespace pacer::detail
