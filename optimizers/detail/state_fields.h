// The tensors of a parameter's state, and the numbers of one that averages, listed once. Archives, state by name,
// checks and the engine's plan go through these lists.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include <c10/util/accumulate.h>

#include <pacer/kernels/adam_8bit.h>
#include <pacer/kernels/math/adam_storage.h>
#include <pacer/optimizers/adam_param_state.h>
#include <pacer/optimizers/detail/optimizer_traits.h>

namespace pacer::detail {

enum class StateKind {
  moment,               // of the parameter's shape, in the dtype of moments
  second_moment,        // the same, where the rule has one
  max_moment,           // the same, with amsgrad only
  master,               // of the parameter's shape, fp32
  remainder,            // of the parameter's shape, int16, or int8 where it is a correction
  trust_average,        // two fp64 numbers
  row_moment,           // a number for each row, fp32, or fp64 for fp64 parameters
  moment_scale,         // fp16, a number for each group of codes, where moments are in 8 bits
  second_moment_scale,  // the same of the second moment
};

// Whether a field has the parameter's shape. The others are small, and are not paged; of them scales alone are cut into
// parts.
constexpr bool is_elementwise(StateKind kind) { return kind < StateKind::trust_average; }
constexpr bool is_scale(StateKind kind) {
  return kind == StateKind::moment_scale || kind == StateKind::second_moment_scale;
}
// Whether a field is a moment that can be in 8 bits.
constexpr bool is_coded(StateKind kind) {
  return kind == StateKind::moment || kind == StateKind::second_moment;
}
constexpr at::ScalarType codes_dtype(StateKind kind) {
  return kind == StateKind::moment ? at::kChar : at::kByte;
}
// How many scales so many codes have.
constexpr int64_t scales_of(int64_t codes) {
  return (codes + kernels::kMomentGroup - 1) / kernels::kMomentGroup;
}
// The shape of a field of a parameter of these sizes.
inline std::vector<int64_t> field_sizes(StateKind kind, at::IntArrayRef parameter) {
  if (kind == StateKind::trust_average) return {2};
  if (kind == StateKind::row_moment) return {parameter.empty() ? 1 : parameter.front()};
  if (is_scale(kind)) return {scales_of(c10::multiply_integers(parameter))};
  return parameter.vec();
}

struct StateField {
  const char* name;
  StateKind kind;
  at::Tensor& (FusedAdamStateFields::*get)() noexcept;
  const at::Tensor& (FusedAdamStateFields::*read)() const noexcept;
};

inline constexpr char kTrustAverage[] = "trust_average";
inline constexpr char kRowMoment[] = "row_moment";
inline constexpr size_t kStateFieldCount = 9;
inline constexpr StateField kStateFields[kStateFieldCount] = {
    {"exp_avg", StateKind::moment, &FusedAdamStateFields::exp_avg, &FusedAdamStateFields::exp_avg},
    {"exp_avg_sq", StateKind::second_moment, &FusedAdamStateFields::exp_avg_sq,
     &FusedAdamStateFields::exp_avg_sq},
    {"max_exp_avg_sq", StateKind::max_moment, &FusedAdamStateFields::max_exp_avg_sq,
     &FusedAdamStateFields::max_exp_avg_sq},
    {"master", StateKind::master, &FusedAdamStateFields::master, &FusedAdamStateFields::master},
    {"remainder", StateKind::remainder, &FusedAdamStateFields::remainder, &FusedAdamStateFields::remainder},
    {kTrustAverage, StateKind::trust_average, &FusedAdamStateFields::trust_average,
     &FusedAdamStateFields::trust_average},
    {kRowMoment, StateKind::row_moment, &FusedAdamStateFields::row_moment, &FusedAdamStateFields::row_moment},
    {"exp_avg_scale", StateKind::moment_scale, &FusedAdamStateFields::exp_avg_scale,
     &FusedAdamStateFields::exp_avg_scale},
    {"exp_avg_sq_scale", StateKind::second_moment_scale, &FusedAdamStateFields::exp_avg_sq_scale,
     &FusedAdamStateFields::exp_avg_sq_scale},
};
// The scales of a field that is_coded.
constexpr const StateField& scale_field(StateKind kind) {
  return kStateFields[kind == StateKind::moment ? 7 : 8];
}

// The numbers of a state that averages, beside its step count.
struct AverageNumber {
  const char* name;
  double kernels::AverageWeights::*value;
};
inline constexpr AverageNumber kAverageNumbers[] = {{"weight_sum", &kernels::AverageWeights::weight_sum},
                                                    {"lr_max", &kernels::AverageWeights::lr_max}};
// Throws InvalidArgument where they are no such numbers; `what` is whose they are.
void check_average(const kernels::AverageWeights& average, const std::string& what);

// The dtype of a field for a parameter of that dtype set; none where such a parameter has no such tensor.
std::optional<at::ScalarType> field_dtype(StateKind kind, kernels::AdamStorage storage,
                                          const GroupSettings& settings);

}  // namespace pacer::detail
