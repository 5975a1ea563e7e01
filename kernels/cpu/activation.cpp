// The CPU side of activations.
#include <pacer/kernels/activation.h>

#include <algorithm>

#include <pacer/core/error.h>
#include <pacer/kernels/cpu/fp8_rows.h>
#include <pacer/kernels/cpu/target.h>
#include <pacer/kernels/math/adam_storage.h>

namespace pacer::kernels {
namespace {

// u + bias; a bias that is not there is -0, which changes no number.
template <class Element>
PACER_TARGET_CLONES void add_bias(const Element* u, const Element* bias, int64_t count, float* inputs) {
  if (bias == nullptr) {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) inputs[i] = load(u[i]);
  } else {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) inputs[i] = load(u[i]) + load(bias[i]);
  }
}

template <class Element>
PACER_TARGET_CLONES void round_to(float* values, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    Element rounded;
    store(values[i], rounded);
    values[i] = load(rounded);
  }
}

// What has been rounded before.
template <class Element>
PACER_TARGET_CLONES void narrow(const float* values, int64_t count, Element* memory) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) store(values[i], memory[i]);
}

PACER_TARGET_CLONES void gelu_of(const float* inputs, int64_t count, float* y) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) y[i] = gelu(inputs[i]);
}
PACER_TARGET_CLONES void swiglu_of(const float* gates, const float* ups, int64_t count, float* y) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) y[i] = mul_(silu(gates[i]), ups[i]);
}
template <class Element>
PACER_TARGET_CLONES void gelu_backward(const float* inputs, const Element* dy, int64_t count, float* du) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) du[i] = mul_(load(dy[i]), gelu_derivative(inputs[i]));
}
template <class Element>
PACER_TARGET_CLONES void gate_backward(const float* gates, const float* ups, const Element* dy, int64_t count,
                                       float* du) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) du[i] = mul_(mul_(load(dy[i]), ups[i]), silu_derivative(gates[i]));
}
template <class Element>
PACER_TARGET_CLONES void up_backward(const float* gates, const Element* dy, int64_t count, float* du) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) du[i] = mul_(load(dy[i]), silu(gates[i]));
}

// The inputs of one row, from some column of u on.
template <class Element, class Work>
void read_inputs(const Work& work, int64_t row, int64_t column, int64_t count, float* inputs) {
  const int64_t width = work.columns * activation_inputs(work.activation);
  const auto* u = static_cast<const Element*>(work.u) + row * width + column;
  const auto* bias = static_cast<const Element*>(work.bias);
  add_bias(u, bias == nullptr ? nullptr : bias + column, count, inputs);
}

template <class Element>
void forward(const ActivationForward& work, int64_t begin, int64_t end) {
  const FullDenormals full_denormals;
  if (work.y == nullptr && (is_superfluous(work.to) || (!work.to.codes && !work.to.measured))) return;
  const Fp8Rows matrix{work.rows, work.columns, work.to, nullptr, nullptr};
  for_fp8_rows(matrix, begin, end, [&](int64_t row, int64_t column, int64_t count, float* values) {
    float inputs[kFp8Strip], ups[kFp8Strip];
    read_inputs<Element>(work, row, column, count, inputs);
    if (work.activation == Activation::gelu) {
      gelu_of(inputs, count, values);
    } else {
      read_inputs<Element>(work, row, work.columns + column, count, ups);
      swiglu_of(inputs, ups, count, values);
    }
    round_to<Element>(values, count);
    if (work.y == nullptr) return;
    narrow(values, count, static_cast<Element*>(work.y) + row * work.columns + column);
  });
}

// `count` columns of du from `column` on, all of the gate or all of what it lets through.
template <class Element>
void differentiate(const ActivationBackward& work, int64_t row, int64_t column, int64_t count, float* du) {
  float inputs[kFp8Strip], ups[kFp8Strip];
  const int64_t of_y = column % work.columns;
  const auto* dy = static_cast<const Element*>(work.dy) + row * work.columns + of_y;
  read_inputs<Element>(work, row, of_y, count, inputs);
  if (work.activation == Activation::gelu) {
    gelu_backward(inputs, dy, count, du);
  } else if (column < work.columns) {
    read_inputs<Element>(work, row, work.columns + of_y, count, ups);
    gate_backward(inputs, ups, dy, count, du);
  } else {
    up_backward(inputs, dy, count, du);
  }
  round_to<Element>(du, count);
}

template <class Element>
void backward(const ActivationBackward& work, int64_t begin, int64_t end) {
  const FullDenormals full_denormals;
  const bool only_measures = work.du == nullptr && work.to.codes == nullptr && work.to.measured != nullptr;
  if (only_measures && is_superfluous(work.to)) return;
  const int64_t width = work.columns * activation_inputs(work.activation);
  const Fp8Rows matrix{work.rows, width, work.to, work.partials,
                       only_measures ? nullptr : work.bias_gradient};
  for_fp8_rows(matrix, begin, end, [&](int64_t row, int64_t column, int64_t count, float* values) {
    // A strip may begin with the gate's columns and end with others.
    const int64_t gates = std::min(count, std::max(work.columns - column, int64_t{0}));
    if (gates > 0) differentiate<Element>(work, row, column, gates, values);
    if (gates < count) differentiate<Element>(work, row, column + gates, count - gates, values + gates);
    if (work.du == nullptr) return;
    narrow(values, count, static_cast<Element*>(work.du) + row * width + column);
  });
}

}  // namespace

void activation_cpu(const ActivationForward& work, int64_t begin, int64_t end) {
  with_element(work.type, [&](auto element) { forward<decltype(element)>(work, begin, end); });
}

void activation_backward_cpu(const ActivationBackward& work, int64_t begin, int64_t end) {
  with_element(work.type, [&](auto element) { backward<decltype(element)>(work, begin, end); });
}

}  // namespace pacer::kernels
