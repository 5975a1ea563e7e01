// State by parameter name.
#include <pacer/optimizers/detail/optimizer_archive.h>

#include <algorithm>
#include <iterator>
#include <set>

#include <ATen/ops/empty_strided.h>

#include <pacer/core/error.h>
#include <pacer/optimizers/detail/moment_codes.h>
#include <pacer/optimizers/detail/onebit_errors.h>
#include <pacer/optimizers/detail/option_fields.h>
#include <pacer/optimizers/detail/parameter_check.h>
#include <pacer/optimizers/detail/remainder_values.h>
#include <pacer/optimizers/detail/saved_by.h>
#include <pacer/optimizers/detail/state_fields.h>

namespace pacer::detail {
namespace {

std::string options_prefix(size_t group) { return "group/" + std::to_string(group) + "/"; }

// Takes a moment that was saved in 8 bits, which the next step converts where it has to be in 32, and marks its keys as
// used.
void import_codes(const RegisteredParameter& registered, const ParameterRange* range, at::Device device,
                  const StateField& field, const NamedTensors& saved, FusedAdamStateFields& state,
                  std::set<std::string>& used) {
  const std::string& name = registered.name;
  const at::Tensor& parameter = registered.tensor;
  const StateField& of_scales = scale_field(field.kind);
  const std::string key = name + "/" + field.name, scale_key = name + "/" + of_scales.name;
  const at::Tensor &codes = require_tensor(saved, key), &scales = require_tensor(saved, scale_key);
  const std::vector<int64_t> sizes = field_sizes(of_scales.kind, parameter.sizes());
  require(codes.sizes() == parameter.sizes() && codes.scalar_type() == codes_dtype(field.kind), "\"", key,
          "\" of the state to load is ", codes.scalar_type(), " of shape ", codes.sizes(), ", but parameter ",
          InMessage{name}, " needs ", codes_dtype(field.kind), " of shape ", parameter.sizes());
  require(scales.scalar_type() == at::kHalf && scales.sizes() == sizes, "\"", scale_key,
          "\" of the state to load is ", scales.scalar_type(), " of shape ", scales.sizes(),
          ", but parameter ", InMessage{name}, " needs ", at::kHalf, " of shape ", at::IntArrayRef(sizes));
  const std::vector<int64_t> strides = dense_strides(parameter);
  require(same_strides(saved_strides(saved, name, parameter.sizes(), strides, kStateVersion), strides,
                       parameter.sizes()),
          "the state to load has the codes of parameter ", registered.in_message(),
          " in another memory order than the parameter has here; give it the order that it had");
  const at::Tensor own = at::empty_strided(parameter.sizes(), strides, codes.options());
  (state.*field.get)() = own.copy_(codes);
  (state.*of_scales.get)() = scales;
  if (range != nullptr) cut_codes(state, field, *range);
  for (const StateField* part : {&field, &of_scales}) {
    at::Tensor& tensor = (state.*part->get)();
    if (tensor.defined())
      tensor = tensor.to(device, tensor.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
  }
  used.insert({key, scale_key, name + kStrides});
}

// Reads all fields of one parameter and marks their keys as used.
void import_tensors(const RegisteredParameter& registered, const ParameterRange* range, bool state_on_host,
                    const GroupSettings& settings, const NamedTensors& saved, FusedAdamStateFields& state,
                    std::set<std::string>& used) {
  const std::string& name = registered.name;
  const at::Tensor& parameter = registered.tensor;
  const kernels::AdamStorage storage =
      storage_for(parameter.scalar_type(), settings.master_weights, settings.rounding, name);
  const at::Device device = state_on_host ? at::Device(at::kCPU) : parameter.device();
  GroupSettings in_32_bits = settings;
  in_32_bits.state_bits = 32;
  for (const StateField& field : kStateFields) {
    const auto dtype = field_dtype(field.kind, storage, in_32_bits);
    if (!dtype) continue;
    const std::string key = name + "/" + state.saved_name(field.name);
    const bool has_begun = !settings.starts_at_gradient || state.step() > 0;
    if (field.kind == StateKind::moment && !has_begun && saved.count(key) == 0) continue;
    const at::Tensor& tensor = require_tensor(saved, key);
    if (is_coded(field.kind) && are_codes(tensor)) {
      import_codes(registered, range, device, field, saved, state, used);
      continue;
    }
    const std::vector<int64_t> sizes = field_sizes(field.kind, parameter.sizes());
    // The next step converts a remainder of the other width.
    const bool is_known = tensor.scalar_type() == *dtype ||
                          (field.kind == StateKind::remainder && is_remainder_dtype(tensor.scalar_type()));
    require(is_known && tensor.sizes() == sizes, "\"", key, "\" of the state to load is ",
            tensor.scalar_type(), " of shape ", tensor.sizes(), ", but parameter ", InMessage{name},
            " needs ", *dtype, " of shape ", at::IntArrayRef(sizes));
    const bool is_cut = range != nullptr && is_elementwise(field.kind);
    const at::Tensor own = is_cut ? cut_to_range(tensor, parameter, *range, name) : tensor;
    (state.*field.get)() = own.to(device);
    used.insert(key);
  }
}

// Marks the key as used.
void import_group(const RegisteredParameter& parameter, const NamedTensors& saved,
                  std::set<std::string>& used) {
  const std::string& name = parameter.name;
  const auto group = require_number<int64_t>(saved, name + "/group");
  require(group == static_cast<int64_t>(parameter.group), "parameter ", parameter.in_message(),
          " is in group ", parameter.group, " but in group ", group,
          " of the state to load; build the same parameter groups");
  used.insert(name + "/group");
}

// The same.
int64_t import_step(const RegisteredParameter& parameter, const NamedTensors& saved,
                    std::set<std::string>& used) {
  const std::string& name = parameter.name;
  const auto step = require_number<int64_t>(saved, name + "/step");
  require(step >= 0, "\"", name, "/step\" of the state to load is ", step, ", which is no step count");
  used.insert(name + "/step");
  return step;
}

// Whether the next step makes the first moment, and counts from there: a momentum was set that was 0 before.
bool is_awaited(const FusedAdamStateFields& state, size_t group, const OptimizerView& own) {
  if (state.exp_avg().defined()) return false;
  const GroupSettings of_group = own.traits.settings(*own.options(group));
  return of_group.starts_at_gradient && of_group.has_first_moment;
}

// The same of what its average has taken in.
kernels::AverageWeights import_average(const RegisteredParameter& parameter, const NamedTensors& saved,
                                       std::set<std::string>& used) {
  kernels::AverageWeights average;
  for (const AverageNumber& number : kAverageNumbers) {
    const std::string key = parameter.name + "/" + number.name;
    average.*number.value = require_number<double>(saved, key);
    used.insert(key);
  }
  check_average(average, "parameter " + parameter.name + " of the state to load");
  return average;
}

void require_all_used(const NamedTensors& saved, const std::set<std::string>& used, const char* optimizer) {
  const int64_t version = version_of(saved);
  for (const auto& item : saved) {
    if (used.count(item.first) != 0) continue;
    require(version <= kStateVersion, "the state to load has \"", item.first,
            "\", which this pacer does not know; it was written by a newer one (state of version ", version,
            ", this is ", kStateVersion, ")");
    throw InvalidArgument(concatenate("the state to load has \"", item.first,
                                      "\", which fits no parameter of this ", optimizer,
                                      "; build the same parameters and options"));
  }
}

// Takes a state of torch's optimizer, as a Session saves it (hooks/detail/torch_optimizer_state.h). Moments
// may be of another dtype than this optimizer's, and there is no master copy; the first step brings both
// about.
PendingState import_torch_state(const NamedTensors& saved, const OptimizerView& own) {
  PendingState pending;
  std::set<std::string> used = {kVersion, kSavedBy};
  for (size_t g = 0; g < own.groups.size(); ++g) {
    pending.options.push_back(
        own.traits.import_options(options_prefix(g), saved, /*version=*/0, *own.options(g), used));
  }
  for (const RegisteredParameter& parameter : own.parameters()) {
    const std::string prefix = parameter.name + "/";
    used.insert({prefix + "has_state", prefix + "group"});
    if (!require_number<bool>(saved, prefix + "has_state")) continue;  // it never had a gradient
    auto state = own.traits.make_state();
    auto& fields = static_cast<FusedAdamStateFields&>(*state);
    import_group(parameter, saved, used);
    fields.step(fields.may_lack_step() ? 1 : import_step(parameter, saved, used));
    const GroupSettings of_group = own.traits.settings(*pending.options[parameter.group]);
    for (const StateField& field : kStateFields) {
      const bool is_max = field.kind == StateKind::max_moment;
      const bool is_moment = field.kind == StateKind::moment;
      if (!is_moment && field.kind != StateKind::second_moment && !is_max) continue;
      const bool must = is_moment || (is_max ? of_group.amsgrad : of_group.has_second_moment);
      const std::string key = prefix + fields.saved_name(field.name), exists = key + "/exists";
      if (!must && saved.count(exists) == 0) continue;  // torch's has no such tensor
      const bool is_there = require_number<bool>(saved, exists);
      used.insert({key, exists});
      require(is_there == must, "the state to load has ", is_there ? "a" : "no", " \"", key,
              "\", which does not fit the options of its group");
      if (!is_there) continue;
      const at::Tensor& tensor = require_tensor(saved, key);
      require(tensor.sizes() == parameter.tensor.sizes() && at::isFloatingType(tensor.scalar_type()), "\"",
              key, "\" of the state to load is ", tensor.scalar_type(), " of shape ", tensor.sizes(),
              ", but the parameter has shape ", parameter.tensor.sizes());
      const ParameterRange* range = own.range_of(parameter);
      const at::Tensor values =
          range ? cut_to_range(tensor, parameter.tensor, *range, parameter.name) : tensor;
      (fields.*field.get)() = values.to(own.state_on_host ? at::Device(at::kCPU) : parameter.tensor.device());
    }
    pending.states[parameter.key()] = std::move(state);
  }
  require_all_used(saved, used, own.traits.name);
  return pending;
}

}  // namespace

at::Tensor cut_to_range(const at::Tensor& tensor, const at::Tensor& parameter, const ParameterRange& range,
                        const std::string& name) {
  if (tensor.sizes() == parameter.sizes()) {
    return tensor.reshape({-1}).narrow(0, range.first, range.count).clone();
  }
  require(tensor.sizes() == at::IntArrayRef(range.count), "the state of parameter ", InMessage{name},
          " has shape ", tensor.sizes(), ", but it can only be that of the whole parameter, ",
          parameter.sizes(), ", or of the ", range.count, " elements that this rank updates");
  return tensor;
}

void cut_state(FusedAdamStateFields& state, const at::Tensor& parameter, const ParameterRange& range,
               const std::string& name) {
  for (const StateField& field : kStateFields) {
    at::Tensor& tensor = (state.*field.get)();
    if (!tensor.defined() || !is_elementwise(field.kind)) continue;
    if (is_coded(field.kind) && are_codes(tensor) && tensor.sizes() == parameter.sizes()) {
      cut_codes(state, field, range);
      continue;
    }
    tensor = cut_to_range(tensor, parameter, range, name);
  }
}

NamedTensors export_state(const OptimizerView& own) {
  NamedTensors exported;
  write_saved_by(own.traits.name, exported);
  for (size_t g = 0; g < own.groups.size(); ++g) {
    own.traits.export_options(*own.options(g), options_prefix(g), exported);
  }
  for (const RegisteredParameter& parameter : own.parameters()) {
    const auto found = own.states.find(parameter.key());
    const bool has_state = found != own.states.end();
    const auto adopted = has_state ? adopted_state(own.traits, *found->second) : nullptr;
    const auto* state =
        !has_state ? nullptr
                   : dynamic_cast<const FusedAdamStateFields*>(adopted ? adopted.get() : found->second.get());
    const auto completed = state ? with_new_moments(parameter, *state, own) : nullptr;
    if (completed) state = static_cast<const FusedAdamStateFields*>(completed.get());
    exported[parameter.name + "/group"] = number_tensor(static_cast<int64_t>(parameter.group));
    const bool is_counted = state && !(state->may_lack_step() && is_awaited(*state, parameter.group, own));
    exported[parameter.name + "/step"] = number_tensor(is_counted ? state->step() : int64_t{0});
    if (own.traits.averages) {
      const auto average = state ? state->average() : kernels::AverageWeights();
      for (const AverageNumber& number : kAverageNumbers) {
        exported[parameter.name + "/" + number.name] = number_tensor(average.*number.value);
      }
    }
    if (state == nullptr) continue;
    for (const StateField& field : kStateFields) {
      const at::Tensor& tensor = (state->*field.read)();
      if (tensor.defined()) exported[parameter.name + "/" + state->saved_name(field.name)] = tensor;
      if (is_coded(field.kind) && are_codes(tensor))
        add_strides(parameter.name, tensor.sizes(), tensor.strides(), exported);
    }
  }
  return exported;
}

std::vector<GroupSettings> saved_settings(const NamedTensors& saved, const OptimizerView& own) {
  if (const std::string by = saved_by(saved); !by.empty()) require_same_optimizer(by, own.traits.name);
  std::set<std::string> used;
  const int64_t version = version_of(saved);
  ParamGroups with_options;
  for (size_t g = 0; g < own.groups.size(); ++g) {
    with_options.emplace_back(
        own.groups[g].params(),
        own.traits.import_options(options_prefix(g), saved, version, *own.options(g), used));
  }
  return settings_of(own.traits, with_options);
}

PendingState import_state(const NamedTensors& saved, const OptimizerView& own) {
  const std::string by = saved_by(saved);
  if (own.traits.torch_name != nullptr && by == own.traits.torch_name) return import_torch_state(saved, own);
  if (!by.empty()) require_same_optimizer(by, own.traits.name);
  PendingState pending;
  std::set<std::string> used = {kVersion, kSavedBy};
  const int64_t version = version_of(saved);
  std::vector<GroupSettings> settings;
  for (size_t g = 0; g < own.groups.size(); ++g) {
    pending.options.push_back(
        own.traits.import_options(options_prefix(g), saved, version, *own.options(g), used));
    settings.push_back(own.traits.settings(*pending.options.back()));
  }
  for (const RegisteredParameter& parameter : own.parameters()) {
    const std::string& name = parameter.name;
    import_group(parameter, saved, used);
    const int64_t step = import_step(parameter, saved, used);
    const auto average =
        own.traits.averages ? import_average(parameter, saved, used) : kernels::AverageWeights();
    auto state = own.traits.make_state();
    auto& fields = static_cast<FusedAdamStateFields&>(*state);
    const auto has = [&](const StateField& field) {
      return saved.count(name + "/" + fields.saved_name(field.name)) != 0;
    };
    const bool starts_later = settings[parameter.group].starts_at_gradient;
    const auto* const last = starts_later ? std::end(kStateFields) : std::begin(kStateFields) + 1;
    if (std::none_of(std::begin(kStateFields), last, has) && step == 0) continue;  // it never had a gradient
    fields.step(step).average(average);
    import_tensors(parameter, own.range_of(parameter), own.state_on_host, settings[parameter.group], saved,
                   fields, used);
    pending.states[parameter.key()] = std::move(state);
  }
  require_all_used(saved, used, own.traits.name);
  return pending;
}

}  // namespace pacer::detail
