// The optimizers as a class of torch's registry, torch.classes.pacer.Optimizer, which the Python package
// "pacer" wraps. It holds an optimizer of C++ together with its parameters, so that a step passes nothing:
// C++ reads the gradients of its own handles. Options come as numbers and names by the names of the C++
// setters; the package knows which there are.
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Dict.h>
#include <torch/custom_class.h>

#include <pacer/core/error.h>
#include <pacer/core/version.h>
#include <pacer/optimizers/detail/option_visitors.h>
#include <pacer/optimizers/detail/state_fields.h>
#include <pacer/optimizers/fused_adam.h>
#include <pacer/optimizers/fused_lamb.h>

namespace pacer {
namespace {

using torch::optim::OptimizerOptions;
using torch::optim::OptimizerParamState;
using Numbers = c10::Dict<std::string, double>;
using Choices = c10::Dict<std::string, std::string>;
using Tensors = c10::Dict<std::string, at::Tensor>;

template <class Value>
Value chosen(const char* name, const std::string& choice) {
  const std::vector<std::string> choices = detail::choices(Value{});
  std::string offered;
  for (size_t i = 0; i < choices.size(); ++i) {
    if (choices[i] == choice) return static_cast<Value>(i);
    offered += (i == 0 ? "\"" : ", \"") + choices[i] + "\"";
  }
  throw InvalidArgument(detail::concatenate(name, " is \"", choice, "\", but must be one of ", offered));
}

// Options of C++ from what Python passed; what it did not pass keeps its default.
template <class Options>
std::unique_ptr<OptimizerOptions> make_options(const Numbers& numbers, const Choices& choices) {
  auto options = std::make_unique<Options>();
  const auto take = [&](const detail::OptionField& field, auto& value) {
    using Value = std::decay_t<decltype(value)>;
    if constexpr (std::is_same_v<Value, detail::Betas>) {
      if (numbers.contains("beta1")) value = {numbers.at("beta1"), numbers.at("beta2")};
    } else if constexpr (std::is_enum_v<Value>) {
      if (choices.contains(field.name)) value = chosen<Value>(field.name, choices.at(field.name));
    } else if constexpr (detail::kIsOptional<Value>) {
      if (numbers.contains(field.name)) {
        value = static_cast<typename Value::value_type>(numbers.at(field.name));
      }
    } else if (numbers.contains(field.name)) {
      value = static_cast<Value>(numbers.at(field.name));
    }
  };
  detail::visit_options(take, *options);
  return options;
}

// Which optimizer it is: the only place where its types are known.
struct Rule {
  std::function<std::unique_ptr<OptimizerOptions>(const Numbers&, const Choices&)> options;
  std::function<std::unique_ptr<FusedOptimizer>(const OptimizerOptions&)> optimizer;
  std::function<std::unique_ptr<OptimizerParamState>()> state;
};

template <class Optimizer, class Options, class State>
Rule rule_of() {
  return {make_options<Options>,
          [](const OptimizerOptions& defaults) {
            return std::make_unique<Optimizer>(std::vector<torch::optim::OptimizerParamGroup>{},
                                               static_cast<const Options&>(defaults));
          },
          [] { return std::make_unique<State>(); }};
}

Rule rule_named(const std::string& name) {
  if (name == "FusedAdam") return rule_of<FusedAdam, FusedAdamOptions, FusedAdamParamState>();
  if (name == "FusedAdamW") return rule_of<FusedAdamW, FusedAdamWOptions, FusedAdamWParamState>();
  if (name == "FusedLamb") return rule_of<FusedLamb, FusedLambOptions, FusedLambParamState>();
  throw InvalidArgument(detail::concatenate("there is no optimizer \"", name, "\""));
}

class PythonOptimizer : public torch::CustomClassHolder {
 public:
  PythonOptimizer(const std::string& name, const Numbers& numbers, const Choices& choices)
      : rule_(rule_named(name)), optimizer_(rule_.optimizer(*rule_.options(numbers, choices))) {}

  // `names` has one name for each parameter, or none at all.
  void add_group(const std::vector<at::Tensor>& parameters, const std::vector<std::string>& names,
                 const Numbers& numbers, const Choices& choices) {
    auto options = rule_.options(numbers, choices);
    if (names.empty()) return optimizer_->add_param_group({parameters, std::move(options)});
    NamedParameters named;
    for (size_t i = 0; i < names.size(); ++i) named.insert(names[i], parameters[i]);
    optimizer_->add_param_group(NamedParamGroup(std::move(named), std::move(options)));
  }

  void set_options(int64_t group, const Numbers& numbers, const Choices& choices) {
    optimizer_->param_groups().at(static_cast<size_t>(group)).set_options(rule_.options(numbers, choices));
  }

  void set_lr(int64_t group, double rate) {
    optimizer_->param_groups().at(static_cast<size_t>(group)).options().set_lr(rate);
  }

  void step() { optimizer_->step(); }

  // Of each parameter of the group, in its order; empty where it has no state. The tensors share the
  // optimizer's memory, but for "step", which is a copy in torch's form, fp32 without dimensions.
  std::vector<Tensors> state(int64_t group) const {
    std::vector<Tensors> all;
    for (const at::Tensor& parameter : optimizer_->param_groups().at(static_cast<size_t>(group)).params()) {
      all.emplace_back();
      const auto found = optimizer_->state().find(parameter.unsafeGetTensorImpl());
      if (found == optimizer_->state().end()) continue;
      const auto& fields = dynamic_cast<const FusedAdamStateFields&>(*found->second);
      all.back().insert("step", number_tensor(static_cast<double>(fields.step())).to(at::kFloat));
      for (const detail::StateField& field : detail::kStateFields) {
        const at::Tensor& tensor = (fields.*field.read)();
        if (tensor.defined()) all.back().insert(field.name, tensor);
      }
    }
    return all;
  }

  // Before the first step. The next step checks it, and brings it into the optimizer's own memory.
  void set_state(int64_t group, int64_t index, const Tensors& tensors) {
    const auto& parameters = optimizer_->param_groups().at(static_cast<size_t>(group)).params();
    auto state = rule_.state();
    auto& fields = dynamic_cast<FusedAdamStateFields&>(*state);
    fields.step(static_cast<int64_t>(tensors.at("step").item<double>()));
    for (const detail::StateField& field : detail::kStateFields) {
      if (tensors.contains(field.name)) (fields.*field.get)() = tensors.at(field.name);
    }
    const at::Tensor& parameter = parameters.at(static_cast<size_t>(index));
    optimizer_->state()[parameter.unsafeGetTensorImpl()] = std::move(state);
  }

  int64_t skipped_steps() const { return optimizer_->skipped_steps(); }

 private:
  Rule rule_;
  std::unique_ptr<FusedOptimizer> optimizer_;
};

// By name, the options of an optimizer and their meanings, as docs/options.md has them.
Choices describe(const std::string& name) {
  Choices meanings;
  const auto add = [&](const auto& options) {
    const auto take = [&](const detail::OptionField& field, const auto&) {
      meanings.insert(field.name, field.help);
    };
    detail::visit_options(take, options);
  };
  if (name == "FusedAdam") add(FusedAdamOptions());
  if (name == "FusedAdamW") add(FusedAdamWOptions());
  if (name == "FusedLamb") add(FusedLambOptions());
  return meanings;
}

}  // namespace

TORCH_LIBRARY(pacer, library) {
  library.def("describe(str optimizer) -> Dict(str, str)", describe);
  library.class_<PythonOptimizer>("Optimizer")
      .def(torch::init<const std::string&, const Numbers&, const Choices&>())
      .def("add_group", &PythonOptimizer::add_group)
      .def("set_options", &PythonOptimizer::set_options)
      .def("set_lr", &PythonOptimizer::set_lr)
      .def("step", &PythonOptimizer::step)
      .def("state", &PythonOptimizer::state)
      .def("set_state", &PythonOptimizer::set_state)
      .def("skipped_steps", &PythonOptimizer::skipped_steps);
}

}  // namespace pacer
