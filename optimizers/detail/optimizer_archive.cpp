#include <pacer/optimizers/detail/optimizer_archive.h>

#include <algorithm>
#include <exception>
#include <numeric>
#include <type_traits>
#include <unordered_map>

#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros_like.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <pacer/core/error.h>
#include <pacer/optimizers/detail/moment_codes.h>
#include <pacer/optimizers/detail/option_fields.h>
#include <pacer/optimizers/detail/parameter_check.h>
#include <pacer/optimizers/detail/parameter_entry.h>

namespace pacer::detail {
namespace {

using torch::optim::OptimizerOptions;
using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

constexpr const char* kNothing = "; nothing was loaded";

at::Tensor count_tensor(size_t count) { return at::scalar_tensor(static_cast<int64_t>(count), at::kLong); }

std::string label_of(const void* tensor) { return std::to_string(reinterpret_cast<size_t>(tensor)); }
void* tensor_of(const std::string& label) {
  // NOLINTNEXTLINE(performance-no-int-to-ptr): the label is the address the parameter had when it was saved
  return reinterpret_cast<void*>(std::stoull(label));  // throws where it is not an address
}

// As they were saved: labels, names and options of one group.
struct SavedGroup {
  std::vector<std::string> labels, names;  // names: empty texts, or none at all, where parameters had none
  std::unique_ptr<OptimizerOptions> options;
};

int64_t read_count(InputArchive& archive, const std::string& key) {
  at::Tensor count;
  archive.read(key, count);
  return count.item<int64_t>();
}

std::vector<SavedGroup> read_groups(InputArchive& archive, const OptimizerView& own) {
  std::vector<SavedGroup> saved;
  const int64_t count = read_count(archive, "param_groups/size");
  for (int64_t g = 0; g < count; ++g) {
    InputArchive group, options;
    archive.read(concatenate("param_groups/", g), group);
    const int64_t parameters = read_count(group, "params/size");
    SavedGroup& of_group = saved.emplace_back();
    for (int64_t i = 0; i < parameters; ++i) {
      c10::IValue label;
      group.read(concatenate("params/", i), label);
      of_group.labels.push_back(label.toStringRef());
      tensor_of(of_group.labels.back());
    }
    group.read("options", options);
    c10::IValue version, name;
    const bool has_names = options.try_read("state_version", version) && version.toInt() >= kNamesSince;
    for (int64_t i = 0; has_names && i < parameters; ++i) {
      group.read(concatenate("names/", i), name);
      of_group.names.push_back(name.toStringRef());
    }
    const auto place = static_cast<size_t>(g);
    of_group.options = place < own.groups.size() ? own.options(place) : own.defaults.clone();
    of_group.options->serialize(options);
  }
  return saved;
}

ParamStates read_states(InputArchive& archive, const OptimizerTraits& traits) {
  ParamStates states;
  for (const std::string& label : archive.keys()) {
    InputArchive of_parameter;
    archive.read(label, of_parameter);
    auto state = traits.make_state();
    state->serialize(of_parameter);
    states[tensor_of(label)] = std::move(state);
  }
  return states;
}

// A state of torch's as this optimizer's own, with its tensors or copies of them.
template <class TorchState>
std::unique_ptr<torch::optim::OptimizerParamState> own_state_of(const OptimizerTraits& traits,
                                                                const TorchState& torch, bool copies) {
  const auto take = [&](const at::Tensor& tensor) {
    return tensor.defined() && copies ? tensor.clone() : tensor;
  };
  auto state = traits.make_state();
  auto& fields = static_cast<FusedAdamStateFields&>(*state);
  if constexpr (std::is_same_v<TorchState, torch::optim::SGDParamState>) {
    fields.step(torch.momentum_buffer().defined() ? 1 : 0);  // it counts none; the first one makes the buffer
    fields.exp_avg(take(torch.momentum_buffer()));
  } else if constexpr (std::is_same_v<TorchState, torch::optim::RMSpropParamState>) {
    fields.step(torch.step());
    fields.exp_avg(take(torch.square_avg())).exp_avg_sq(take(torch.momentum_buffer()));
    fields.max_exp_avg_sq(take(torch.grad_avg()));
  } else {
    fields.step(torch.step());
    fields.exp_avg(take(torch.exp_avg())).exp_avg_sq(take(torch.exp_avg_sq()));
    fields.max_exp_avg_sq(take(torch.max_exp_avg_sq()));
  }
  return state;
}

// For each parameter of group `g` its place in the archive.
std::vector<size_t> places_of(const SavedGroup& saved, size_t g, const OptimizerView& own) {
  const auto& parameters = own.groups[g].params();
  std::vector<size_t> places(parameters.size());
  std::iota(places.begin(), places.end(), size_t{0});
  const auto is_empty = [](const std::string& name) { return name.empty(); };
  if (std::any_of(saved.names.begin(), saved.names.end(), is_empty) || saved.names.empty()) return places;
  std::unordered_map<std::string, size_t> place_of;
  for (size_t i = 0; i < saved.names.size(); ++i) place_of.emplace(saved.names[i], i);
  std::vector<size_t> by_name;
  for (const at::Tensor& parameter : parameters) {
    const std::string* name = given_name(own.names, parameter);
    if (name == nullptr) return places;
    const auto found = place_of.find(*name);
    require(found != place_of.end(), own.traits.name, ": group ", g, " of the archive has no parameter \"",
            *name, "\" (the first that it has is \"", saved.names.front(),
            "\"); give parameters the names that were saved, or load into an optimizer without names, where "
            "their order decides",
            kNothing);
    by_name.push_back(found->second);
    place_of.erase(found);
  }
  return by_name;
}

// Before version 1.5 torch's optimizers wrote lists of buffers.
void refuse_oldest(InputArchive& archive, const OptimizerTraits& traits) {
  c10::IValue value;
  at::Tensor size;
  InputArchive state;
  if (archive.try_read("pytorch_version", value) || archive.try_read("state", state)) return;
  require(!archive.try_read("step_buffers/size", size), traits.name,
          ": this archive was written by an optimizer of PyTorch before 1.5, whose layout was another; load "
          "it into "
          "torch's optimizer over the same parameters, and give that to take_over",
          kNothing);
}

}  // namespace

std::unique_ptr<torch::optim::OptimizerParamState> adopted_state(
    const OptimizerTraits& traits, const torch::optim::OptimizerParamState& state) {
  const auto* adam = dynamic_cast<const torch::optim::AdamParamState*>(&state);
  const auto* adamw = dynamic_cast<const torch::optim::AdamWParamState*>(&state);
  require(
      (adam == nullptr && adamw == nullptr) || !traits.averages, traits.name,
      ": a state of torch's Adam or AdamW was put among its states, whose exp_avg is a momentum and no z; "
      "remove it, so that the parameter begins anew");
  if (adam != nullptr) return own_state_of(traits, *adam, /*copies=*/false);
  if (adamw != nullptr) {
    return own_state_of(traits, *adamw, /*copies=*/false);
  }
  if (const auto* sgd = dynamic_cast<const torch::optim::SGDParamState*>(&state)) {
    return own_state_of(traits, *sgd, /*copies=*/false);
  }
  if (const auto* rmsprop = dynamic_cast<const torch::optim::RMSpropParamState*>(&state)) {
    return own_state_of(traits, *rmsprop, /*copies=*/false);
  }
  return nullptr;
}

std::vector<GroupSettings> check_pending(const PendingState& pending, const OptimizerView& own) {
  ParamGroups with_options;
  for (size_t g = 0; g < own.groups.size(); ++g) {
    with_options.emplace_back(own.groups[g].params(), pending.options[g]->clone());
  }
  std::vector<GroupSettings> settings = settings_of(own.traits, with_options);
  for (const RegisteredParameter& parameter : own.parameters()) {
    const auto found = pending.states.find(parameter.key());
    if (found == pending.states.end()) continue;
    const auto& state = static_cast<const FusedAdamStateFields&>(*found->second);
    const GroupSettings& of_group = settings[parameter.group];
    // One that starts at a gradient and is not there starts at the next.
    const bool needs_first = of_group.has_first_moment && !of_group.starts_at_gradient;
    require(state.exp_avg().defined() || !needs_first, "the state of parameter ", parameter.in_message(),
            " lacks a moment (", state.saved_name("exp_avg"), ")", kNothing);
    require(state.exp_avg_sq().defined() || !of_group.has_second_moment, "the state of parameter ",
            parameter.in_message(), " lacks a moment (", state.saved_name("exp_avg_sq"), ")", kNothing);
    const ParameterRange* range = own.range_of(parameter);
    check_state(state, parameter.tensor.sizes(), range ? std::optional(range->count) : std::nullopt,
                parameter.name);
  }
  return settings;
}

void commit_pending(PendingState& pending, ParamGroups& groups, ParamStates& states) noexcept {
  for (size_t g = 0; g < groups.size(); ++g) groups[g].set_options(std::move(pending.options[g]));
  states.swap(pending.states);
}

std::unique_ptr<torch::optim::OptimizerParamState> with_new_moments(const RegisteredParameter& parameter,
                                                                    const FusedAdamStateFields& state,
                                                                    const OptimizerView& own) {
  const at::Tensor& first = state.exp_avg();
  if (!first.defined() || are_codes(first)) return nullptr;
  const GroupSettings settings = own.traits.settings(*own.options(parameter.group));
  const kernels::AdamStorage storage =
      storage_for(parameter.tensor.scalar_type(), settings.master_weights, settings.rounding, parameter.name);
  std::unique_ptr<torch::optim::OptimizerParamState> completed;
  for (const StateField& field : kStateFields) {
    if (field.kind != StateKind::second_moment && field.kind != StateKind::max_moment) continue;
    const auto dtype = field_dtype(field.kind, storage, settings);
    if (!dtype || (state.*field.read)().defined()) continue;
    if (!completed) completed = state.clone();
    auto& fields = static_cast<FusedAdamStateFields&>(*completed);
    (fields.*field.get)() = at::zeros_like(first, first.options().dtype(*dtype));
  }
  return completed;
}

void write_optimizer(OutputArchive& archive, const OptimizerView& own) {
  archive.write("pytorch_version",
                c10::IValue("1.5.0"));  // the layout's own number, which torch's loads ask for
  OutputArchive all_states(archive.compilation_unit()), all_groups(archive.compilation_unit());
  std::unordered_map<const void*, RegisteredParameter> parameters;
  for (RegisteredParameter& parameter : own.parameters()) {
    const void* const key = parameter.key();
    parameters.emplace(key, std::move(parameter));
  }
  for (const auto& [tensor, state] : own.states) {
    OutputArchive of_parameter(archive.compilation_unit());
    const auto parameter = parameters.find(tensor);
    const auto* fields = dynamic_cast<const FusedAdamStateFields*>(state.get());
    const auto completed = fields != nullptr && parameter != parameters.end()
                               ? with_new_moments(parameter->second, *fields, own)
                               : nullptr;
    (completed ? *completed : *state).serialize(of_parameter);
    all_states.write(label_of(tensor), of_parameter);
  }
  archive.write("state", all_states);
  all_groups.write("param_groups/size", count_tensor(own.groups.size()));
  for (size_t g = 0; g < own.groups.size(); ++g) {
    OutputArchive group(archive.compilation_unit()), options(archive.compilation_unit());
    const auto& parameters = own.groups[g].params();
    group.write("params/size", count_tensor(parameters.size()));
    for (size_t i = 0; i < parameters.size(); ++i) {
      group.write(concatenate("params/", i), c10::IValue(label_of(parameters[i].unsafeGetTensorImpl())));
      const std::string* name = given_name(own.names, parameters[i]);
      group.write(concatenate("names/", i), c10::IValue(name ? *name : std::string()));
    }
    own.options(g)->serialize(options);
    group.write("options", options);
    all_groups.write(concatenate("param_groups/", g), group);
  }
  archive.write("param_groups", all_groups);
}

PendingState read_optimizer(InputArchive& archive, const OptimizerView& own) {
  const OptimizerTraits& traits = own.traits;
  const ParamGroups& groups = own.groups;
  PendingState pending;
  ParamStates labelled;
  std::vector<SavedGroup> saved_groups;
  refuse_oldest(archive, traits);
  try {
    InputArchive state_archive, groups_archive;
    archive.read("state", state_archive);
    archive.read("param_groups", groups_archive);
    saved_groups = read_groups(groups_archive, own);  // first, because options say which optimizer it was
    labelled = read_states(state_archive, traits);
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    throw InvalidArgument(concatenate(traits.name,
                                      ": this archive does not hold the state of such an optimizer (",
                                      first_line(error.what()), ")", kNothing));
  }
  require(saved_groups.size() == groups.size(), traits.name, ": the archive has ", saved_groups.size(),
          " parameter groups but the optimizer has ", groups.size(), kNothing);
  for (size_t g = 0; g < groups.size(); ++g) {
    const auto& labels = saved_groups[g].labels;
    const auto& parameters = groups[g].params();
    require(labels.size() == parameters.size(), traits.name, ": group ", g, " has ", labels.size(),
            " parameters in the archive but ", parameters.size(), " in the optimizer", kNothing);
    const std::vector<size_t> places = places_of(saved_groups[g], g, own);
    pending.options.push_back(std::move(saved_groups[g].options));
    for (size_t i = 0; i < labels.size(); ++i) {
      const auto found = labelled.find(tensor_of(labels[places[i]]));
      if (found == labelled.end()) continue;
      require(found->second != nullptr, traits.name, ": the archive names the state of parameter ", i,
              " of group ", g, " twice", kNothing);
      pending.states[parameters[i].unsafeGetTensorImpl()] = std::move(found->second);
    }
  }
  return pending;
}

template <class TorchState>
PendingState copy_of_torch_optimizer(const torch::optim::Optimizer& source, const OptimizerView& own) {
  const OptimizerTraits& traits = own.traits;
  const ParamGroups &groups = own.groups, &source_groups = source.param_groups();
  require(source_groups.size() == groups.size(), traits.name, ": the optimizer to take over from has ",
          source_groups.size(), " parameter groups but this one has ", groups.size());
  PendingState pending;
  for (size_t g = 0; g < groups.size(); ++g) {
    const auto& theirs = source_groups[g].params();
    const auto& ours = groups[g].params();
    require(theirs.size() == ours.size(), traits.name, ": group ", g, " has ", theirs.size(),
            " parameters in the optimizer to take over from but ", ours.size(), " here");
    pending.options.push_back(traits.adopt(source_groups[g].options(), *own.options(g)));
    require(pending.options.back() != nullptr, traits.name,
            ": the options to take over belong to another optimizer");
    for (size_t i = 0; i < ours.size(); ++i) {
      require(theirs[i].is_same(ours[i]), traits.name, ": parameter ",
              InMessage{name_of(own.names, ours[i], g, i), ours[i].sizes()},
              " is another tensor in the optimizer to take over from; build both from the same parameters");
      const auto found = source.state().find(theirs[i].unsafeGetTensorImpl());
      if (found == source.state().end()) continue;
      pending.states[ours[i].unsafeGetTensorImpl()] =
          own_state_of(traits, static_cast<const TorchState&>(*found->second), /*copies=*/true);
    }
  }
  return pending;
}

template PendingState copy_of_torch_optimizer<torch::optim::AdamParamState>(const torch::optim::Optimizer&,
                                                                            const OptimizerView&);
template PendingState copy_of_torch_optimizer<torch::optim::AdamWParamState>(const torch::optim::Optimizer&,
                                                                             const OptimizerView&);
template PendingState copy_of_torch_optimizer<torch::optim::RMSpropParamState>(const torch::optim::Optimizer&,
                                                                               const OptimizerView&);
template PendingState copy_of_torch_optimizer<torch::optim::SGDParamState>(const torch::optim::Optimizer&,
                                                                           const OptimizerView&);

}  // namespace pacer::detail
