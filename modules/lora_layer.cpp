#include <pacer/modules/lora_layer.h>

#include <algorithm>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/isfinite.h>

#include <pacer/core/error.h>

namespace pacer::modules {
namespace {

int64_t count_not_finite(const at::Tensor& values) {
  return values.numel() - at::isfinite(values).sum().item<int64_t>();
}

bool holds(const std::vector<std::string>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

}  // namespace

LoraAdapter LoraLayer::adapter(const std::string& name) const {
  for (const LoraAdapter& adapter : adapters_) {
    if (adapter->options.name() == name) return adapter;
  }
  return nullptr;
}

std::vector<LoraAdapter> LoraLayer::active_adapters() const {
  std::vector<LoraAdapter> active;
  for (const LoraAdapter& adapter : adapters_) {
    if (holds(active_, adapter->options.name())) active.push_back(adapter);
  }
  return active;
}

void LoraLayer::register_adapter(LoraAdapter adapter) {
  module().register_module("lora_" + adapter->options.name(), adapter.ptr());
  adapters_.push_back(std::move(adapter));
}

void LoraLayer::renew_adapters() {
  for (LoraAdapter& adapter : std::exchange(adapters_, {})) {
    register_adapter(std::dynamic_pointer_cast<LoraAdapterImpl>(adapter->clone()));
  }
}

void LoraLayer::take_merge_of(const LoraLayer& original) {
  if (!is_merged()) return;
  merged_version_ = stored_weight()._version() + (original.is_unmergeable() ? 0 : 1);
}

void LoraLayer::add_adapter(const LoraOptions& lora) {
  require(adapter(lora.name()).is_empty(), "the layer has an adapter called ", lora.name(), " already");
  require(!is_merged(), "a layer whose adapter is merged takes no other; unmerge() first");
  const std::string why = why_no_adapter(lora);
  require(why.empty(), "the layer ", why);
  LoraAdapter added(lora_matrices(lora.r()), lora);
  added->to(stored_weight().device());
  added->train(module().is_training());
  if (lora.dora()) added->reset_magnitude(weight_values());
  register_adapter(std::move(added));
  set_active_adapters({lora.name()});
}

void LoraLayer::remove_adapter(const std::string& name) {
  const auto found = std::find_if(adapters_.begin(), adapters_.end(), [&](const LoraAdapter& adapter) {
    return adapter->options.name() == name;
  });
  if (found == adapters_.end()) return;
  const bool is_active = holds(active_, name);
  require(!is_active || !is_merged() || active_.size() == 1, "the adapter ", name,
          " is merged together with others, whose sum cannot be taken apart; unmerge() first");
  module().unregister_module("lora_" + name);
  adapters_.erase(found);
  if (!is_active) return;
  active_.erase(std::remove(active_.begin(), active_.end(), name), active_.end());
  before_merge_ = at::Tensor();  // what was merged stays
}

void LoraLayer::set_active_adapters(const std::vector<std::string>& names) {
  require(!is_merged(), "a layer whose adapter is merged takes no other; unmerge() first");
  const std::string why = why_not_together(names);
  require(why.empty(), "the layer ", why);
  std::vector<std::string> active;
  for (const LoraAdapter& adapter : adapters_) {
    if (holds(names, adapter->options.name())) active.push_back(adapter->options.name());
  }
  active_ = std::move(active);
  for (LoraAdapter& adapter : adapters_) {
    const bool is_active = holds(active_, adapter->options.name());
    for (const at::Tensor& parameter : adapter->parameters()) parameter.requires_grad_(is_active);
  }
}

std::string LoraLayer::why_not_together(const std::vector<std::string>& names) const {
  size_t count = 0;
  std::string with_dora;
  for (const LoraAdapter& adapter : adapters_) {
    const std::string& name = adapter->options.name();
    if (!holds(names, name)) continue;
    ++count;
    if (adapter->options.dora()) with_dora = name;
  }
  if (count < 2 || with_dora.empty()) return "";
  return detail::concatenate(
      "has an adapter with LoraOptions::dora, ", with_dora,
      ", which scales all that the layer computes and goes with no other; make it the only "
      "one of them, or leave it out");
}

void LoraLayer::merge() {
  const std::vector<LoraAdapter> active = active_adapters();
  if (active.empty() || is_merged()) return;
  const std::string why = why_no_merge();
  require(why.empty(), "the weight ", why);
  const at::NoGradGuard no_grad;
  const at::Tensor weight = stored_weight();
  const at::ScalarType dtype = weight.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor before = weight.detach().clone();
  const auto wide_sum = [&] {
    at::Tensor sum = before.to(dtype);
    for (const LoraAdapter& adapter : active) sum = adapter->merged_into(sum);
    return sum;
  };
  const at::Tensor sum = wide_sum().to(weight.scalar_type());
  const int64_t beyond = count_not_finite(sum);
  if (beyond > 0) {
    const bool another_holds = sum.scalar_type() != dtype && count_not_finite(wide_sum()) == 0;
    throw InvalidArgument(detail::concatenate(
        beyond, beyond == 1 ? " element" : " elements", " of its sum with the adapter ",
        beyond == 1 ? "is" : "are", " not finite in ", weight.scalar_type(),
        another_holds
            ? "; move the model to a dtype that holds them, torch::kBFloat16 or torch::kFloat, and "
              "merge then"
            : ", because the weight or the adapter holds numbers that are not finite or too large to "
              "add up; load values from before the first of these"));
  }
  weight.copy_(sum);
  before_merge_ = before;
  merged_version_ = weight._version();
}

void LoraLayer::unmerge() {
  if (!is_merged()) return;
  require(is_unmergeable(),
          "the weight of a layer was written to since its adapter was merged, so that it cannot be told what "
          "it was before; load the model anew");
  const at::NoGradGuard no_grad;
  stored_weight().copy_(std::exchange(before_merge_, at::Tensor()));
}

}  // namespace pacer::modules
