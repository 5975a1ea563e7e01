// The product of a linear layer and the two of its backward pass, in 8-bit floats or in 16 or 32 bits, inside
// nodes of the graph that fuse what stands around them.
#pragma once

#include <optional>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <pacer/modules/detail/fp8_layer.h>
#include <pacer/modules/detail/matrix.h>

namespace pacer::detail {

// The dtype in which a layer multiplies `x`: autocast's where it is on, else that of x; bf16 instead of fp32
// where products are of 8 bits.
at::ScalarType computing_type(const at::Tensor& x, bool in_8_bits);

// How the module computes at this moment, on this thread; null: as torch::nn::Linear.
Fp8LayerPtr fp8_layer(const torch::nn::Module& module);
// Whether a pass of a layer counts for the scales to come: in training, and where a backward pass may follow.
bool pass_records(bool is_training);
// Whether it multiplies rows of what is made of `x` by weight [out, in] in 8 bits. Where sizes are no
// multiples of 16 it does not, which is counted.
bool multiplies(Fp8Layer& layer, const at::Tensor& x, int64_t rows, const at::Tensor& weight);
bool multiplies(Fp8Layer& layer, const at::Tensor& x, int64_t rows, const modules::Nf4Weight& weight);

// The backward pass of a node that multiplies calls this; it throws InvalidArgument if a graph of that pass
// is asked for.
void refuse_second_derivative();

// a [m, k] times b [n, k] transposed, both row by row in 8-bit floats, b in e4m3: [m, n], times both inverses. `fast`: sums of
// products are less exact. On a CPU of decoded values, in fp32.
at::Tensor scaled_product(const at::Tensor& a, const at::Tensor& a_inverse, kernels::Fp8Format a_format,
                          const at::Tensor& b, const at::Tensor& b_inverse, at::ScalarType dtype,
                          const at::Tensor& bias, bool fast);

class Product {
 public:
  // weight [out, in]: of any dtype in 8 bits, of `dtype` otherwise (`fp8` null). `records` as in Fp8Tensors.
  // `nf4`: in 8 bits, instead of `weight`.
  Product(Fp8LayerPtr fp8, at::Tensor weight, at::ScalarType dtype, bool records,
          modules::Nf4Weight nf4 = nullptr)
      : fp8_(std::move(fp8)),
        weight_(std::move(weight)),
        nf4_(std::move(nf4)),
        dtype_(dtype),
        records_(records) {}

  const Fp8LayerPtr& fp8() const { return fp8_; }
  at::ScalarType dtype() const { return dtype_; }
  bool records() const { return records_; }

  // [rows, out]: x W^T + bias; a bias has dtype(), undefined: none.
  at::Tensor forward(const Operand& x, const at::Tensor& bias) const;
  // [rows, in] of the gradient [rows, out].
  at::Tensor input_gradient(const Operand& dy, at::ScalarType dtype) const;
  // [out, in], of the weight's dtype, which is not in 4 bits. Of `x` the transpose, in 8 bits.
  at::Tensor weight_gradient(const Operand& dy, const Operand& x) const;

 private:
  Fp8Matrix cast_weight(bool transposed) const;

  Fp8LayerPtr fp8_;
  at::Tensor weight_;
  modules::Nf4Weight nf4_;
  at::ScalarType dtype_;
  bool records_;
};

}  // namespace pacer::detail
