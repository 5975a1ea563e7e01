// The elementwise passes between products, each fused with its neighbours, on tensors and without a graph:
// what a product will multiply is made in 8 bits where it multiplies these, else in its dtype. The kernels
// are those of kernels/layer_norm.h, kernels/activation.h and kernels/fp8.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <pacer/kernels/activation.h>
#include <pacer/kernels/choices.h>
#include <pacer/kernels/math/dropout.h>
#include <pacer/modules/detail/matrix.h>
#include <pacer/modules/detail/product.h>

namespace pacer::detail {

// For which product something is made, as what it multiplies in forward or as the gradient of its result.
struct OperandUse {
  const Product* product;
  bool is_gradient = false;
  // The product of the weight's gradient is wanted, too; in 8 bits that needs the transpose.
  bool for_weight = false;
};

// s = x + drop(branch + branch_bias). Matrices [rows, columns]; x and s have the dtype of the residual
// stream, branch that of computing, vectors [columns] any. Undefined: zeros for x, none for a bias.
struct Residual {
  at::Tensor x, branch, branch_bias;
  kernels::Dropout dropout;
};
at::Tensor add_residual(const Residual& residual);

struct Norm {
  Normalization normalization;
  at::Tensor weight, bias;  // [columns]; bias may be undefined, and is with Normalization::rms
  double epsilon;
};
// s, where there is a branch (else x), its statistics, fp32 [rows], and (s - mean) * rstd * weight + bias. With
// Normalization::rms the mean is undefined, and 0.
struct Normalized {
  at::Tensor s, mean, rstd;
  Operand y;
};
Normalized normalize(const Residual& residual, const Norm& norm, const OperandUse& use);

// Gradients of s, of the norm's weight and of its bias, fp32 [columns] where wanted. `dsum` is what reaches s
// elsewhere and is added; undefined: nothing does. The norm's bias and epsilon are not read.
struct NormGradients {
  at::Tensor ds, dweight, dbias;
};
NormGradients normalize_backward(const at::Tensor& dy, const Normalized& normalized, const Norm& norm,
                                 const at::Tensor& dsum, bool for_weight, bool for_bias);

// activation(u + bias), and its backward pass with the sums of columns where wanted.
Operand activate(const at::Tensor& u, const at::Tensor& bias, Activation activation, const OperandUse& use);
Operand activate_backward(const at::Tensor& u, const at::Tensor& bias, const at::Tensor& dy,
                          Activation activation, const OperandUse& use, bool sums);

// x itself, dropped, for a product; with the sums of columns where wanted. One matrix, or three as
// Fp8Tensors::cast takes them.
Operand cast_operand(at::TensorList x, const kernels::Dropout& dropout, const OperandUse& use, bool sums);

}  // namespace pacer::detail
