// The passes of fused layers that stand beside a product with an adapter or a weight in 4 bits: the kernels of passes.h
// and head_rows.h as nodes of the graph of their own. Matrices have rows of tokens.
#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include <pacer/kernels/choices.h>
#include <pacer/kernels/math/dropout.h>
#include <pacer/modules/detail/head_rows.h>

namespace pacer::detail {

// The results of split_heads. `qkv` is used up: a rotation writes to it, so nobody else may have or have saved it.
std::vector<at::Tensor> split_rows(const at::Tensor& qkv, const HeadRows& heads);

// [rows, ffn] of u [rows, ffn * activation_inputs].
at::Tensor activate_rows(const at::Tensor& u, Activation activation);

// x + drop(branch), of the dtype of x; drop(branch) where x is undefined.
at::Tensor add_branch(const at::Tensor& x, const at::Tensor& branch, const kernels::Dropout& dropout);

}  // namespace pacer::detail
