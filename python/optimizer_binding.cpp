#include "optimizer_binding.h"

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Dict.h>
#include <torch/custom_class.h>

#include <pacer/core/error.h>
#include <pacer/optimizers/detail/option_visitors.h>
#include <pacer/optimizers/detail/state_fields.h>
#include <pacer/optimizers/fused_adam.h>
#include <pacer/optimizers/fused_lamb.h>
#include <pacer/optimizers/fused_rmsprop.h>
#include <pacer/optimizers/fused_sgd.h>
#include <pacer/optimizers/muon.h>
#include <pacer/optimizers/onebit_adam.h>
#include <pacer/optimizers/onebit_lamb.h>
#include <pacer/optimizers/onebit_muon.h>
#include <pacer/optimizers/schedule_free.h>

#include "communicator_binding.h"
#include "named_dict.h"

namespace pacer::python {
namespace {

using torch::optim::OptimizerOptions;
using torch::optim::OptimizerParamGroup;
using torch::optim::OptimizerParamState;
using Numbers = c10::Dict<std::string, double>;
using Choices = c10::Dict<std::string, std::string>;

std::vector<std::pair<at::Tensor, at::Tensor>> pairs_of(const std::vector<at::Tensor>& first,
                                                        const std::vector<at::Tensor>& second) {
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs;
  for (size_t i = 0; i < first.size(); ++i) pairs.emplace_back(first[i], second.at(i));
  return pairs;
}

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
Options make_options(const Numbers& numbers, const Choices& choices) {
  Options options;
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
  detail::visit_options(take, options);
  return options;
}

// The way back. An optional that is unset is left out.
template <class Options>
void read_options(const Options& options, Numbers& numbers, Choices& choices) {
  const auto read = [&](const detail::OptionField& field, const auto& value) {
    using Value = std::decay_t<decltype(value)>;
    if constexpr (std::is_same_v<Value, detail::Betas>) {
      numbers.insert("beta1", std::get<0>(value));
      numbers.insert("beta2", std::get<1>(value));
    } else if constexpr (std::is_enum_v<Value>) {
      choices.insert(field.name, detail::choices(value).at(static_cast<size_t>(value)));
    } else if constexpr (detail::kIsOptional<Value>) {
      if (value) numbers.insert(field.name, static_cast<double>(*value));
    } else {
      numbers.insert(field.name, static_cast<double>(value));
    }
  };
  detail::visit_options(read, options);
}

// Which optimizer it is: what depends on its types.
struct Rule {
  virtual ~Rule() = default;
  virtual std::unique_ptr<OptimizerOptions> options(const Numbers& numbers, const Choices& choices) const = 0;
  virtual void read(const OptimizerOptions& options, Numbers& numbers, Choices& choices) const = 0;
  virtual std::unique_ptr<OptimizerParamState> state() const = 0;
  // Makes the optimizer where there is none yet: when a 1-bit optimizer freezes, its first group says.
  virtual void add(std::unique_ptr<FusedOptimizer>& optimizer, const OptimizerParamGroup& group) const = 0;
  virtual void add(std::unique_ptr<FusedOptimizer>& optimizer, const NamedParamGroup& group) const = 0;
};

template <class Optimizer, class Options, class State>
class RuleOf : public Rule {
 public:
  RuleOf(const Numbers& numbers, const Choices& choices, std::shared_ptr<Communicator> world)
      : defaults_(make_options<Options>(numbers, choices)), world_(std::move(world)) {}

  std::unique_ptr<OptimizerOptions> options(const Numbers& numbers, const Choices& choices) const override {
    return std::make_unique<Options>(make_options<Options>(numbers, choices));
  }
  void read(const OptimizerOptions& options, Numbers& numbers, Choices& choices) const override {
    read_options(static_cast<const Options&>(options), numbers, choices);
  }
  std::unique_ptr<OptimizerParamState> state() const override { return std::make_unique<State>(); }
  void add(std::unique_ptr<FusedOptimizer>& optimizer, const OptimizerParamGroup& group) const override {
    add_group(optimizer, group);
  }
  void add(std::unique_ptr<FusedOptimizer>& optimizer, const NamedParamGroup& group) const override {
    add_group(optimizer, group);
  }

 private:
  template <class Group>
  void add_group(std::unique_ptr<FusedOptimizer>& optimizer, const Group& group) const {
    if (optimizer != nullptr) return static_cast<Optimizer&>(*optimizer).add_param_group(group);
    const std::vector<Group> groups = {group};
    using Ranks = std::shared_ptr<Communicator>;
    if constexpr (std::is_constructible_v<Optimizer, const std::vector<Group>&, const Options&,
                                          const Ranks&>) {
      optimizer = std::make_unique<Optimizer>(groups, defaults_, world_);
    } else {
      optimizer = std::make_unique<Optimizer>(groups, defaults_);
    }
  }

  Options defaults_;
  std::shared_ptr<Communicator> world_;
};

std::unique_ptr<Rule> rule_named(const std::string& name, const Numbers& numbers, const Choices& choices,
                                 const std::shared_ptr<Communicator>& world) {
  const auto make = [&](auto rule) { return std::make_unique<decltype(rule)>(std::move(rule)); };
  if (name == "FusedAdam") {
    return make(RuleOf<FusedAdam, FusedAdamOptions, FusedAdamParamState>(numbers, choices, world));
  }
  if (name == "FusedAdamW") {
    return make(RuleOf<FusedAdamW, FusedAdamWOptions, FusedAdamWParamState>(numbers, choices, world));
  }
  if (name == "FusedLamb") {
    return make(RuleOf<FusedLamb, FusedLambOptions, FusedLambParamState>(numbers, choices, world));
  }
  if (name == "FusedSgd") {
    return make(RuleOf<FusedSgd, FusedSgdOptions, FusedSgdParamState>(numbers, choices, world));
  }
  if (name == "FusedRmsprop") {
    return make(RuleOf<FusedRmsprop, FusedRmspropOptions, FusedRmspropParamState>(numbers, choices, world));
  }
  if (name == "Muon") {
    return make(RuleOf<Muon, MuonOptions, MuonParamState>(numbers, choices, world));
  }
  if (name == "ScheduleFreeAdamW") {
    return make(RuleOf<ScheduleFreeAdamW, ScheduleFreeAdamWOptions, ScheduleFreeAdamWParamState>(
        numbers, choices, world));
  }
  if (name == "OneBitMuon") {
    return make(RuleOf<OneBitMuon, OneBitMuonOptions, OneBitMuonParamState>(numbers, choices, world));
  }
  if (name == "OneBitAdam") {
    return make(RuleOf<OneBitAdam, OneBitAdamOptions, OneBitAdamParamState>(numbers, choices, world));
  }
  if (name == "OneBitLamb") {
    return make(RuleOf<OneBitLamb, OneBitLambOptions, OneBitLambParamState>(numbers, choices, world));
  }
  throw InvalidArgument(detail::concatenate("there is no optimizer \"", name, "\""));
}

class PythonOptimizer : public torch::CustomClassHolder {
 public:
  // Without a communicator a single rank trains.
  PythonOptimizer(const std::string& name, const Numbers& numbers, const Choices& choices,
                  const std::optional<c10::intrusive_ptr<PythonCommunicator>>& communicator)
      : rule_(rule_named(name, numbers, choices, communicator ? (*communicator)->world() : nullptr)) {}

  // `names` has one name for each parameter, or none at all.
  void add_group(const std::vector<at::Tensor>& parameters, const std::vector<std::string>& names,
                 const Numbers& numbers, const Choices& choices) {
    auto options = rule_->options(numbers, choices);
    if (names.empty()) {
      rule_->add(optimizer_, OptimizerParamGroup(parameters, std::move(options)));
    } else {
      NamedParameters named;
      for (size_t i = 0; i < names.size(); ++i) named.insert(names[i], parameters[i]);
      rule_->add(optimizer_, NamedParamGroup(std::move(named), std::move(options)));
    }
    // Python has filled in the defaults; C++ might take what equals one of its own for something left out.
    optimizer_->param_groups().back().set_options(rule_->options(numbers, choices));
  }

  void set_options(int64_t index, const Numbers& numbers, const Choices& choices) {
    group(index).set_options(rule_->options(numbers, choices));
  }

  // What the package gives to set_options.
  std::tuple<Numbers, Choices> options(int64_t index) const {
    Numbers numbers;
    Choices choices;
    rule_->read(group(index).options(), numbers, choices);
    return {numbers, choices};
  }

  void set_lr(int64_t index, double rate) { group(index).options().set_lr(rate); }

  void step() { optimizer_->step(); }

  // Of each parameter of the group, in its order; empty where it has no state. The tensors share the
  // optimizer's memory, but for "step", which is a copy in torch's form, fp32 without dimensions.
  std::vector<Tensors> state(int64_t index) const {
    std::vector<Tensors> all;
    for (const at::Tensor& parameter : group(index).params()) {
      all.emplace_back();
      const auto found = optimizer_->state().find(parameter.unsafeGetTensorImpl());
      if (found == optimizer_->state().end()) continue;
      const auto& fields = dynamic_cast<const FusedAdamStateFields&>(*found->second);
      all.back().insert("step", number_tensor(static_cast<double>(fields.step())).to(at::kFloat));
      for (const detail::StateField& field : detail::kStateFields) {
        const at::Tensor& tensor = (fields.*field.read)();
        if (tensor.defined()) all.back().insert(fields.saved_name(field.name), tensor);
      }
      if (!fields.averages()) continue;
      for (const detail::AverageNumber& number : detail::kAverageNumbers) {
        all.back().insert(number.name, number_tensor(fields.average().*number.value));
      }
    }
    return all;
  }

  // Before the first step. The next step checks it, and brings it into the optimizer's own memory.
  void set_state(int64_t index, int64_t position, const Tensors& tensors) {
    auto state = rule_->state();
    auto& fields = dynamic_cast<FusedAdamStateFields&>(*state);
    fields.step(static_cast<int64_t>(tensors.at("step").item<double>()));
    for (const detail::StateField& field : detail::kStateFields) {
      const std::string name = fields.saved_name(field.name);
      if (tensors.contains(name)) (fields.*field.get)() = tensors.at(name);
    }
    if (fields.averages()) {
      kernels::AverageWeights average;
      for (const detail::AverageNumber& number : detail::kAverageNumbers) {
        average.*number.value = tensors.at(number.name).item<double>();
      }
      fields.average(average);
    }
    const at::Tensor& parameter = group(index).params().at(static_cast<size_t>(position));
    optimizer_->state()[parameter.unsafeGetTensorImpl()] = std::move(state);
  }

  // All state and options by name, as checkpoints of C++ hold them, and what this rank has of its own.
  Tensors export_state() const { return to_dict(optimizer_->export_state()); }
  Tensors export_rank_state() const { return to_dict(optimizer_->export_rank_state()); }
  void import_states(const Tensors& state, const Tensors& rank_state) {
    optimizer_->import_states(from_dict(state), from_dict(rank_state));
  }
  // What SessionOptimizer has by these names; prepare_import may take tensors of the state for its own, and
  // commit_import puts in force what it made ready.
  bool fits_rank_state(const Tensors& state, const Tensors& own) const {
    return optimizer_->fits_rank_state(from_dict(state), from_dict(own));
  }
  Tensors join_rank_states(const Tensors& state, const std::vector<Tensors>& of_ranks) const {
    std::vector<NamedTensors> states;
    for (const Tensors& of_rank : of_ranks) states.push_back(from_dict(of_rank));
    return to_dict(optimizer_->join_rank_states(from_dict(state), states));
  }
  void prepare_import(const Tensors& state, const Tensors& own) {
    put_in_force_ =
        static_cast<SessionOptimizer&>(*optimizer_).prepare_import(from_dict(state), from_dict(own));
  }
  void commit_import() { std::exchange(put_in_force_, nullptr)(); }
  // Names the parameters that have none.
  void name_parameters(const std::vector<std::string>& names, const std::vector<at::Tensor>& parameters) {
    NamedParameters named;
    for (size_t i = 0; i < names.size(); ++i) named.insert(names[i], parameters.at(i));
    optimizer_->name_parameters(named);
  }
  std::vector<std::string> names(int64_t index) const {
    std::vector<std::string> all;
    for (const at::Tensor& p : group(index).params()) all.push_back(optimizer_->parameter_name(p));
    return all;
  }

  int64_t skipped_steps() const { return optimizer_->skipped_steps(); }
  // Without a group: the gradients of all groups together.
  void clip_gradient_norm(double max_norm, double norm_type, const std::optional<int64_t>& index) {
    if (!index) return optimizer_->clip_gradient_norm(max_norm, norm_type);
    require(*index >= 0, "clip_gradient_norm was given group ", *index, "; groups are numbered from 0");
    optimizer_->clip_group_gradient_norm(static_cast<size_t>(*index), max_norm, norm_type);
  }
  double gradient_norm() const { return optimizer_->gradient_norm(); }
  // Each of `after` takes the place of that of `before` with its number.
  void replace(const std::vector<at::Tensor>& before, const std::vector<at::Tensor>& after,
               const at::Tensor& rows) {
    optimizer_->replace(pairs_of(before, after), rows);
  }
  // Puts the rows of `more` behind those of the parameter with their number; returns what takes the parameters' places.
  std::vector<at::Tensor> append_rows(const std::vector<at::Tensor>& before,
                                      const std::vector<at::Tensor>& more) {
    return optimizer_->append_rows(pairs_of(before, more));
  }
  void set_visible_rows(const std::vector<at::Tensor>& parameters, const std::optional<at::Tensor>& visible) {
    optimizer_->set_visible_rows(parameters, visible.value_or(at::Tensor()));
  }
  // Of Muon only. Without a communicator each rank makes all products.
  void share_products(const std::optional<c10::intrusive_ptr<PythonCommunicator>>& communicator) {
    dynamic_cast<Muon&>(*optimizer_).share_products(communicator ? (*communicator)->world() : nullptr);
  }

  // Of ScheduleFreeAdamW only. False: the parameters hold the average.
  void set_training(bool is_training) {
    auto& optimizer = dynamic_cast<ScheduleFreeAdamW&>(*optimizer_);
    is_training ? optimizer.train() : optimizer.eval();
  }
  bool is_training() const { return dynamic_cast<const ScheduleFreeAdamW&>(*optimizer_).is_training(); }

  // 1-bit optimizers have these; OneBitMuon only the first.
  int64_t bytes_sent() const {
    const auto* muon = dynamic_cast<const OneBitMuon*>(optimizer_.get());
    return muon != nullptr ? muon->bytes_sent() : onebit().bytes_sent();
  }
  int64_t attempts() const { return onebit().attempts(); }
  int64_t frozen_at() const { return onebit().frozen_at().value_or(-1); }
  double compression_error() const { return onebit().compression_error(); }

 private:
  OptimizerParamGroup& group(int64_t index) const {
    return optimizer_->param_groups().at(static_cast<size_t>(index));
  }
  const OneBitOptimizer& onebit() const { return dynamic_cast<const OneBitOptimizer&>(*optimizer_); }

  std::unique_ptr<Rule> rule_;
  std::unique_ptr<FusedOptimizer> optimizer_;  // from the first group on
  SessionOptimizer::PreparedImport put_in_force_;
};

}  // namespace

void register_optimizer(torch::Library& library) {
  library.class_<PythonOptimizer>("Optimizer")
      .def(torch::init<const std::string&, const Numbers&, const Choices&,
                       const std::optional<c10::intrusive_ptr<PythonCommunicator>>&>())
      .def("add_group", &PythonOptimizer::add_group)
      .def("set_options", &PythonOptimizer::set_options)
      .def("set_lr", &PythonOptimizer::set_lr)
      .def("step", &PythonOptimizer::step)
      .def("state", &PythonOptimizer::state)
      .def("set_state", &PythonOptimizer::set_state)
      .def("export_state", &PythonOptimizer::export_state)
      .def("export_rank_state", &PythonOptimizer::export_rank_state)
      .def("import_states", &PythonOptimizer::import_states)
      .def("fits_rank_state", &PythonOptimizer::fits_rank_state)
      .def("join_rank_states", &PythonOptimizer::join_rank_states)
      .def("prepare_import", &PythonOptimizer::prepare_import)
      .def("commit_import", &PythonOptimizer::commit_import)
      .def("name_parameters", &PythonOptimizer::name_parameters)
      .def("options", &PythonOptimizer::options)
      .def("names", &PythonOptimizer::names)
      .def("skipped_steps", &PythonOptimizer::skipped_steps)
      .def("clip_gradient_norm", &PythonOptimizer::clip_gradient_norm)
      .def("gradient_norm", &PythonOptimizer::gradient_norm)
      .def("replace", &PythonOptimizer::replace)
      .def("append_rows", &PythonOptimizer::append_rows)
      .def("set_visible_rows", &PythonOptimizer::set_visible_rows)
      .def("share_products", &PythonOptimizer::share_products)
      .def("set_training", &PythonOptimizer::set_training)
      .def("is_training", &PythonOptimizer::is_training)
      .def("attempts", &PythonOptimizer::attempts)
      .def("frozen_at", &PythonOptimizer::frozen_at)
      .def("bytes_sent", &PythonOptimizer::bytes_sent)
      .def("compression_error", &PythonOptimizer::compression_error);
}

}  // namespace pacer::python
