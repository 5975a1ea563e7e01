#include <pacer/hooks/detail/torch_optimizer_state.h>

#include <memory>
#include <set>
#include <tuple>
#include <type_traits>
#include <unordered_map>

#include <torch/nn/module.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <pacer/core/error.h>
#include <pacer/optimizers/detail/saved_by.h>

namespace pacer::detail {
namespace {

using namespace torch::optim;

// The fields of every state and options type, shown to a visitor by name and reference.
template <class State, class Visitor>
void visit_moments(State& state, Visitor& visit) {
  visit("step", state.step());
  visit("exp_avg", state.exp_avg());
  visit("exp_avg_sq", state.exp_avg_sq());
  visit("max_exp_avg_sq", state.max_exp_avg_sq());
}
template <class Visitor>
void visit_fields(AdamParamState& state, Visitor& visit) {
  visit_moments(state, visit);
}
template <class Visitor>
void visit_fields(AdamWParamState& state, Visitor& visit) {
  visit_moments(state, visit);
}
template <class Visitor>
void visit_fields(SGDParamState& state, Visitor& visit) {
  visit("momentum_buffer", state.momentum_buffer());
}
template <class Visitor>
void visit_fields(RMSpropParamState& state, Visitor& visit) {
  visit("step", state.step());
  visit("square_avg", state.square_avg());
  visit("momentum_buffer", state.momentum_buffer());
  visit("grad_avg", state.grad_avg());
}
template <class Visitor>
void visit_fields(AdagradParamState& state, Visitor& visit) {
  visit("step", state.step());
  visit("sum", state.sum());
}

template <class Options, class Visitor>
void visit_adam_options(Options& options, Visitor& visit) {
  visit("lr", options.lr());
  visit("beta1", std::get<0>(options.betas()));
  visit("beta2", std::get<1>(options.betas()));
  visit("eps", options.eps());
  visit("weight_decay", options.weight_decay());
  visit("amsgrad", options.amsgrad());
}
template <class Visitor>
void visit_fields(AdamOptions& options, Visitor& visit) {
  visit_adam_options(options, visit);
}
template <class Visitor>
void visit_fields(AdamWOptions& options, Visitor& visit) {
  visit_adam_options(options, visit);
}
template <class Visitor>
void visit_fields(SGDOptions& options, Visitor& visit) {
  visit("lr", options.lr());
  visit("momentum", options.momentum());
  visit("dampening", options.dampening());
  visit("weight_decay", options.weight_decay());
  visit("nesterov", options.nesterov());
}
template <class Visitor>
void visit_fields(RMSpropOptions& options, Visitor& visit) {
  visit("lr", options.lr());
  visit("alpha", options.alpha());
  visit("eps", options.eps());
  visit("weight_decay", options.weight_decay());
  visit("momentum", options.momentum());
  visit("centered", options.centered());
}
template <class Visitor>
void visit_fields(AdagradOptions& options, Visitor& visit) {
  visit("lr", options.lr());
  visit("lr_decay", options.lr_decay());
  visit("weight_decay", options.weight_decay());
  visit("initial_accumulator_value", options.initial_accumulator_value());
  visit("eps", options.eps());
}

template <class Options>
constexpr const char* kNameOf = std::is_same_v<Options, AdamOptions>      ? "torch::optim::Adam"
                                : std::is_same_v<Options, AdamWOptions>   ? "torch::optim::AdamW"
                                : std::is_same_v<Options, SGDOptions>     ? "torch::optim::SGD"
                                : std::is_same_v<Options, RMSpropOptions> ? "torch::optim::RMSprop"
                                                                          : "torch::optim::Adagrad";

// What torch's step takes for granted and does not check.
template <class Options>
void check_moments(bool has_maximum, const Options& options, const std::string& name) {
  require(has_maximum == options.amsgrad(), "the state to load has ", has_maximum ? "a" : "no", " \"", name,
          "/max_exp_avg_sq\", which does not fit amsgrad of its group");
}
void check_fields(AdamParamState& state, const AdamOptions& options, const std::string& name) {
  check_moments(state.max_exp_avg_sq().defined(), options, name);
}
void check_fields(AdamWParamState& state, const AdamWOptions& options, const std::string& name) {
  check_moments(state.max_exp_avg_sq().defined(), options, name);
}
void check_fields(SGDParamState& state, const SGDOptions&, const std::string& name) {
  require(state.momentum_buffer().defined(), "the state to load has no \"", name, "/momentum_buffer\"");
}
void check_fields(RMSpropParamState& state, const RMSpropOptions& options, const std::string& name) {
  require(state.momentum_buffer().defined() == (options.momentum() > 0) &&
              state.grad_avg().defined() == options.centered(),
          "momentum_buffer and grad_avg of parameter ", name,
          " in the state to load do not fit momentum and centered of its group");
}
void check_fields(AdagradParamState& state, const AdagradOptions&, const std::string& name) {
  require(state.sum().defined(), "the state to load has no \"", name, "/sum\"");
}

struct Exporter {
  std::string prefix;
  NamedTensors& state;
  template <class Number>
  void operator()(const char* name, Number value) {
    state[prefix + name] = number_tensor(value);
  }
  // A tensor that does not exist is said to be so, else its loss would not show.
  void operator()(const char* name, const at::Tensor& tensor) {
    state[prefix + name + kExists] = number_tensor(tensor.defined());
    if (tensor.defined()) state[prefix + name] = tensor;
  }
};

struct Importer {
  std::string prefix;
  const NamedTensors& state;
  std::set<std::string>& used;
  const at::Tensor* parameter;  // null for options
  template <class Number>
  void operator()(const char* name, Number& value) {
    value = require_number<Number>(state, prefix + name);
    used.insert(prefix + name);
  }
  void operator()(const char* name, at::Tensor& tensor) {
    const std::string key = prefix + name;
    used.insert(key + kExists);
    if (!require_number<bool>(state, key + kExists)) return;
    const at::Tensor& saved = require_tensor(state, key);
    require(saved.sizes() == parameter->sizes() && at::isFloatingType(saved.scalar_type()), "\"", key,
            "\" of the state to load is ", saved.scalar_type(), " of shape ", saved.sizes(),
            ", but the parameter has shape ", parameter->sizes());
    tensor = saved.to(parameter->device());
    used.insert(key);
  }
};

// Calls f(parameter, name, group) for every parameter.
template <class F>
void for_each_parameter(const Optimizer& optimizer, const torch::nn::Module& model, const F& f) {
  std::unordered_map<const void*, std::string> names;
  for (const auto& item : model.named_parameters())
    names.emplace(item.value().unsafeGetTensorImpl(), item.key());
  for (size_t g = 0; g < optimizer.param_groups().size(); ++g) {
    const auto& parameters = optimizer.param_groups()[g].params();
    for (size_t i = 0; i < parameters.size(); ++i) {
      const auto found = names.find(parameters[i].unsafeGetTensorImpl());
      f(parameters[i], found != names.end() ? found->second : std::to_string(g) + "." + std::to_string(i), g);
    }
  }
}

template <class State, class Options>
NamedTensors export_as(const Optimizer& optimizer, const torch::nn::Module& model) {
  NamedTensors exported;
  write_saved_by(kNameOf<Options>, exported);
  for (size_t g = 0; g < optimizer.param_groups().size(); ++g) {
    Options options = static_cast<const Options&>(optimizer.param_groups()[g].options());
    Exporter exporter{"group/" + std::to_string(g) + "/", exported};
    visit_fields(options, exporter);
  }
  for_each_parameter(optimizer, model,
                     [&](const at::Tensor& parameter, const std::string& name, size_t group) {
                       const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
                       const bool has_state = found != optimizer.state().end();
                       exported[name + "/group"] = number_tensor(static_cast<int64_t>(group));
                       exported[name + "/has_state"] = number_tensor(has_state);
                       if (!has_state) return;
                       State state = static_cast<const State&>(*found->second);
                       Exporter exporter{name + "/", exported};
                       visit_fields(state, exporter);
                     });
  return exported;
}

// Options by group and states by parameter, checked and ready to be put in force.
struct PendingForeign {
  std::vector<std::unique_ptr<OptimizerOptions>> options;
  std::vector<std::pair<void*, std::unique_ptr<OptimizerParamState>>> states;
};

template <class State, class Options>
PendingForeign import_as(Optimizer& optimizer, const torch::nn::Module& model, const NamedTensors& saved) {
  if (const std::string by = saved_by(saved); !by.empty()) require_same_optimizer(by, kNameOf<Options>);
  std::set<std::string> used = {kVersion, kSavedBy};
  std::vector<std::unique_ptr<OptimizerOptions>> all_options;
  for (size_t g = 0; g < optimizer.param_groups().size(); ++g) {
    auto options =
        std::make_unique<Options>(static_cast<const Options&>(optimizer.param_groups()[g].options()));
    Importer importer{"group/" + std::to_string(g) + "/", saved, used, nullptr};
    visit_fields(*options, importer);
    all_options.push_back(std::move(options));
  }
  std::vector<std::pair<void*, std::unique_ptr<OptimizerParamState>>> states;
  for_each_parameter(
      optimizer, model, [&](const at::Tensor& parameter, const std::string& name, size_t group) {
        const auto saved_group = require_number<int64_t>(saved, name + "/group");
        require(saved_group == static_cast<int64_t>(group), "parameter ", name, " is in group ", group,
                " but in group ", saved_group, " of the state to load; build the same parameter groups");
        used.insert({name + "/group", name + "/has_state"});
        if (!require_number<bool>(saved, name + "/has_state")) return;
        auto state = std::make_unique<State>();
        Importer importer{name + "/", saved, used, &parameter};
        visit_fields(*state, importer);
        check_fields(*state, static_cast<const Options&>(*all_options[group]), name);
        states.emplace_back(parameter.unsafeGetTensorImpl(), std::move(state));
      });
  for (const auto& item : saved) {
    require(used.count(item.first) != 0, "the state to load has \"", item.first,
            "\", which fits no parameter of this optimizer; build the same parameters and options");
  }
  return {std::move(all_options), std::move(states)};
}

void put_in_force(Optimizer& optimizer, PendingForeign& pending) {
  for (size_t g = 0; g < pending.options.size(); ++g)
    optimizer.param_groups()[g].set_options(std::move(pending.options[g]));
  optimizer.state().clear();
  for (auto& [key, state] : pending.states) optimizer.state()[key] = std::move(state);
}

// Calls f(State, Options) for the types of the optimizer; false where it is none of them.
template <class F>
bool with_types(const Optimizer& optimizer, const F& f) {
  const auto is = [&](auto* type) { return dynamic_cast<decltype(type)>(&optimizer) != nullptr; };
  if (is(static_cast<const Adam*>(nullptr))) return f(AdamParamState(), AdamOptions()), true;
  if (is(static_cast<const AdamW*>(nullptr))) return f(AdamWParamState(), AdamWOptions()), true;
  if (is(static_cast<const SGD*>(nullptr))) return f(SGDParamState(), SGDOptions(0)), true;
  if (is(static_cast<const RMSprop*>(nullptr))) return f(RMSpropParamState(), RMSpropOptions()), true;
  if (is(static_cast<const Adagrad*>(nullptr))) return f(AdagradParamState(), AdagradOptions()), true;
  return false;
}

}  // namespace

bool can_export(const Optimizer& optimizer) {
  return with_types(optimizer, [](const auto&, const auto&) {});
}

bool visit_numbers(const OptimizerOptions& options, NumberVisitor& visit) {
  const auto show = [&visit](const char* name, auto value) {
    visit(name,
          static_cast<std::conditional_t<std::is_same_v<decltype(value), bool>, int64_t, double>>(value));
  };
  const auto shown = [&](const auto* own) {
    if (own == nullptr) return false;
    auto copy = *own;
    visit_fields(copy, show);
    return true;
  };
  return shown(dynamic_cast<const AdamWOptions*>(&options)) ||
         shown(dynamic_cast<const AdamOptions*>(&options)) ||
         shown(dynamic_cast<const SGDOptions*>(&options)) ||
         shown(dynamic_cast<const RMSpropOptions*>(&options)) ||
         shown(dynamic_cast<const AdagradOptions*>(&options));
}

NamedTensors export_torch_state(const Optimizer& optimizer, const torch::nn::Module& model) {
  NamedTensors exported;
  with_types(optimizer, [&](const auto& state, const auto& options) {
    exported = export_as<std::decay_t<decltype(state)>, std::decay_t<decltype(options)>>(optimizer, model);
  });
  return exported;
}

std::function<void()> prepare_torch_state(Optimizer& optimizer, const torch::nn::Module& model,
                                          const NamedTensors& saved) {
  const auto pending = std::make_shared<PendingForeign>();
  with_types(optimizer, [&](const auto& state, const auto& options) {
    *pending =
        import_as<std::decay_t<decltype(state)>, std::decay_t<decltype(options)>>(optimizer, model, saved);
  });
  return [&optimizer, pending] { put_in_force(optimizer, *pending); };
}

}  // namespace pacer::detail
