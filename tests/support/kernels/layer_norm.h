// One layer normalisation as tensors of one device, forward and backward, for the tests of its kernels.
#pragma once

#include <vector>

#include <pacer/kernels/layer_norm.h>

#include "support/kernels/fp8_reference.h"

namespace pacer::testing {

struct LayerNormTypes {
  at::ScalarType stream, branch, parameter;
};
// All that go together.
inline const std::vector<LayerNormTypes> kLayerNormTypes = {
    {at::kFloat, at::kFloat, at::kFloat}, {at::kFloat, at::kBFloat16, at::kFloat},
    {at::kFloat, at::kHalf, at::kFloat},  {at::kBFloat16, at::kBFloat16, at::kFloat},
    {at::kHalf, at::kHalf, at::kFloat},   {at::kBFloat16, at::kBFloat16, at::kBFloat16},
    {at::kHalf, at::kHalf, at::kHalf},
};

// Null for a tensor that is not defined.
template <class T = void>
T* memory_of(const Tensor& tensor) {
  return tensor.defined() ? static_cast<T*>(tensor.data_ptr()) : nullptr;
}

// What goes in; branch, branch_bias, bias and dsum may be left undefined.
struct LayerNormInput {
  Normalization normalization = Normalization::layer;
  Tensor x, branch, branch_bias, weight, bias, dy, dsum;
  kernels::Dropout dropout;

  LayerNormInput to(at::Device device) const {
    LayerNormInput moved = *this;
    for (Tensor* tensor :
         {&moved.x, &moved.branch, &moved.branch_bias, &moved.weight, &moved.bias, &moved.dy, &moved.dsum}) {
      if (tensor->defined()) *tensor = tensor->to(device);
    }
    return moved;
  }
};

inline LayerNormInput random_layer_norm(const LayerNormTypes& types, int64_t rows, int64_t columns,
                                        bool has_branch, Normalization normalization = Normalization::layer) {
  const auto random = [](at::IntArrayRef sizes, at::ScalarType dtype) {
    return torch::randn(sizes).to(dtype);
  };
  LayerNormInput in;
  in.normalization = normalization;
  in.x = random({rows, columns}, types.stream).add_(0.5);
  if (has_branch) {
    in.branch = random({rows, columns}, types.branch);
    in.branch_bias = random({columns}, types.branch);
  }
  in.weight = random({columns}, types.parameter);
  if (normalization == Normalization::layer) in.bias = random({columns}, types.parameter);
  in.dy = random({rows, columns}, types.branch);
  in.dsum = random({rows, columns}, types.stream);
  return in;
}

// What comes out; those that are left undefined are not wanted.
struct LayerNormOutput {
  Tensor sum, y, mean, rstd;
  Tensor codes, inverse, measured, state;  // bytes, fp32, int32, the bytes of a Fp8Scale
  Tensor dx, dweight, dbias, partials;

  std::vector<Tensor> all() const {
    std::vector<Tensor> defined;
    for (const Tensor& tensor :
         {sum, y, mean, rstd, codes, inverse, measured, state, dx, dweight, dbias, partials}) {
      if (tensor.defined()) defined.push_back(tensor);
    }
    return defined;
  }
};

// Memory for everything, filled with a number that no result leaves. `scale`: of the codes, by a history.
inline LayerNormOutput layer_norm_output(const LayerNormInput& in, float scale) {
  LayerNormOutput out;
  const auto floats = in.x.options().dtype(at::kFloat);
  const int64_t rows = in.x.size(0), columns = in.x.size(1);
  if (in.branch.defined()) out.sum = at::full_like(in.x, 77);
  out.y = at::full_like(in.dy, 77);
  const bool has_mean = in.normalization == Normalization::layer;
  if (has_mean) out.mean = at::full({rows}, 77, floats);
  out.rstd = at::full({rows}, 77, floats);
  const kernels::Fp8Scale state = fp8_scale_of(scale);
  out.state = at::empty({static_cast<int64_t>(sizeof state)}, at::kByte);
  std::memcpy(out.state.data_ptr(), &state, sizeof state);
  out.state = out.state.to(in.x.device());
  out.codes = at::full_like(in.x, 77, floats.dtype(at::kByte));
  out.inverse = at::zeros({1}, floats);
  out.dx = at::full_like(in.x, 77);
  out.dweight = at::full({columns}, 77, floats);
  if (has_mean) out.dbias = at::full({columns}, 77, floats);
  out.partials = at::full({has_mean ? 2 : 1, kernels::layer_norm_parts(rows, columns), columns}, 77, floats);
  return out;
}

inline kernels::LayerNormForward forward_of(const LayerNormInput& in, const LayerNormOutput& out) {
  kernels::LayerNormForward work;
  work.normalization = in.normalization;
  work.stream = element_type_of(in.x.scalar_type());
  work.branch_type = element_type_of(in.dy.scalar_type());
  work.rows = in.x.size(0);
  work.columns = in.x.size(1);
  work.x = memory_of(in.x);
  work.branch = memory_of(in.branch);
  work.branch_bias = memory_of(in.branch_bias);
  work.dropout = in.dropout;
  work.sum = memory_of(out.sum);
  if (in.weight.defined()) work.parameter_type = element_type_of(in.weight.scalar_type());
  work.weight = memory_of(in.weight);
  work.bias = memory_of(in.bias);
  work.y = memory_of(out.y);
  work.mean = memory_of<float>(out.mean);
  work.rstd = memory_of<float>(out.rstd);
  work.to.state = memory_of<kernels::Fp8Scale>(out.state);
  work.to.codes = memory_of<uint8_t>(out.codes);
  work.to.inverse = memory_of<float>(out.inverse);
  work.to.measured = memory_of<uint32_t>(out.measured);
  return work;
}

// Behind a forward pass that has filled `out`.
inline kernels::LayerNormBackward backward_of(const LayerNormInput& in, const LayerNormOutput& out) {
  kernels::LayerNormBackward work;
  work.normalization = in.normalization;
  work.stream = element_type_of(in.x.scalar_type());
  work.gradient_type = element_type_of(in.dy.scalar_type());
  work.parameter_type = element_type_of(in.weight.scalar_type());
  work.rows = in.x.size(0);
  work.columns = in.x.size(1);
  work.dy = memory_of(in.dy);
  work.s = memory_of(in.branch.defined() ? out.sum : in.x);
  work.mean = memory_of<float>(out.mean);
  work.rstd = memory_of<float>(out.rstd);
  work.weight = memory_of(in.weight);
  work.dsum = memory_of(in.dsum);
  work.dx = memory_of(out.dx);
  work.partials = memory_of<float>(out.partials);
  work.dweight = memory_of<float>(out.dweight);
  work.dbias = memory_of<float>(out.dbias);
  return work;
}

// On the CPU, rows and parts in two tasks.
inline void run_layer_norm(const kernels::LayerNormForward& work) {
  kernels::layer_norm_cpu(work, 0, work.rows / 2);
  kernels::layer_norm_cpu(work, work.rows / 2, work.rows);
}
inline void run_layer_norm(const kernels::LayerNormBackward& work) {
  const int64_t parts = kernels::layer_norm_parts(work.rows, work.columns);
  kernels::layer_norm_backward_cpu(work, parts / 2, parts);
  kernels::layer_norm_backward_cpu(work, 0, parts / 2);
  kernels::layer_norm_parameters_cpu(work, 0, work.columns / 3);
  kernels::layer_norm_parameters_cpu(work, work.columns / 3, work.columns);
}

}  // namespace pacer::testing
