// What the optimizer tests share: the torch and the fused optimizers under one set of names, comparison by
// bits, and snapshots that show whether anything at all has changed.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

#include <ATen/Parallel.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>

#include <pacer/core/error.h>
#include <pacer/optimizers/fused_adam.h>
#include <pacer/optimizers/fused_rmsprop.h>
#include <pacer/optimizers/fused_sgd.h>

namespace pacer::testing {

using torch::Tensor;

// Tests run on one thread unless they say otherwise: LibTorch's idle threads spin, so that on a busy machine
// a test of small tensors takes ten times as long with two.
inline const bool kOneThread = (at::set_num_threads(1), true);

template <class Optimizer>
struct Family;
template <>
struct Family<torch::optim::Adam> {
  using Options = torch::optim::AdamOptions;
  using ParamState = torch::optim::AdamParamState;
};
template <>
struct Family<torch::optim::AdamW> {
  using Options = torch::optim::AdamWOptions;
  using ParamState = torch::optim::AdamWParamState;
};
template <>
struct Family<FusedAdam> {
  using Options = FusedAdamOptions;
  using ParamState = FusedAdamParamState;
  using Peer = torch::optim::Adam;
};
template <>
struct Family<FusedAdamW> {
  using Options = FusedAdamWOptions;
  using ParamState = FusedAdamWParamState;
  using Peer = torch::optim::AdamW;
};

template <>
struct Family<torch::optim::SGD> {
  using Options = torch::optim::SGDOptions;
  using ParamState = torch::optim::SGDParamState;
};
template <>
struct Family<FusedSgd> {
  using Options = FusedSgdOptions;
  using ParamState = FusedSgdParamState;
  using Peer = torch::optim::SGD;
};
template <>
struct Family<torch::optim::RMSprop> {
  using Options = torch::optim::RMSpropOptions;
  using ParamState = torch::optim::RMSpropParamState;
};
template <>
struct Family<FusedRmsprop> {
  using Options = FusedRmspropOptions;
  using ParamState = FusedRmspropParamState;
  using Peer = torch::optim::RMSprop;
};

template <class Optimizer>
using OptionsOf = typename Family<Optimizer>::Options;
template <class Optimizer>
using ParamStateOf = typename Family<Optimizer>::ParamState;
template <class Optimizer>
using PeerOf = typename Family<Optimizer>::Peer;
template <class Optimizer>
constexpr bool kIsFused = std::is_base_of_v<FusedOptimizer, Optimizer>;
template <class Optimizer>
constexpr bool kIsDecoupled =
    std::is_same_v<Optimizer, FusedAdamW> || std::is_same_v<Optimizer, torch::optim::AdamW>;

// The ways in which a parameter and its state can be stored.
struct Mode {
  const char* name;
  at::ScalarType dtype;
  MasterWeights master_weights;
  Rounding rounding;
};

inline const std::vector<Mode>& all_modes() {
  static const std::vector<Mode> modes = {
      {"fp64", at::kDouble, MasterWeights::automatic, Rounding::nearest},
      {"fp32", at::kFloat, MasterWeights::automatic, Rounding::nearest},
      {"bf16 + remainder", at::kBFloat16, MasterWeights::remainder, Rounding::nearest},
      {"bf16 + fp32 master", at::kBFloat16, MasterWeights::fp32, Rounding::nearest},
      {"bf16 to nearest", at::kBFloat16, MasterWeights::none, Rounding::nearest},
      {"bf16 stochastic", at::kBFloat16, MasterWeights::none, Rounding::stochastic},
      {"fp16 + fp32 master", at::kHalf, MasterWeights::fp32, Rounding::nearest},
      {"bf16 + 8-bit remainder", at::kBFloat16, MasterWeights::remainder_8, Rounding::nearest},
  };
  return modes;
}

template <class Options>
Options with_mode(Options options, const Mode& mode) {
  return options.master_weights(mode.master_weights).rounding(mode.rounding);
}

// The state the optimizer has of a parameter; throws std::out_of_range where it has none.
template <class Optimizer>
ParamStateOf<Optimizer>& state_of(Optimizer& optimizer, const Tensor& parameter) {
  return static_cast<ParamStateOf<Optimizer>&>(*optimizer.state().at(parameter.unsafeGetTensorImpl()));
}

template <class Optimizer>
OptionsOf<Optimizer>& options_of(Optimizer& optimizer, size_t group = 0) {
  return static_cast<OptionsOf<Optimizer>&>(optimizer.param_groups().at(group).options());
}

inline std::vector<double> to_doubles(const Tensor& tensor) {
  const Tensor flat = tensor.detach().cpu().to(at::kDouble).contiguous();
  return {flat.data_ptr<double>(), flat.data_ptr<double>() + flat.numel()};
}

// True if both are undefined, or dtype, shape and every bit are the same.
inline bool same_bits(const Tensor& a, const Tensor& b) {
  if (a.defined() != b.defined()) return false;
  if (!a.defined()) return true;
  if (a.scalar_type() != b.scalar_type() || a.sizes() != b.sizes()) return false;
  const Tensor left = a.detach().cpu().contiguous(), right = b.detach().cpu().contiguous();
  return left.numel() == 0 || std::memcmp(left.const_data_ptr(), right.const_data_ptr(), left.nbytes()) == 0;
}

inline bool same_bits(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (!same_bits(a[i], b[i])) return false;
  }
  return true;
}

// The largest |a - b| over all elements, 0 for tensors without elements, infinite where one is NaN.
inline double distance(const Tensor& a, const Tensor& b) {
  if (a.numel() == 0) return 0;
  const double largest =
      (a.detach().cpu().to(at::kDouble) - b.detach().cpu().to(at::kDouble)).abs().max().item<double>();
  return largest == largest ? largest : HUGE_VAL;
}

inline double distance(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  double largest = a.size() == b.size() ? 0 : HUGE_VAL;
  for (size_t i = 0; i < a.size() && i < b.size(); ++i) largest = std::max(largest, distance(a[i], b[i]));
  return largest;
}

inline int64_t count_true(const Tensor& condition) { return condition.sum().item<int64_t>(); }

// Leaves of their own memory with the same values and strides.
inline std::vector<Tensor> clones(const std::vector<Tensor>& parameters) {
  std::vector<Tensor> copies;
  for (const Tensor& parameter : parameters) {
    copies.push_back(parameter.detach().clone().requires_grad_(parameter.requires_grad()));
  }
  return copies;
}

// Random leaves of the given shapes.
inline std::vector<Tensor> random_parameters(const std::vector<std::vector<int64_t>>& shapes,
                                             at::ScalarType dtype) {
  std::vector<Tensor> parameters;
  for (const auto& shape : shapes) {
    parameters.push_back(torch::randn(shape, at::kDouble).to(dtype).requires_grad_());
  }
  return parameters;
}

// The same random gradient, representable in `common`, for each pair of parameters of the two lists.
inline void set_random_gradients(const std::vector<Tensor>& parameters,
                                 const std::vector<Tensor>& others = {},
                                 at::ScalarType common = at::kDouble) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    const Tensor gradient =
        torch::randn(parameters[i].sizes(), at::kDouble).to(parameters[i].scalar_type()).to(common);
    parameters[i].mutable_grad() = gradient.to(parameters[i].options().requires_grad(false));
    if (i < others.size()) others[i].mutable_grad() = gradient.to(others[i].options().requires_grad(false));
  }
}

// Everything about an optimizer that a call which must change nothing could have changed.
template <class Optimizer>
struct Snapshot {
  struct Parameter {
    Tensor value, gradient;
    bool has_state = false;
    int64_t step = 0;
    std::vector<Tensor> state;
  };
  std::vector<Parameter> parameters;
  std::vector<OptionsOf<Optimizer>> options;
  size_t states = 0;
};

// Undefined where there are no bits to copy.
inline Tensor copy_of(const Tensor& tensor) {
  const bool has_bits = tensor.defined() && tensor.layout() == at::kStrided && !tensor.is_meta();
  return has_bits ? tensor.detach().clone() : Tensor();
}

template <class Optimizer>
Snapshot<Optimizer> snapshot(const Optimizer& optimizer) {
  Snapshot<Optimizer> shot;
  shot.states = optimizer.state().size();
  for (const auto& group : optimizer.param_groups()) {
    shot.options.push_back(static_cast<const OptionsOf<Optimizer>&>(group.options()));
    for (const Tensor& parameter : group.params()) {
      auto& entry = shot.parameters.emplace_back();
      if (!parameter.defined()) continue;
      entry.value = copy_of(parameter);
      entry.gradient = copy_of(parameter.grad());
      const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
      if (found == optimizer.state().end()) continue;
      const auto& state = static_cast<const ParamStateOf<Optimizer>&>(*found->second);
      entry.has_state = true;
      entry.step = state.step();
      entry.state = {copy_of(state.exp_avg()), copy_of(state.exp_avg_sq()), copy_of(state.max_exp_avg_sq())};
      if constexpr (kIsFused<Optimizer>) {
        entry.state.push_back(copy_of(state.master()));
        entry.state.push_back(copy_of(state.remainder()));
        entry.state.push_back(copy_of(state.exp_avg_scale()));
        entry.state.push_back(copy_of(state.exp_avg_sq_scale()));
      }
    }
  }
  return shot;
}

// Names the first difference; empty if there is none.
template <class Optimizer>
std::string difference(const Snapshot<Optimizer>& a, const Snapshot<Optimizer>& b) {
  static const char* const kFields[] = {"exp_avg",   "exp_avg_sq",    "max_exp_avg_sq",  "master",
                                        "remainder", "exp_avg_scale", "exp_avg_sq_scale"};
  if (a.parameters.size() != b.parameters.size()) return "number of parameters";
  if (a.options.size() != b.options.size()) return "number of groups";
  for (size_t g = 0; g < a.options.size(); ++g) {
    if (!(a.options[g] == b.options[g])) return "options of group " + std::to_string(g);
  }
  for (size_t i = 0; i < a.parameters.size(); ++i) {
    const auto &left = a.parameters[i], &right = b.parameters[i];
    const std::string where = " of parameter " + std::to_string(i);
    if (!same_bits(left.value, right.value)) return "value" + where;
    if (!same_bits(left.gradient, right.gradient)) return "gradient" + where;
    if (left.has_state != right.has_state) return "existence of the state" + where;
    if (left.step != right.step) return "step" + where;
    for (size_t f = 0; f < left.state.size(); ++f) {
      if (!same_bits(left.state[f], right.state[f])) return kFields[f] + where;
    }
  }
  if (a.states != b.states) return "number of states";
  return "";
}

// Runs `action`, which must be refused with an InvalidArgument; returns its message, or what happened
// instead.
template <class Action>
std::string refusal(Action action) {
  try {
    action();
  } catch (const InvalidArgument& error) {
    return error.what();
  } catch (const std::exception& error) {
    const std::string text = error.what();
    return "<another exception> " + text.substr(0, text.find('\n'));
  }
  return "<no exception>";
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// "" if the action was refused by a message with all the parts and left the optimizer as it was, else what is
// wrong.
template <class Optimizer, class Action>
std::string unless_refused(Optimizer& optimizer, const std::vector<std::string>& parts, Action action) {
  const auto before = snapshot(optimizer);
  const std::string message = refusal(action);
  if (message.empty() || message[0] == '<') return message.empty() ? "<empty message>" : message;
  for (const std::string& part : parts) {
    if (!contains(message, part)) return "<no '" + part + "' in> " + message;
  }
  const std::string changed = difference(before, snapshot(optimizer));
  return changed.empty() ? "" : "<changed> " + changed;
}

}  // namespace pacer::testing
