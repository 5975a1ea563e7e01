// What is done with every field of an options struct: checked, compared, saved and loaded, in archives and by
// name. Each is a visitor for option_fields.h that says what becomes of each kind of value.
#pragma once

#include <cmath>
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include <torch/serialize/archive.h>

#include <pacer/core/error.h>
#include <pacer/optimizers/detail/option_fields.h>
#include <pacer/optimizers/detail/option_numbers.h>
#include <pacer/optimizers/detail/saved_by.h>
#include <pacer/optimizers/named_tensors.h>

namespace pacer::detail {

using Betas = std::tuple<double, double>;

// The optimizer whose options these are.
template <class Options>
constexpr const char* kOptimizerOf = kIs<FusedAdamOptions, Options>      ? "FusedAdam"
                                     : kIs<FusedAdamWOptions, Options>   ? "FusedAdamW"
                                     : kIs<FusedLambOptions, Options>    ? "FusedLamb"
                                     : kIs<FusedSgdOptions, Options>     ? "FusedSgd"
                                     : kIs<FusedRmspropOptions, Options> ? "FusedRmsprop"
                                     : kIs<MuonOptions, Options>         ? "Muon"
                                     : kIs<OneBitMuonOptions, Options>   ? "OneBitMuon"
                                     : kIsScheduleFree<Options>          ? "ScheduleFreeAdamW"
                                     : kIs<OneBitAdamOptions, Options>   ? "OneBitAdam"
                                                                         : "OneBitLamb";

template <class Options>
std::string optimizer_of(const Options& options) {
  if constexpr (kIs<OwnRuleOptions, Options>) {
    return options.rule().name();
  } else {
    return kOptimizerOf<Options>;
  }
}

// The names of the enumerators, in their order.
inline std::vector<std::string> choices(MasterWeights) {
  return {"automatic", "fp32", "remainder", "none", "remainder_8"};
}
inline std::vector<std::string> choices(Rounding) { return {"nearest", "stochastic"}; }
inline std::vector<std::string> choices(ScaleNorm) { return {"rms", "l1"}; }
inline std::vector<std::string> choices(MuonAdjustment) { return {"match_rms_adamw", "original"}; }
inline std::vector<std::string> choices(MuonCoefficients) { return {"quintic", "polar_express"}; }
inline std::vector<std::string> choices(MuonPrecision) { return {"automatic", "bf16", "fp32"}; }

// The type in which a value is saved: int64 for enumerators and seeds, its own for all others.
template <class Value>
using Saved = std::conditional_t<std::is_enum_v<Value> || std::is_same_v<Value, uint64_t>, int64_t, Value>;

// Throws InvalidArgument that names the key where there is no such enumerator.
template <class Value>
Value from_saved(const Saved<Value>& saved, const std::string& key) {
  if constexpr (std::is_enum_v<Value>) {
    require(saved >= 0 && saved < static_cast<int64_t>(choices(Value{}).size()), "\"", key,
            "\" of the state to load has the unknown value ", saved);
  }
  return static_cast<Value>(saved);
}

// ---- Checks and comparison ----

inline void check_range(const char* optimizer, const char* name, Range range, double value) {
  switch (range) {
    case Range::at_least_zero:
      return require(std::isfinite(value) && value >= 0, optimizer, ": ", name,
                     " must be a finite number >= 0, not ", value);
    case Range::above_zero:
      return require(std::isfinite(value) && value > 0, optimizer, ": ", name,
                     " must be a finite number > 0, not ", value);
    case Range::below_one:
      return require(value >= 0 && value < 1, optimizer, ": ", name, " must be in [0, 1), not ", value);
    case Range::any:
      return;
  }
}

// Throws InvalidArgument that names optimizer, option, range and value.
template <class Options>
void check_ranges(const char* optimizer, const Options& options) {
  const auto check = [&](const OptionField& field, const auto& value) {
    using Value = std::decay_t<decltype(value)>;
    if constexpr (std::is_same_v<Value, double>) {
      check_range(optimizer, field.name, field.range, value);
    } else if constexpr (std::is_same_v<Value, std::optional<double>>) {
      check_range(optimizer, field.name, field.range, value.value_or(0));
    } else if constexpr (std::is_same_v<Value, Betas>) {
      check_range(optimizer, "the first beta", field.range, std::get<0>(value));
      check_range(optimizer, "the second beta", field.range, std::get<1>(value));
    }
  };
  visit_options(check, options);
}

template <class Options>
bool equal_options(const Options& left, const Options& right) {
  bool equal = true;
  if constexpr (kIs<OwnRuleOptions, Options>) equal = &left.rule() == &right.rule();
  const auto compare = [&](const OptionField&, const auto& a, const auto& b) { equal = equal && a == b; };
  visit_options(compare, left, right);
  return equal;
}

template <class Options>
void visit_numbers(const Options& options, NumberVisitor& visit) {
  const auto show = [&](const OptionField& field, const auto& value) {
    using Value = std::decay_t<decltype(value)>;
    if constexpr (std::is_same_v<Value, Betas>) {
      visit("beta1", std::get<0>(value));
      visit("beta2", std::get<1>(value));
    } else if constexpr (std::is_same_v<Value, std::optional<int64_t>>) {
      visit(field.name, value.value_or(0));
    } else if constexpr (std::is_same_v<Value, double>) {
      visit(field.name, value);
    } else if constexpr (!kIsOptional<Value>) {  // initial_lr is the only optional left
      visit(field.name, static_cast<int64_t>(value));
    }
  };
  visit_options(show, options);
}

// The options of a group whose optimizer has these defaults: what nobody has changed since the constructor.
template <class Options>
void take_unchanged(const Options& defaults, Options& options) {
  const Options untouched;
  const auto take = [](const OptionField&, auto& value, const auto& initial, const auto& wanted) {
    if (value == initial) value = wanted;
  };
  visit_options(take, options, untouched, defaults);
}

// What states do not hold.
template <class Options>
void take_unsaved(const Options& from, Options& options) {
  const auto take = [](const OptionField& field, auto& value, const auto& other) {
    if (!field.is_saved) value = other;
  };
  visit_options(take, options, from);
}

// ---- LibTorch's archives, in the layout of torch's optimizers with more keys ----

// An option that is unset is left out.
template <class Options>
void write_options(const Options& options, torch::serialize::OutputArchive& archive) {
  const auto write = [&](const OptionField& field, const auto& value) {
    using Value = std::decay_t<decltype(value)>;
    if (!field.is_saved) return;
    if constexpr (kIsOptional<Value>) {
      if (value) archive.write(field.name, c10::IValue(*value));
    } else {
      archive.write(field.name, c10::IValue(static_cast<Saved<Value>>(value)));
    }
  };
  visit_options(write, options);
  archive.write("state_version", c10::IValue(kStateVersion));
  archive.write("optimizer", c10::IValue(optimizer_of(options)));
}

// Reads what the archive has. What it lacks keeps its value where a file of that version, or torch's, may
// lack it.
template <class Options>
void read_options(Options& options, torch::serialize::InputArchive& archive) {
  std::set<std::string> known = {"state_version", "optimizer"};
  c10::IValue saved;
  // 0: torch's, which lack this option.
  int64_t version = kHasTorch<Options> && !archive.try_read("master_weights", saved) ? 0 : 1;
  if (archive.try_read("state_version", saved)) version = saved.toInt();
  const bool says_which = archive.try_read("optimizer", saved);
  require(says_which || version < kNamesSince, "the archive has no option \"optimizer\"");
  require(
      says_which || !kIsScheduleFree<Options>,
      "the archive was saved by another optimizer than ScheduleFreeAdamW, whose exp_avg is a momentum and "
      "no z; go on with that one, or begin a new run from its weights");
  if (says_which) require_same_optimizer(saved.toStringRef(), optimizer_of(options));
  const auto read = [&](const OptionField& field, auto& value) {
    using Value = std::decay_t<decltype(value)>;
    if (!field.is_saved) return;
    known.insert(field.name);
    const bool found = archive.try_read(field.name, saved);
    if constexpr (kIsOptional<Value>) {
      if (found || version > 0) value = found ? Value(saved.to<typename Value::value_type>()) : std::nullopt;
    } else {
      const bool must = version == 0 ? field.of_torch : field.since <= version;
      require(found || !must, "the archive has no option \"", field.name, "\"");
      if (found) value = from_saved<Value>(saved.to<Saved<Value>>(), field.name);
    }
  };
  Options complete = options;
  visit_options(read, complete);
  for (const std::string& key : archive.keys()) {
    require(version == 0 || known.count(key) != 0, "the archive has the option \"", key,
            "\", which this pacer does not know; it was written by a newer one (state of version ", version,
            ", this is ", kStateVersion, ")");
  }
  options = complete;
}

// ---- State by name: each value as numbers, their names behind `prefix` ----

template <class Options>
void write_options(const Options& options, const std::string& prefix, NamedTensors& state) {
  const auto write = [&](const OptionField& field, const auto& value) {
    using Value = std::decay_t<decltype(value)>;
    if (!field.is_saved) return;
    const std::string key = prefix + field.name;
    if constexpr (std::is_same_v<Value, Betas>) {
      state[prefix + "beta1"] = number_tensor(std::get<0>(value));
      state[prefix + "beta2"] = number_tensor(std::get<1>(value));
    } else if constexpr (std::is_same_v<Value, std::optional<double>>) {
      state[prefix + "has_" + field.name] = number_tensor(value.has_value());
      if (value) state[key] = number_tensor(*value);
    } else if constexpr (std::is_same_v<Value, std::optional<int64_t>>) {
      state[key] = number_tensor(value.value_or(0));
    } else {
      state[key] = number_tensor(static_cast<Saved<Value>>(value));
    }
  };
  visit_options(write, options);
}

// From a state of that version; 0: of torch's optimizer. Throws InvalidArgument naming what is missing; adds
// the names it read to `used`.
template <class Options>
void read_options(Options& options, const std::string& prefix, const NamedTensors& state, int64_t version,
                  std::set<std::string>& used) {
  const auto take = [&](auto& number, const std::string& name) {
    used.insert(prefix + name);
    number = require_number<std::decay_t<decltype(number)>>(state, prefix + name);
  };
  const auto read = [&](const OptionField& field, auto& value) {
    using Value = std::decay_t<decltype(value)>;
    if (!field.is_saved) return;
    if constexpr (std::is_same_v<Value, Betas>) {
      take(std::get<0>(value), "beta1");
      take(std::get<1>(value), "beta2");
    } else if (version < field.since && !(version == 0 && field.of_torch) &&
               state.count(prefix + field.name) == 0) {
      return;  // an older state, or torch's
    } else if constexpr (std::is_same_v<Value, std::optional<double>>) {
      bool has_value = false;
      take(has_value, std::string("has_") + field.name);
      value.reset();
      if (has_value) take(value.emplace(), field.name);
    } else if constexpr (std::is_same_v<Value, std::optional<int64_t>>) {
      take(value.emplace(), field.name);
      if (*value == 0) value.reset();
    } else {
      Saved<Value> saved{};
      take(saved, field.name);
      value = from_saved<Value>(saved, prefix + field.name);
    }
  };
  visit_options(read, options);
}

}  // namespace pacer::detail
