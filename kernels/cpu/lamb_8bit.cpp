// The CPU loops of LAMB with moments in 8 bits. A group of moments is decoded, updated and encoded while it is in the
// core's own cache, and its squares go to the columns of its unit, as in lamb.cpp. The element arithmetic is
// kernels/math; nothing here rounds.
#include <pacer/kernels/lamb_8bit.h>

#include <algorithm>

#include <pacer/core/reduction_order.h>
#include <pacer/kernels/cpu/coded_loop.h>
#include <pacer/kernels/cpu/fold_columns.h>
#include <pacer/kernels/math/moment_codes.h>

namespace pacer::kernels {
namespace {

using Codes = EightBitMoments;
constexpr int64_t kGroup = Codes::kGroup;
static_assert(kReductionColumns % kGroup == 0);

// The parameter's exact value. A function of its own, as those below: locals of a loop would be arrays to the compiler
// and keep it from vectorising.
template <AdamStorage kStorage>
PACER_HOST_DEVICE float parameter_of(const CodedGroups<Codes, kStorage>& range, int64_t i) {
  StoredElement<kStorage> stored;
  stored.parameter = range.parameter[i];
  if constexpr (StorageOf<kStorage>::kHasExtra) stored.extra = range.extra[i];
  return load_parameter(stored);
}

template <AdamStorage kStorage>
PACER_HOST_DEVICE void moments_of_element(const CodedGroups<Codes, kStorage>& range, int64_t i,
                                          const LambScalars<float>& scalars, const Codes::First& first,
                                          const Codes::Second& second, float& exp_avg, float& exp_avg_sq) {
  exp_avg = first.decode(range.exp_avg[i]);
  exp_avg_sq = second.decode(range.exp_avg_sq[i]);
  update_moments(mul_(scalars.factor, load(range.gradient[i])), scalars, exp_avg, exp_avg_sq);
}

// Encodes the moments, and adds the squares that follow from their codes.
template <AdamStorage kStorage>
PACER_HOST_DEVICE void store_moments_of_element(const CodedGroups<Codes, kStorage>& range, int64_t i,
                                                const LambScalars<float>& scalars, const Codes::First& first,
                                                const Codes::Second& second, float exp_avg, float exp_avg_sq,
                                                float& parameter_column, float& update_column) {
  const int8_t code = first.encode(exp_avg);
  const uint8_t code_sq = second.encode(exp_avg_sq);
  range.exp_avg[i] = code;
  range.exp_avg_sq[i] = code_sq;
  const auto terms =
      lamb_terms_of_codes(parameter_of(range, i), first.decode(code), second.decode(code_sq), scalars);
  parameter_column = fma_(terms.parameter, terms.parameter, parameter_column);
  update_column = fma_(terms.update, terms.update, update_column);
}

// Whole groups, of which there are as many columns as elements.
template <AdamStorage kStorage>
PACER_TARGET_CLONES void moments_of_groups(const CodedGroups<Codes, kStorage>& r, const LambScalars<float>& s,
                                           int64_t groups, float* parameter_columns, float* update_columns) {
  const CodedGroups<Codes, kStorage> range = r;  // local copies: nothing the loop writes can alias them
  const LambScalars<float> scalars = s;
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t begin = g * kGroup;
    float exp_avg[kGroup], exp_avg_sq[kGroup];
    uint32_t largest = 0, largest_sq = 0;
    const Codes::First was(range.exp_avg_scale[g]);
    const Codes::Second was_sq(range.exp_avg_sq_scale[g]);
    PACER_SIMD
    for (int64_t i = 0; i < kGroup; ++i) {
      moments_of_element(range, begin + i, scalars, was, was_sq, exp_avg[i], exp_avg_sq[i]);
    }
    for (int64_t i = 0; i < kGroup; ++i) {
      largest = std::max(largest, Codes::First::measure(exp_avg[i]));
      largest_sq = std::max(largest_sq, Codes::Second::measure(exp_avg_sq[i]));
    }
    range.exp_avg_scale[g] = Codes::First::scale_of(largest);
    range.exp_avg_sq_scale[g] = Codes::Second::scale_of(largest_sq);
    const Codes::First now(range.exp_avg_scale[g]);
    const Codes::Second now_sq(range.exp_avg_sq_scale[g]);
    PACER_SIMD
    for (int64_t i = 0; i < kGroup; ++i) {
      store_moments_of_element(range, begin + i, scalars, now, now_sq, exp_avg[i], exp_avg_sq[i],
                               parameter_columns[begin + i], update_columns[begin + i]);
    }
  }
}

// The group that a tensor ends in, which has `count` elements. The others are zeros.
template <AdamStorage kStorage>
void moments_of_rest(const CodedGroups<Codes, kStorage>& range, const LambScalars<float>& scalars,
                     int64_t count, float* parameter_columns, float* update_columns) {
  using Types = StorageOf<kStorage>;
  typename Types::Param gradient[kGroup]{}, parameter[kGroup]{};
  typename Types::Extra extra[kGroup]{};
  int8_t exp_avg[kGroup]{};
  uint8_t exp_avg_sq[kGroup]{};
  float parameter_squares[kGroup]{}, update_squares[kGroup]{};
  std::copy_n(range.gradient, count, gradient);
  std::copy_n(range.parameter, count, parameter);
  if constexpr (Types::kHasExtra) std::copy_n(range.extra, count, extra);
  std::copy_n(range.exp_avg, count, exp_avg);
  std::copy_n(range.exp_avg_sq, count, exp_avg_sq);
  std::copy_n(parameter_columns, count, parameter_squares);
  std::copy_n(update_columns, count, update_squares);
  const CodedGroups<Codes, kStorage> whole{
      gradient, parameter, extra, exp_avg, exp_avg_sq, range.exp_avg_scale, range.exp_avg_sq_scale};
  moments_of_groups(whole, scalars, 1, parameter_squares, update_squares);
  std::copy_n(exp_avg, count, range.exp_avg);
  std::copy_n(exp_avg_sq, count, range.exp_avg_sq);
  std::copy_n(parameter_squares, count, parameter_columns);
  std::copy_n(update_squares, count, update_columns);
}

template <AdamStorage kStorage>
void moments_of_unit(const Tile& unit, const AdamTensor& tensor, const void* gradient,
                     const LambScalars<float>& scalars, double* parameter_partial, double* update_partial) {
  using Groups = CodedGroups<Codes, kStorage>;
  alignas(64) float parameter_columns[kReductionColumns];
  alignas(64) float update_columns[kReductionColumns];
  const int64_t width = used_columns(unit.count);
  std::fill_n(parameter_columns, width, 0.0f);
  std::fill_n(update_columns, width, 0.0f);
  for (int64_t row = 0; row < unit.count; row += kReductionColumns) {
    const int64_t begin = unit.offset + row;
    const int64_t count = std::min<int64_t>(kReductionColumns, unit.count - row);
    const int64_t groups = count / kGroup, whole = groups * kGroup;
    moments_of_groups(Groups::of(tensor, gradient, begin), scalars, groups, parameter_columns,
                      update_columns);
    if (whole == count) continue;
    moments_of_rest(Groups::of(tensor, gradient, begin + whole), scalars, count - whole,
                    parameter_columns + whole, update_columns + whole);
  }
  *parameter_partial = fold_first_columns(parameter_columns, width);
  *update_partial = fold_first_columns(update_columns, width);
}

template <AdamStorage kStorage>
PACER_HOST_DEVICE void update_element(const CodedGroups<Codes, kStorage>& range, int64_t i,
                                      const LambScalars<float>& scalars, const Codes::First& first,
                                      const Codes::Second& second, float step_size, uint32_t random16) {
  const auto terms = lamb_terms_of_codes(parameter_of(range, i), first.decode(range.exp_avg[i]),
                                         second.decode(range.exp_avg_sq[i]), scalars);
  StoredElement<kStorage> stored;
  store_parameter(lamb_parameter(terms, step_size), random16, stored);
  range.parameter[i] = stored.parameter;
  if constexpr (StorageOf<kStorage>::kHasExtra) range.extra[i] = stored.extra;
}

template <AdamStorage kStorage>
PACER_TARGET_CLONES void update_groups(const CodedGroups<Codes, kStorage>& r, const LambScalars<float>& s,
                                       float step_size, int64_t count, const uint16_t* random16) {
  const CodedGroups<Codes, kStorage> range = r;
  const LambScalars<float> scalars = s;
  for (int64_t begin = 0; begin < count; begin += kGroup) {
    const Codes::First first(range.exp_avg_scale[begin / kGroup]);
    const Codes::Second second(range.exp_avg_sq_scale[begin / kGroup]);
    const int64_t end = std::min(begin + kGroup, count);
    PACER_SIMD
    for (int64_t i = begin; i < end; ++i) {
      uint32_t random = 0;
      if constexpr (kStorage == AdamStorage::bf16_stochastic) random = random16[i];
      update_element(range, i, scalars, first, second, step_size, random);
    }
  }
}

// Calls run(storage, scalars) where the tile's tensor takes part in the step.
template <class Run>
void with_work(AdamStorage storage, const AdamGradient& gradient, const StepScalars* scalars,
               const Run& run) {
  if (gradient.gradient == nullptr) return;
  const auto& of_step = scalars[gradient.scalars].as<LambScalars<float>>();
  if (of_step.skip) return;
  const FullDenormals full_denormals;
  with_storage(storage, [&](auto chosen) {
    if constexpr (chosen() == AdamStorage::f64) {
      require(false, "the moments of fp64 parameters have no codes in 8 bits");
    } else {
      run(chosen, of_step);
    }
  });
}

}  // namespace

const LambLoops kLamb8BitLoops{lamb_8bit_moments_cpu, lamb_8bit_update_cpu, lamb_8bit_cuda};

void lamb_8bit_moments_cpu(AdamStorage storage, const Tile& unit, const AdamTensor* tensors,
                           const AdamGradient* gradients, const StepScalars* scalars,
                           double* parameter_partial, double* update_partial) {
  const AdamGradient& gradient = gradients[unit.tensor];
  with_work(storage, gradient, scalars, [&](auto chosen, const LambScalars<float>& of_step) {
    moments_of_unit<chosen()>(unit, tensors[unit.tensor], gradient.gradient, of_step, parameter_partial,
                              update_partial);
  });
}

void lamb_8bit_update_cpu(AdamStorage storage, const Tile& tile, const AdamTensor* tensors,
                          const AdamGradient* gradients, const StepScalars* scalars,
                          const LambRatio* ratios) {
  const AdamGradient& gradient = gradients[tile.tensor];
  with_work(storage, gradient, scalars, [&](auto chosen, const LambScalars<float>& of_step) {
    const AdamTensor& tensor = tensors[tile.tensor];
    const auto step_size = static_cast<float>(ratios[tile.tensor].step_size);
    for_each_coded_piece<Codes, chosen()>(
        tile, tensor, of_step, [&](int64_t begin, int64_t count, const uint16_t* random16) {
          update_groups(CodedGroups<Codes, chosen()>::of(tensor, gradient.gradient, begin), of_step,
                        step_size, count, random16);
        });
  });
}

}  // namespace pacer::kernels
