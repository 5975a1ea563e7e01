#include <pacer/optimizers/detail/named_views.h>

#include <set>

#include <pacer/core/error.h>

namespace pacer::detail {

void save_views(const NamedViews& views, NamedTensors& state) {
  for (const auto& [key, view] : views) state[key] = view;
}

void load_views(const NamedViews& views, const NamedTensors& state, const LoadRefusals& refusals) {
  std::set<std::string> expected;
  for (const auto& [key, view] : views) {
    require(state.count(key) != 0, refusals.before_missing, key, refusals.after_missing);
    const at::Tensor& saved = state.at(key);
    require(saved.scalar_type() == view.scalar_type() && saved.sizes() == view.sizes(), "\"", key,
            "\" of the state to load is ", saved.scalar_type(), " of shape ", saved.sizes(),
            ", but it must be ", view.scalar_type(), " of shape ", view.sizes(), refusals.after_misfit);
    expected.insert(key);
  }
  for (const auto& item : state) {
    require(expected.count(item.first) != 0, "the state to load has \"", item.first,
            refusals.after_left_over);
  }
  for (const auto& [key, view] : views) view.copy_(state.at(key));
}

}  // namespace pacer::detail
