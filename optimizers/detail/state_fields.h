// The tensors of a parameter's state, listed once. Archives, state by name, checks and the engine's plan go
// through this list.
#pragma once

#include <optional>

#include <pacer/kernels/math/adam_storage.h>
#include <pacer/optimizers/adam_param_state.h>
#include <pacer/optimizers/detail/optimizer_traits.h>

namespace pacer::detail {

enum class StateKind {
  moment,         // of the parameter's shape, in the dtype of moments
  second_moment,  // the same, where the rule has one
  max_moment,     // the same, with amsgrad only
  master,         // of the parameter's shape, fp32
  remainder,      // of the parameter's shape, int16
  trust_average,  // two fp64 numbers
};

struct StateField {
  const char* name;
  StateKind kind;
  at::Tensor& (FusedAdamStateFields::*get)() noexcept;
  const at::Tensor& (FusedAdamStateFields::*read)() const noexcept;
};

inline constexpr char kTrustAverage[] = "trust_average";
inline constexpr size_t kStateFieldCount = 6;
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
};

// The dtype of a field for a parameter of that dtype set; none where such a parameter has no such tensor.
std::optional<at::ScalarType> field_dtype(StateKind kind, kernels::AdamStorage storage,
                                          const GroupSettings& settings);

}  // namespace pacer::detail
