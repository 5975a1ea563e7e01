// What is done with every field of an options struct: saved and loaded, in archives and by name, checked,
// compared. Each is a visitor for option_fields.h, with one overload for each kind of value.
#pragma once

#include <cmath>
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <type_traits>
#include <variant>
#include <vector>

#include <torch/serialize/archive.h>

#include <pacer/core/error.h>
#include <pacer/optimizers/detail/option_fields.h>
#include <pacer/optimizers/named_tensors.h>

namespace pacer::detail {

using Betas = std::tuple<double, double>;
template <class Value>
constexpr bool kIsChoice = std::is_enum_v<Value>;

// The last enumerator.
inline int64_t last_choice(MasterWeights) { return static_cast<int64_t>(MasterWeights::none); }
inline int64_t last_choice(Rounding) { return static_cast<int64_t>(Rounding::stochastic); }
inline int64_t last_choice(kernels::ScaleNorm) { return static_cast<int64_t>(kernels::ScaleNorm::l1); }

template <class Choice>
Choice to_choice(int64_t number, const std::string& key) {
  require(number >= 0 && number <= last_choice(Choice{}), "\"", key,
          "\" of the state to load has the unknown value ", number);
  return static_cast<Choice>(number);
}

// ---- Checks ----

// Throws InvalidArgument that names optimizer, option, range and value.
struct CheckRanges {
  const char* optimizer;

  template <class Value>
  void operator()(const OptionField&, const Value&) const {}
  void operator()(const OptionField& field, double value) const {
    switch (field.range) {
      case Range::at_least_zero:
        return require(std::isfinite(value) && value >= 0, optimizer, ": ", field.name,
                       " must be a finite number >= 0, not ", value);
      case Range::above_zero:
        return require(std::isfinite(value) && value > 0, optimizer, ": ", field.name,
                       " must be a finite number > 0, not ", value);
      case Range::below_one:
        return require(value >= 0 && value < 1, optimizer, ": ", field.name, " must be in [0, 1), not ",
                       value);
      case Range::any:
        return;
    }
  }
  void operator()(const OptionField& field, const std::optional<double>& value) const {
    (*this)(field, value.value_or(0));
  }
  void operator()(const OptionField& field, const Betas& betas) const {
    OptionField each = field;
    each.name = "the first beta";
    (*this)(each, std::get<0>(betas));
    each.name = "the second beta";
    (*this)(each, std::get<1>(betas));
  }
};

// ---- Values, for comparison and description ----

using OptionValue = std::variant<bool, int64_t, double, Betas, std::optional<double>, std::optional<int64_t>>;

// Appends every value; enumerators and seeds as numbers.
struct CollectValues {
  std::vector<OptionValue>& values;

  template <class Value>
  void operator()(const OptionField&, const Value& value) const {
    if constexpr (kIsChoice<Value> || std::is_same_v<Value, uint64_t>) {
      values.emplace_back(static_cast<int64_t>(value));
    } else {
      values.emplace_back(value);
    }
  }
};

template <class Options>
std::vector<OptionValue> values_of(const Options& options) {
  std::vector<OptionValue> values;
  visit_options(options, CollectValues{values});
  return values;
}
template <class Options>
bool equal_options(const Options& a, const Options& b) {
  return values_of(a) == values_of(b);
}

// ---- LibTorch's archives, in the layout of torch's optimizers with more keys ----

struct WriteToArchive {
  torch::serialize::OutputArchive& archive;

  template <class Value>
  void operator()(const OptionField& field, const Value& value) const {
    if constexpr (kIsChoice<Value> || std::is_same_v<Value, uint64_t>) {
      archive.write(field.name, c10::IValue(static_cast<int64_t>(value)));
    } else {
      archive.write(field.name, c10::IValue(value));
    }
  }
  template <class Number>
  void operator()(const OptionField& field, const std::optional<Number>& value) const {
    if (value) archive.write(field.name, c10::IValue(*value));
  }
};

// Reads what the archive has. What it lacks keeps its value where a file of that version, or torch's, may
// lack it.
struct ReadFromArchive {
  torch::serialize::InputArchive& archive;
  int64_t version;  // 0: torch's
  std::set<std::string>& known;

  template <class Value>
  void operator()(const OptionField& field, Value& value) const {
    c10::IValue saved;
    if (!find(field, saved, /*needed=*/true)) return;
    if constexpr (kIsChoice<Value>) {
      value = to_choice<Value>(saved.toInt(), field.name);
    } else if constexpr (std::is_same_v<Value, uint64_t>) {
      value = static_cast<uint64_t>(saved.toInt());
    } else {
      value = saved.to<Value>();
    }
  }
  template <class Number>
  void operator()(const OptionField& field, std::optional<Number>& value) const {
    c10::IValue saved;
    const bool found = find(field, saved, /*needed=*/false);
    if (found || version > 0) value = found ? std::optional<Number>(saved.to<Number>()) : std::nullopt;
  }

 private:
  bool find(const OptionField& field, c10::IValue& saved, bool needed) const {
    known.insert(field.name);
    const bool found = archive.try_read(field.name, saved);
    const bool must = needed && (version == 0 ? field.of_torch : field.since <= version);
    require(found || !must, "the archive has no option \"", field.name, "\"");
    return found;
  }
};

template <class Options>
void write_options(const Options& options, torch::serialize::OutputArchive& archive) {
  visit_options(options, WriteToArchive{archive});
  archive.write("state_version", c10::IValue(kStateVersion));
}

template <class Options>
void read_options(Options& options, torch::serialize::InputArchive& archive) {
  std::set<std::string> known = {"state_version"};
  c10::IValue value;
  int64_t version = kIsAdam<Options> && !archive.try_read("bias_correction", value) ? 0 : 1;
  if (archive.try_read("state_version", value)) version = value.toInt();
  Options read = options;
  visit_options(read, ReadFromArchive{archive, version, known});
  for (const std::string& key : archive.keys()) {
    require(version == 0 || known.count(key) != 0, "the archive has the option \"", key,
            "\", which this pacer does not know; it was written by a newer one (state of version ", version,
            ", this is ", kStateVersion, ")");
  }
  options = read;
}

// ---- State by name: each value as numbers, their names behind `prefix` ----

struct WriteByName {
  const std::string& prefix;
  NamedTensors& state;

  template <class Value>
  void operator()(const OptionField& field, const Value& value) const {
    if constexpr (kIsChoice<Value> || std::is_same_v<Value, uint64_t>) {
      put(field.name, static_cast<int64_t>(value));
    } else {
      put(field.name, value);
    }
  }
  void operator()(const OptionField&, const Betas& betas) const {
    put("beta1", std::get<0>(betas));
    put("beta2", std::get<1>(betas));
  }
  void operator()(const OptionField& field, const std::optional<double>& value) const {
    put(std::string("has_") + field.name, value.has_value());
    if (value) put(field.name, *value);
  }
  void operator()(const OptionField& field, const std::optional<int64_t>& steps) const {
    put(field.name, steps.value_or(0));
  }

 private:
  template <class Number>
  void put(const std::string& name, Number number) const {
    state[prefix + name] = number_tensor(number);
  }
};

struct ReadByName {
  const std::string& prefix;
  const NamedTensors& state;
  int64_t version;
  std::set<std::string>& used;

  template <class Value>
  void operator()(const OptionField& field, Value& value) const {
    if (is_older_than(field)) return;
    if constexpr (kIsChoice<Value>) {
      value = to_choice<Value>(take<int64_t>(field.name), prefix + field.name);
    } else if constexpr (std::is_same_v<Value, uint64_t>) {
      value = static_cast<uint64_t>(take<int64_t>(field.name));
    } else {
      value = take<Value>(field.name);
    }
  }
  void operator()(const OptionField&, Betas& betas) const {
    betas = {take<double>("beta1"), take<double>("beta2")};
  }
  void operator()(const OptionField& field, std::optional<double>& value) const {
    if (is_older_than(field)) return;
    value.reset();
    if (take<bool>(std::string("has_") + field.name)) value = take<double>(field.name);
  }
  void operator()(const OptionField& field, std::optional<int64_t>& steps) const {
    if (is_older_than(field)) return;
    const auto number = take<int64_t>(field.name);
    steps = number == 0 ? std::nullopt : std::optional<int64_t>(number);
  }

 private:
  bool is_older_than(const OptionField& field) const {
    return version < field.since && state.count(prefix + field.name) == 0;
  }
  template <class Number>
  Number take(const std::string& name) const {
    used.insert(prefix + name);
    return require_number<Number>(state, prefix + name);
  }
};

}  // namespace pacer::detail
