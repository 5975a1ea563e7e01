#include <pacer/optimizers/detail/optimizer_archive.h>

namespace pacer::detail {

void check_pending(const PendingState& pending, const AdamFlavour& flavour, const ParamGroups& groups,
                   const ParameterNames& names) {
  std::vector<AdamGroupSettings> settings;
  for (size_t g = 0; g < groups.size(); ++g) {
    settings.push_back(flavour.settings(*pending.options[g]));
    const auto& parameters = groups[g].params();
    for (size_t i = 0; i < parameters.size(); ++i) {
      const auto found = pending.states.find(parameters[i].unsafeGetTensorImpl());
      if (found == pending.states.end()) continue;
      const std::string name = name_of(names, parameters[i], g, i);
      const auto& state = static_cast<const FusedAdamStateFields&>(*found->second);
      require(state.exp_avg().defined() && state.exp_avg_sq().defined(), "the state of parameter ", name,
              " lacks a moment (exp_avg or exp_avg_sq); nothing was loaded");
      check_state(state, parameters[i], name);
    }
  }
  check_alike(settings, flavour.name);
}

void commit_pending(PendingState pending, ParamGroups& groups, ParamStates& states) noexcept {
  for (size_t g = 0; g < groups.size(); ++g) groups[g].set_options(std::move(pending.options[g]));
  states.swap(pending.states);
}

}  // namespace pacer::detail
