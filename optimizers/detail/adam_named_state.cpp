#include <pacer/optimizers/detail/adam_named_state.h>

#include <set>

namespace pacer::detail {
namespace {

using kernels::AdamStorage;

std::string options_prefix(size_t group) { return "group/" + std::to_string(group) + "/"; }

// Name and accessor of every tensor a state can have.
struct StateField {
  const char* name;
  at::Tensor& (FusedAdamStateFields::*tensor)();
  const at::Tensor& (FusedAdamStateFields::*read)() const noexcept;
};
const StateField kStateFields[] = {
    {"/exp_avg", &FusedAdamStateFields::exp_avg, &FusedAdamStateFields::exp_avg},
    {"/exp_avg_sq", &FusedAdamStateFields::exp_avg_sq, &FusedAdamStateFields::exp_avg_sq},
    {"/max_exp_avg_sq", &FusedAdamStateFields::max_exp_avg_sq, &FusedAdamStateFields::max_exp_avg_sq},
    {"/master", &FusedAdamStateFields::master, &FusedAdamStateFields::master},
    {"/remainder", &FusedAdamStateFields::remainder, &FusedAdamStateFields::remainder},
    {"/trust_average", &FusedAdamStateFields::trust_average, &FusedAdamStateFields::trust_average}};

constexpr size_t kTrustAverage = 5;  // of kStateFields

// The dtype of each of kStateFields in a dtype set; none where it has no such tensor.
std::optional<at::ScalarType> field_dtype(size_t field, AdamStorage storage,
                                          const AdamGroupSettings& settings) {
  const bool has_master = storage == AdamStorage::bf16_master || storage == AdamStorage::f16_master;
  switch (field) {
    case 2:
      return settings.amsgrad ? std::optional(state_dtype(storage)) : std::nullopt;
    case 3:
      return has_master ? std::optional(at::kFloat) : std::nullopt;
    case 4:
      return storage == AdamStorage::bf16_remainder ? std::optional(at::kShort) : std::nullopt;
    case kTrustAverage:
      return settings.averages_trust ? std::optional(at::kDouble) : std::nullopt;
    default:
      return state_dtype(storage);
  }
}

constexpr int64_t kAverageSizes[] = {2};

// Reads all fields of one parameter and marks their keys as used.
void import_tensors(const std::string& name, const at::Tensor& parameter, const AdamGroupSettings& settings,
                    const NamedTensors& saved, FusedAdamStateFields& state, std::set<std::string>& used) {
  const AdamStorage storage =
      storage_for(parameter.scalar_type(), settings.master_weights, settings.rounding, name);
  for (size_t field = 0; field < std::size(kStateFields); ++field) {
    const auto dtype = field_dtype(field, storage, settings);
    if (!dtype) continue;
    const std::string key = name + kStateFields[field].name;
    const at::Tensor& tensor = require_tensor(saved, key);
    const bool is_average = field == kTrustAverage;
    const at::IntArrayRef sizes = is_average ? at::IntArrayRef(kAverageSizes) : parameter.sizes();
    require(tensor.scalar_type() == *dtype && tensor.sizes() == sizes, "\"", key,
            "\" of the state to load is ", tensor.scalar_type(), " of shape ", tensor.sizes(),
            ", but parameter ", name, " needs ", *dtype, " of shape ", sizes);
    at::Tensor& own = (state.*kStateFields[field].tensor)();
    own = tensor.to(parameter.device(), /*non_blocking=*/false, /*copy=*/true);
    used.insert(key);
  }
}

}  // namespace

NamedTensors export_adam(const AdamFlavour& flavour, const ParamGroups& groups, const ParamStates& states,
                         const ParameterNames& names) {
  NamedTensors exported;
  for (size_t g = 0; g < groups.size(); ++g) {
    flavour.export_options(groups[g].options(), options_prefix(g), exported);
    const auto& parameters = groups[g].params();
    for (size_t i = 0; i < parameters.size(); ++i) {
      const std::string name = name_of(names, parameters[i], g, i);
      const auto found = states.find(parameters[i].unsafeGetTensorImpl());
      const auto* state =
          found == states.end() ? nullptr : dynamic_cast<const FusedAdamStateFields*>(found->second.get());
      exported[name + "/group"] = number_tensor(static_cast<int64_t>(g));
      exported[name + "/step"] = number_tensor(state ? state->step() : int64_t{0});
      if (state == nullptr) continue;
      for (const StateField& field : kStateFields) {
        const at::Tensor& tensor = (state->*field.read)();
        if (tensor.defined()) exported[name + field.name] = tensor;
      }
    }
  }
  return exported;
}

PendingState import_adam(const AdamFlavour& flavour, const ParamGroups& groups, const ParameterNames& names,
                         const NamedTensors& saved) {
  PendingState pending;
  std::set<std::string> used;
  for (size_t g = 0; g < groups.size(); ++g) {
    pending.options.push_back(flavour.import_options(options_prefix(g), saved));
    const AdamGroupSettings settings = flavour.settings(*pending.options.back());
    NamedTensors option_keys;
    flavour.export_options(*pending.options.back(), options_prefix(g), option_keys);
    for (const auto& option : option_keys) used.insert(option.first);
    const auto& parameters = groups[g].params();
    for (size_t i = 0; i < parameters.size(); ++i) {
      const std::string name = name_of(names, parameters[i], g, i);
      const auto group = require_number<int64_t>(saved, name + "/group");
      require(group == static_cast<int64_t>(g), "parameter ", name, " is in group ", g, " but in group ",
              group, " of the state to load; build the same parameter groups");
      const auto step = require_number<int64_t>(saved, name + "/step");
      require(step >= 0, "\"", name, "/step\" of the state to load is ", step, ", which is no step count");
      used.insert({name + "/group", name + "/step"});
      if (saved.count(name + "/exp_avg") == 0 && step == 0) continue;  // it never had a gradient
      auto state = flavour.make_state();
      auto& fields = static_cast<FusedAdamStateFields&>(*state);
      fields.step(step);
      import_tensors(name, parameters[i], settings, saved, fields, used);
      pending.states[parameters[i].unsafeGetTensorImpl()] = std::move(state);
    }
  }
  for (const auto& item : saved) {
    require(used.count(item.first) != 0, "the state to load has \"", item.first,
            "\", which fits no parameter of this ", flavour.name, "; build the same parameters and options");
  }
  return pending;
}

}  // namespace pacer::detail
