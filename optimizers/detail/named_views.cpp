#include <pacer/optimizers/detail/named_views.h>

#include <pacer/core/error.h>

namespace pacer::detail {

void save_views(const NamedViews& views, NamedTensors& state) {
  for (const auto& [key, view] : views) state[key] = view;
}

void load_views(const NamedViews& views, NamedTensors& state, const LoadRefusals& refusals) {
  for (const auto& [key, view] : views) {
    require(state.count(key) != 0, refusals.before_missing, key, refusals.after_missing);
    const at::Tensor& saved = state.at(key);
    require(saved.scalar_type() == view.scalar_type() && saved.sizes() == view.sizes(), "\"", key,
            "\" of the state to load is ", saved.scalar_type(), " of shape ", saved.sizes(),
            ", but it must be ", view.scalar_type(), " of shape ", view.sizes(), refusals.after_misfit);
  }
  for (const auto& [key, view] : views) {
    view.copy_(state.at(key));
    state.erase(key);
  }
}

void require_all_loaded(const NamedTensors& state, const char* refusal) {
  require(state.empty(), "the state to load has \"", state.empty() ? "" : state.begin()->first, refusal);
}

}  // namespace pacer::detail
