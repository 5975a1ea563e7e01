#include <pacer/modules/detail/passes.h>

#include <algorithm>
#include <utility>

#include <ATen/Parallel.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/DeviceGuard.h>

#include <pacer/device/detail/stream.h>
#include <pacer/kernels/layer_norm.h>
#include <pacer/modules/detail/column_sums.h>

namespace pacer::detail {
namespace {

using c10::DeviceGuard;
using kernels::Fp8Target;

// Rows, or parts of sums, that one thread of the CPU takes at least.
constexpr int64_t kRows = 16;

// f(begin, end) of rows on the CPU, as kernels/fp8.h asks for: by one thread where something is noted, else
// by all in whole parts, the last one last.
template <class F>
void over_rows(int64_t rows, const Fp8Target& to, const F& f) {
  if (to.measured != nullptr) return f(0, rows);
  constexpr int64_t kPart = kernels::kFp8PartRows;
  const int64_t before_last = std::max<int64_t>(kernels::fp8_parts(rows) - 1, 0);
  at::parallel_for(0, before_last, 1, [&](int64_t begin, int64_t end) { f(begin * kPart, end * kPart); });
  f(before_last * kPart, rows);
}

const void* memory_of(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr() : nullptr;
}
void* writable(const at::Tensor& tensor) { return tensor.defined() ? tensor.mutable_data_ptr() : nullptr; }
float* floats(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.mutable_data_ptr<float>() : nullptr;
}

at::Tensor floats_like(const at::Tensor& x, at::IntArrayRef sizes) {
  return at::empty(sizes, x.options().dtype(at::kFloat));
}

// Parameters of a norm have 32 bits, or the 16 bits of the residual stream.
at::ScalarType parameter_type(const at::Tensor& weight, const at::Tensor& stream) {
  return weight.scalar_type() == stream.scalar_type() ? weight.scalar_type() : at::kFloat;
}

at::Tensor as(const at::Tensor& x, at::ScalarType dtype) { return x.defined() ? readable(x.to(dtype)) : x; }

// Runs what makes a factor: `make(to, values)` writes codes to `to`, or `values`.
template <class Make>
Operand make_operand(const OperandUse& use, const at::Tensor& like, int64_t columns, bool makes_transpose,
                     const Make& make) {
  const Product& product = *use.product;
  Operand operand;
  const int64_t rows = like.size(0);
  if (!product.fp8()) {
    operand.values = at::empty({rows, columns}, like.options().dtype(product.dtype()));
    if (rows > 0) make(Fp8Target{}, operand.values);
    return operand;
  }
  Fp8Layer& layer = *product.fp8();
  const Fp8Tensors::Role role =
      use.is_gradient ? layer.gradient(product.records()) : layer.input(product.records());
  static_cast<Fp8Matrix&>(operand) =
      layer.tensors().encode(rows, columns, role, makes_transpose && use.for_weight,
                             [&](const Fp8Target& to) { make(to, at::Tensor()); });
  if (!makes_transpose && use.for_weight) operand.transposed = layer.tensors().transposed(operand.codes);
  return operand;
}

void run(const kernels::LayerNormForward& work, at::Device device) {
  if (device.is_cuda()) {
    kernels::layer_norm_cuda(work, current_stream(device));
  } else {
    over_rows(work.rows, work.to,
              [&](int64_t begin, int64_t end) { kernels::layer_norm_cpu(work, begin, end); });
  }
}

// A residual connection as kernels read it, whose tensors it keeps alive.
struct ResidualMemory {
  ResidualMemory(const Residual& residual, at::ScalarType branch_type)
      : x(residual.x.defined() ? readable(residual.x) : residual.x),
        branch(as(residual.branch, branch_type)),
        branch_bias(as(residual.branch_bias, branch_type)) {
    const at::Tensor& any = x.defined() ? x : branch;
    work.stream = element_type(any.scalar_type());
    work.branch_type = element_type(branch_type);
    work.rows = any.size(0);
    work.columns = any.size(1);
    work.x = memory_of(x);
    work.branch = memory_of(branch);
    work.branch_bias = memory_of(branch_bias);
    work.dropout = residual.dropout;
  }

  at::Tensor x, branch, branch_bias;
  kernels::LayerNormForward work;
};

}  // namespace

at::Tensor add_residual(const Residual& residual) {
  const DeviceGuard guard(residual.branch.device());
  ResidualMemory memory(residual, residual.branch.scalar_type());
  at::Tensor s = at::empty_like(memory.x.defined() ? memory.x : memory.branch);
  if (s.numel() == 0) return s;
  memory.work.sum = writable(s);
  run(memory.work, s.device());
  return s;
}

Normalized normalize(const Residual& residual, const Norm& norm, const OperandUse& use) {
  const DeviceGuard guard(residual.x.device());
  ResidualMemory memory(residual, use.product->dtype());
  const at::Tensor& x = memory.x;
  const at::ScalarType type = parameter_type(norm.weight, x);
  const at::Tensor weight = as(norm.weight, type), bias = as(norm.bias, type);
  const bool has_branch = memory.branch.defined();
  Normalized normalized;
  normalized.s = has_branch ? at::empty_like(x) : x;
  if (norm.normalization == Normalization::layer) normalized.mean = floats_like(x, {x.size(0)});
  normalized.rstd = floats_like(x, {x.size(0)});
  memory.work.normalization = norm.normalization;
  memory.work.parameter_type = element_type(type);
  memory.work.weight = memory_of(weight);
  memory.work.bias = memory_of(bias);
  memory.work.epsilon = static_cast<float>(norm.epsilon);
  normalized.y = make_operand(use, x, x.size(1), /*makes_transpose=*/false,
                              [&](const Fp8Target& to, const at::Tensor& values) {
                                kernels::LayerNormForward work = memory.work;
                                work.to = to;
                                work.y = writable(values);
                                if (to.codes != nullptr || values.defined()) {  // else it is only measured
                                  work.sum = has_branch ? writable(normalized.s) : nullptr;
                                  work.mean = floats(normalized.mean);
                                  work.rstd = floats(normalized.rstd);
                                }
                                run(work, x.device());
                              });
  return normalized;
}

NormGradients normalize_backward(const at::Tensor& dy, const Normalized& normalized, const Norm& norm,
                                 const at::Tensor& dsum, bool for_weight, bool for_bias) {
  const at::Tensor& s = normalized.s;
  const DeviceGuard guard(s.device());
  const at::ScalarType type = parameter_type(norm.weight, s);
  const at::Tensor dense = readable(dy), parameter = as(norm.weight, type), added = as(dsum, s.scalar_type());
  NormGradients gradients;
  gradients.ds = at::empty_like(s);
  kernels::LayerNormBackward work;
  work.normalization = norm.normalization;
  work.stream = element_type(s.scalar_type());
  work.gradient_type = element_type(dense.scalar_type());
  work.parameter_type = element_type(type);
  work.rows = s.size(0);
  work.columns = s.size(1);
  work.dy = memory_of(dense);
  work.s = memory_of(s);
  work.mean = floats(normalized.mean);
  work.rstd = floats(normalized.rstd);
  work.weight = memory_of(parameter);
  work.dsum = memory_of(added);
  work.dx = writable(gradients.ds);
  at::Tensor partials;
  if (for_weight || for_bias) {
    const int64_t parts = kernels::layer_norm_parts(work.rows, work.columns);
    partials = floats_like(s, {norm.normalization == Normalization::layer ? 2 : 1, parts, work.columns});
    work.partials = floats(partials);
  }
  if (for_weight) gradients.dweight = column_memory(work.rows, work.columns, s.device());
  if (for_bias) gradients.dbias = column_memory(work.rows, work.columns, s.device());
  work.dweight = floats(gradients.dweight);
  work.dbias = floats(gradients.dbias);
  if (work.rows == 0) return gradients;
  if (s.is_cuda()) {
    kernels::layer_norm_backward_cuda(work, current_stream(s.device()));
    return gradients;
  }
  at::parallel_for(0, kernels::layer_norm_parts(work.rows, work.columns), kRows,
                   [&](int64_t begin, int64_t end) { kernels::layer_norm_backward_cpu(work, begin, end); });
  if (partials.defined()) kernels::layer_norm_parameters_cpu(work, 0, work.columns);
  return gradients;
}

Operand activate(const at::Tensor& u, const at::Tensor& bias, Activation activation, const OperandUse& use) {
  const DeviceGuard guard(u.device());
  const at::Tensor dense = readable(u), added = as(bias, u.scalar_type());
  kernels::ActivationForward work;
  work.activation = activation;
  work.type = element_type(dense.scalar_type());
  work.rows = dense.size(0);
  work.columns = dense.size(1) / kernels::activation_inputs(activation);
  work.u = memory_of(dense);
  work.bias = memory_of(added);
  return make_operand(
      use, dense, work.columns, /*makes_transpose=*/true, [&](const Fp8Target& to, const at::Tensor& values) {
        work.to = to;
        work.y = writable(values);
        if (dense.is_cuda()) {
          kernels::activation_cuda(work, current_stream(dense.device()));
        } else {
          over_rows(work.rows, to,
                    [&](int64_t begin, int64_t end) { kernels::activation_cpu(work, begin, end); });
        }
      });
}

Operand activate_backward(const at::Tensor& u, const at::Tensor& bias, const at::Tensor& dy,
                          Activation activation, const OperandUse& use, bool sums) {
  const DeviceGuard guard(u.device());
  const at::Tensor dense = readable(u), added = as(bias, u.scalar_type()), gradient = as(dy, u.scalar_type());
  kernels::ActivationBackward work;
  work.activation = activation;
  work.type = element_type(dense.scalar_type());
  work.rows = dense.size(0);
  work.columns = gradient.size(1);
  work.u = memory_of(dense);
  work.bias = memory_of(added);
  work.dy = memory_of(gradient);
  const ColumnSums column_sums(sums, dense.size(0), dense.size(1), dense.device());
  Operand operand = make_operand(use, dense, dense.size(1), /*makes_transpose=*/true,
                                 [&](const Fp8Target& to, const at::Tensor& values) {
                                   work.to = to;
                                   work.du = writable(values);
                                   const bool only_measures = to.codes == nullptr && !values.defined();
                                   work.partials = only_measures ? nullptr : floats(column_sums.partials);
                                   work.bias_gradient = only_measures ? nullptr : floats(column_sums.sums);
                                   if (dense.is_cuda()) {
                                     kernels::activation_backward_cuda(work, current_stream(dense.device()));
                                   } else {
                                     over_rows(work.rows, to, [&](int64_t begin, int64_t end) {
                                       kernels::activation_backward_cpu(work, begin, end);
                                     });
                                   }
                                 });
  operand.sums = column_sums.sums;
  return operand;
}

Operand cast_operand(at::TensorList x, const kernels::Dropout& dropout, const OperandUse& use, bool sums) {
  const Product& product = *use.product;
  Operand operand;
  if (product.fp8()) {
    Fp8Layer& layer = *product.fp8();
    const auto role = use.is_gradient ? layer.gradient(product.records()) : layer.input(product.records());
    static_cast<Fp8Matrix&>(operand) = layer.tensors().cast(x, role, {use.for_weight, sums}, dropout);
    return operand;
  }
  operand.values = as(x.size() == 1 ? x[0] : at::cat(x, 1), product.dtype());
  if (dropout.threshold != 0) operand.values = add_residual({{}, operand.values, {}, dropout});
  if (sums) operand.sums = operand.values.sum(0, /*keepdim=*/false, at::kFloat);
  return operand;
}

}  // namespace pacer::detail
