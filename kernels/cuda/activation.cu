// The CUDA side of activations. Forward, a thread has eight columns, whose bias it keeps, of some rows;
// with a transpose and backward it goes tile by tile (kernels/cuda/fp8_tile.cuh). All read and write
// everything once.
#include <pacer/kernels/activation.h>

#include <pacer/core/tile.h>
#include <pacer/kernels/math/adam_storage.h>
#include <pacer/kernels/cuda/eight.cuh>
#include <pacer/kernels/cuda/fp8_tile.cuh>
#include <pacer/kernels/cuda/launch.cuh>
#include <pacer/kernels/cuda/note_amax.cuh>

namespace pacer::kernels {
namespace {

constexpr int kActivationThreads = 256;
constexpr int kActivationBatch = 4;   // rows that a thread reads at once
constexpr int kActivationRows = 128;  // of a block, which is 32 times eight columns wide
constexpr int kActivationColumns = 256;

// Eight inputs of each kind, of gelu one kind and of swiglu two: gates and what they let through.
template <class Element, Activation kActivation>
struct ActivationInputs {
  static constexpr int kKinds = static_cast<int>(activation_inputs(kActivation));
  struct Raw {
    Eight<Element> u[kKinds];
  };
  struct Fixed {
    float bias[kKinds][8];
  };

  const Element* u;
  const Element* bias;
  int64_t columns;

  __device__ __forceinline__ Raw read(int64_t row, int64_t column) const {
    Raw raw;
#pragma unroll
    for (int kind = 0; kind < kKinds; ++kind) {
      raw.u[kind] = load_eight(u + (row * kKinds + kind) * columns + column);
    }
    return raw;
  }
  // A bias that is not there is -0, which changes no number.
  __device__ __forceinline__ Fixed fixed(int64_t column) const {
    Fixed fixed;
#pragma unroll
    for (int kind = 0; kind < kKinds; ++kind) {
#pragma unroll
      for (int i = 0; i < 8; ++i) fixed.bias[kind][i] = -0.0f;
      if (bias != nullptr) widen(load_eight(bias + kind * columns + column), fixed.bias[kind]);
    }
    return fixed;
  }
  // With their bias.
  __device__ __forceinline__ void add(const Raw& raw, const Fixed& fixed, float (&inputs)[kKinds][8]) const {
#pragma unroll
    for (int kind = 0; kind < kKinds; ++kind) {
      widen(raw.u[kind], inputs[kind]);
#pragma unroll
      for (int i = 0; i < 8; ++i) inputs[kind][i] += fixed.bias[kind][i];
    }
  }
  __device__ __forceinline__ void activate(const Raw& raw, const Fixed& fixed, Eight<Element>& y) const {
    float values[kKinds][8];
    add(raw, fixed, values);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if constexpr (kActivation == Activation::gelu) {
        values[0][i] = gelu(values[0][i]);
      } else {
        values[0][i] = mul_(silu(values[0][i]), values[1][i]);
      }
    }
    narrow(values[0], y);
  }
};

template <Fp8Format kFormat, class Element, Activation kActivation>
__global__ void __launch_bounds__(kActivationThreads)
    activation_kernel(ActivationInputs<Element, kActivation> inputs, int64_t rows, Element* y, Fp8Target to) {
  using Inputs = ActivationInputs<Element, kActivation>;
  const int64_t columns = inputs.columns;
  const bool writes = to.codes != nullptr;
  const bool measures = !writes && to.measured != nullptr && !is_superfluous(to);
  if (!writes && !measures && y == nullptr) return;
  const auto across = static_cast<unsigned>(ceil_divide(columns, kActivationColumns));
  const int64_t column =
      static_cast<int64_t>(blockIdx.x % across) * kActivationColumns + threadIdx.x % 32 * 8;
  const int64_t top = static_cast<int64_t>(blockIdx.x / across) * kActivationRows + threadIdx.x / 32;
  constexpr int kStep = kActivationThreads / 32;  // rows of a block that are worked on at once
  const float scale = writes ? fp8_scale(to) : 1.0f;
  Largest<Element> largest;
  if (column < columns) {
    const typename Inputs::Fixed fixed = inputs.fixed(column);
    for (int first = 0; first < kActivationRows; first += kStep * kActivationBatch) {
      typename Inputs::Raw raw[kActivationBatch];
#pragma unroll
      for (int b = 0; b < kActivationBatch; ++b) {
        const int64_t row = top + first + b * kStep;
        if (row < rows) raw[b] = inputs.read(row, column);
      }
#pragma unroll
      for (int b = 0; b < kActivationBatch; ++b) {
        const int64_t row = top + first + b * kStep;
        if (row >= rows) break;
        Eight<Element> rounded;
        inputs.activate(raw[b], fixed, rounded);
        largest.note(rounded);
        if (y != nullptr) store_eight(y + row * columns + column, rounded);
        if (writes) {
          float values[8];
          uint32_t codes[2];
          widen(rounded, values);
          encode_eight<kFormat>(values, scale, codes);
          store_codes(to.codes + row * columns + column, codes);
        }
      }
    }
  }
  if (writes || measures) note_amax<kActivationThreads>(to, largest.bits(), scale);
}

// A source of tiles: y.
template <class Element, Activation kActivation>
struct ActivationValue {
  using Inputs = ActivationInputs<Element, kActivation>;
  using Value = Element;
  using Raw = typename Inputs::Raw;
  using Fixed = typename Inputs::Fixed;
  static constexpr int kOutputs = 1, kBlocks = 2;
  static constexpr int kBatch = sizeof(Element) == 2 && Inputs::kKinds == 1 ? 4 : 2;
  static constexpr bool kKeepsZeros = false;

  Inputs inputs;

  __device__ __forceinline__ Raw read(int64_t row, int64_t column) const { return inputs.read(row, column); }
  __device__ __forceinline__ Fixed fixed(int64_t column) const { return inputs.fixed(column); }
  __device__ __forceinline__ void make(const Raw& raw, const Fixed& fixed, int64_t, int64_t,
                                       Eight<Element> (&made)[1]) const {
    inputs.activate(raw, fixed, made[0]);
  }
};

// A source of tiles: du, of swiglu the gates' and the others'.
template <class Element, Activation kActivation>
struct ActivationGradient {
  using Inputs = ActivationInputs<Element, kActivation>;
  using Value = Element;
  static constexpr int kOutputs = Inputs::kKinds;
  static constexpr int kBlocks = sizeof(Element) == 4 && kOutputs == 2 ? 1 : 2;  // without spills
  static constexpr int kBatch = sizeof(Element) == 2 && kOutputs == 1 ? 2 : 1;
  static constexpr bool kKeepsZeros = false;
  struct Raw {
    typename Inputs::Raw inputs;
    Eight<Element> dy;
  };
  using Fixed = typename Inputs::Fixed;

  Inputs inputs;
  const Element* dy;

  __device__ __forceinline__ Raw read(int64_t row, int64_t column) const {
    return {inputs.read(row, column), load_eight(dy + row * inputs.columns + column)};
  }
  __device__ __forceinline__ Fixed fixed(int64_t column) const { return inputs.fixed(column); }
  __device__ __forceinline__ void make(const Raw& raw, const Fixed& fixed, int64_t, int64_t,
                                       Eight<Element> (&made)[kOutputs]) const {
    float values[kOutputs][8], gradients[8];
    inputs.add(raw.inputs, fixed, values);
    widen(raw.dy, gradients);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if constexpr (kActivation == Activation::gelu) {
        values[0][i] = mul_(gradients[i], gelu_derivative(values[0][i]));
      } else {
        const ActivationTerms terms = silu_terms(values[0][i]);
        values[0][i] = mul_(mul_(gradients[i], values[1][i]), silu_derivative(terms));
        values[1][i] = mul_(gradients[i], silu(terms));
      }
    }
#pragma unroll
    for (int output = 0; output < kOutputs; ++output) narrow(values[output], made[output]);
  }
};

template <Fp8Format kFormat, class Element, Activation kActivation>
void launch_activation(const ActivationForward& work, Stream stream) {
  const ActivationInputs<Element, kActivation> inputs{static_cast<const Element*>(work.u),
                                                      static_cast<const Element*>(work.bias), work.columns};
  if (work.to.transposed != nullptr) {
    return launch_fp8_tiles<kFormat>("an activation", ActivationValue<Element, kActivation>{inputs},
                                     work.rows, work.columns, work.to, static_cast<Element*>(work.y), nullptr,
                                     nullptr, stream);
  }
  const int64_t blocks =
      ceil_divide(work.columns, kActivationColumns) * ceil_divide(work.rows, kActivationRows);
  require(blocks < (int64_t{1} << 31), "an activation of ", work.rows, " x ", work.columns,
          " is too large for one launch; split it");
  if (blocks == 0) return;
  activation_kernel<kFormat>
      <<<static_cast<unsigned>(blocks), kActivationThreads, 0, static_cast<cudaStream_t>(stream)>>>(
          inputs, work.rows, static_cast<Element*>(work.y), work.to);
  check_launch("an activation");
}

template <Fp8Format kFormat, class Element, Activation kActivation>
void launch_activation(const ActivationBackward& work, Stream stream) {
  const ActivationGradient<Element, kActivation> source{
      {static_cast<const Element*>(work.u), static_cast<const Element*>(work.bias), work.columns},
      static_cast<const Element*>(work.dy)};
  const bool only_measures = work.du == nullptr && work.to.codes == nullptr && work.to.measured != nullptr;
  launch_fp8_tiles<kFormat>("an activation's gradient", source, work.rows, work.columns, work.to,
                            static_cast<Element*>(work.du), work.partials,
                            only_measures ? nullptr : work.bias_gradient, stream);
}

// Run-time choices become compile-time ones.
template <class Work>
void launch_activation(const Work& work, Stream stream) {
  with_element(work.type, [&](auto element) {
    using Element = decltype(element);
    const bool is_gelu = work.activation == Activation::gelu;
    if (work.to.format == Fp8Format::e4m3) {
      is_gelu ? launch_activation<Fp8Format::e4m3, Element, Activation::gelu>(work, stream)
              : launch_activation<Fp8Format::e4m3, Element, Activation::swiglu>(work, stream);
    } else {
      is_gelu ? launch_activation<Fp8Format::e5m2, Element, Activation::gelu>(work, stream)
              : launch_activation<Fp8Format::e5m2, Element, Activation::swiglu>(work, stream);
    }
  });
}

template <class Work>
void check_activation(const Work& work, const void* result) {
  require(is_aligned(work.u) && is_aligned(work.bias) && is_aligned(work.to.codes) &&
              is_aligned(work.to.transposed) && is_aligned(result),
          "an activation on a GPU needs memory that begins at a multiple of 16 bytes; copy the tensor");
  require(work.columns % 8 == 0, "an activation on a GPU needs columns that are a multiple of 8, not ",
          work.columns);
  require(work.to.transposed == nullptr || (work.rows % 16 == 0 && work.columns % 16 == 0),
          "an activation with its transpose needs sides that are multiples of 16, not ", work.rows, " x ",
          work.columns, "; use 16 bits there");
}

}  // namespace

void activation_cuda(const ActivationForward& work, Stream stream) {
  check_activation(work, work.y);
  launch_activation(work, stream);
}

void activation_backward_cuda(const ActivationBackward& work, Stream stream) {
  check_activation(work, work.du);
  require(is_aligned(work.dy),
          "an activation on a GPU needs memory that begins at a multiple of 16 bytes; copy the tensor");
  launch_activation(work, stream);
}

}  // namespace pacer::kernels
