// Activations by LibTorch's operators in fp64, and the memory of a kernel's results.
#pragma once

#include <ATen/ops/from_blob.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/gelu_backward.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/silu_backward.h>

#include <pacer/kernels/activation.h>

#include "support/kernels/fp8_reference.h"

namespace pacer::testing {

// What the activation gets: u + bias in fp32, as fp64.
inline Tensor activation_inputs_of(const Tensor& u, const Tensor& bias) {
  const Tensor wide = u.to(at::kFloat);
  return (bias.defined() ? wide + bias.to(at::kFloat) : wide).to(at::kDouble);
}

inline Tensor activation_reference(Activation activation, const Tensor& u, const Tensor& bias) {
  const Tensor inputs = activation_inputs_of(u, bias);
  if (activation == Activation::gelu) return at::gelu(inputs, "tanh");
  const auto halves = inputs.chunk(2, 1);
  return at::silu(halves[0]) * halves[1];
}

inline Tensor activation_gradient_reference(Activation activation, const Tensor& u, const Tensor& bias,
                                            const Tensor& dy) {
  const Tensor inputs = activation_inputs_of(u, bias), wide = dy.to(at::kDouble);
  if (activation == Activation::gelu) return at::gelu_backward(wide, inputs, "tanh");
  const auto halves = inputs.chunk(2, 1);
  return at::cat({at::silu_backward(wide * halves[1], halves[0]), wide * at::silu(halves[0])}, 1);
}

// All that a pass can leave behind. `state` and `measured` on the device of the tensors.
struct ActivationResults {
  Tensor values, codes, transposed, inverse, measured, state, partials, sums;
};

// What of it is wanted.
struct ActivationWishes {
  bool values = true, codes = false, transposed = false, sums = false;
  float scale = 4;  // of delayed scaling; 0: what `measured` says
  uint32_t amax = 0;
  bool measures = false;  // without codes
  kernels::Fp8Format format = kernels::Fp8Format::e4m3;
};

// Makes room for results of that shape and points the kernel's arguments to it.
inline ActivationResults activation_results(const ActivationWishes& wishes, const Tensor& like, int64_t rows,
                                            int64_t columns, kernels::Fp8Target& to) {
  const auto options = like.options();
  const auto on_device = [&](const void* memory, int64_t bytes) {
    return at::from_blob(const_cast<void*>(memory), {bytes}, at::kByte).clone().to(like.device());
  };
  const kernels::Fp8Scale state = wishes.scale == 0 ? kernels::Fp8Scale{} : fp8_scale_of(wishes.scale);
  ActivationResults made;
  made.state = on_device(&state, sizeof state);
  made.measured = on_device(&wishes.amax, sizeof wishes.amax).view(at::kInt);
  made.inverse = at::zeros({1}, options.dtype(at::kFloat));
  to.format = wishes.format;
  if (wishes.codes || wishes.measures) {
    to.state = static_cast<kernels::Fp8Scale*>(made.state.mutable_data_ptr());
    to.measured = static_cast<uint32_t*>(made.measured.mutable_data_ptr());
    to.inverse = made.inverse.mutable_data_ptr<float>();
  }
  if (wishes.values) made.values = at::full({rows, columns}, 7, options);
  if (wishes.codes) {
    made.codes = at::empty({rows, columns}, options.dtype(at::kByte));
    to.codes = made.codes.mutable_data_ptr<uint8_t>();
  }
  if (wishes.transposed) {
    made.transposed = at::empty({columns, rows}, options.dtype(at::kByte));
    to.transposed = made.transposed.mutable_data_ptr<uint8_t>();
  }
  if (wishes.sums) {
    made.partials = at::full({kernels::fp8_parts(rows), columns}, 7, options.dtype(at::kFloat));
    made.sums = at::full({columns}, 7, options.dtype(at::kFloat));
  }
  return made;
}

inline void* memory_of(const Tensor& tensor) {
  return tensor.defined() ? tensor.mutable_data_ptr() : nullptr;
}
inline const void* const_memory_of(const Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr() : nullptr;
}

// Forward where dy is not defined, backward where it is; run(work) calls the kernel.
template <class Run>
ActivationResults run_activation(Activation activation, const Tensor& u, const Tensor& bias, const Tensor& dy,
                                 const ActivationWishes& wishes, const Run& run) {
  const int64_t inputs = kernels::activation_inputs(activation);
  const auto fill = [&](auto& work) {
    work.activation = activation;
    work.type = element_type_of(u.scalar_type());
    work.rows = u.size(0);
    work.columns = u.size(1) / inputs;
    work.u = u.const_data_ptr();
    work.bias = const_memory_of(bias);
  };
  if (!dy.defined()) {
    kernels::ActivationForward work;
    fill(work);
    ActivationResults made = activation_results(wishes, u, work.rows, work.columns, work.to);
    work.y = memory_of(made.values);
    run(work);
    return made;
  }
  kernels::ActivationBackward work;
  fill(work);
  ActivationResults made = activation_results(wishes, u, work.rows, u.size(1), work.to);
  work.dy = dy.const_data_ptr();
  work.du = memory_of(made.values);
  work.partials = static_cast<float*>(memory_of(made.partials));
  work.bias_gradient = static_cast<float*>(memory_of(made.sums));
  run(work);
  return made;
}

}  // namespace pacer::testing
