// What becomes of a pacer::modules::Linear: 4-bit storage, adapters, merged weights.
#include <algorithm>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/isfinite.h>

#include <pacer/core/error.h>
#include <pacer/modules/linear.h>

namespace pacer::modules {
namespace {

int64_t count_not_finite(const at::Tensor& values) {
  return values.numel() - at::isfinite(values).sum().item<int64_t>();
}

}  // namespace

void LinearImpl::set_nf4(Nf4Weight nf4) {
  require(!nf4.is_empty() && nf4->out_features == options.out_features() &&
              nf4->in_features == options.in_features(),
          "a weight in 4 bits for a pacer::modules::Linear of ", options.out_features(), " x ",
          options.in_features(), " has ", nf4.is_empty() ? 0 : nf4->out_features, " x ",
          nf4.is_empty() ? 0 : nf4->in_features);
  require(!is_merged(), "a layer whose adapter is merged takes no other weight; unmerge() first");
  if (nf4_) {
    replace_module("weight", nf4.ptr());
  } else {
    parameters_.erase("weight");
    weight.requires_grad_(false);  // whoever has it still
    weight = at::Tensor();
    register_module("weight", nf4.ptr());
  }
  nf4_ = std::move(nf4);
  nf4_->train(is_training());
}

void LinearImpl::dequantize() {
  if (!nf4_) return;
  const at::NoGradGuard no_grad;
  const at::Tensor values = nf4_->decode(nf4_->dtype);
  unregister_module("weight");
  nf4_ = nullptr;
  weight = register_parameter("weight", values, /*requires_grad=*/false);
}

// Where the adapter is merged, the copy can be unmerged as this layer can.
std::shared_ptr<torch::nn::Module> LinearImpl::clone(const std::optional<torch::Device>& device) const {
  auto copy = Cloneable::clone(device);
  if (is_merged()) {
    auto& layer = static_cast<LinearImpl&>(*copy);
    layer.merged_version_ = layer.weight._version() + (is_unmergeable() ? 0 : 1);
  }
  return copy;
}

LoraAdapter LinearImpl::adapter(const std::string& name) const {
  for (const LoraAdapter& adapter : adapters_) {
    if (adapter->options.name() == name) return adapter;
  }
  return nullptr;
}

LoraAdapter LinearImpl::active_adapter() const { return active_.empty() ? nullptr : adapter(active_); }

void LinearImpl::register_adapter(LoraAdapter adapter) {
  register_module("lora_" + adapter->options.name(), adapter.ptr());
  adapters_.push_back(std::move(adapter));
}

void LinearImpl::add_adapter(const LoraOptions& lora) {
  require(adapter(lora.name()).is_empty(), "the layer has an adapter called ", lora.name(), " already");
  require(!is_merged(), "a layer whose adapter is merged takes no other; unmerge() first");
  LoraAdapter added(options.in_features(), options.out_features(), lora);
  added->to(nf4_ ? nf4_->codes.device() : weight.device());
  added->train(is_training());
  register_adapter(std::move(added));
  set_active_adapter(lora.name());
}

void LinearImpl::remove_adapter(const std::string& name) {
  const auto found = std::find_if(adapters_.begin(), adapters_.end(), [&](const LoraAdapter& adapter) {
    return adapter->options.name() == name;
  });
  if (found == adapters_.end()) return;
  unregister_module("lora_" + name);
  adapters_.erase(found);
  if (active_ != name) return;
  active_.clear();
  before_merge_ = at::Tensor();  // what was merged stays
}

void LinearImpl::set_active_adapter(const std::string& name) {
  require(!is_merged(), "a layer whose adapter is merged takes no other; unmerge() first");
  active_ = adapter(name).is_empty() ? "" : name;
  for (LoraAdapter& adapter : adapters_) {
    const bool is_active = adapter->options.name() == active_;
    adapter->A.requires_grad_(is_active);
    adapter->B.requires_grad_(is_active);
  }
}

void LinearImpl::merge() {
  const LoraAdapter active = active_adapter();
  if (active.is_empty() || is_merged()) return;
  require(!nf4_,
          "an adapter cannot be merged into a weight in 4 bits, because rounding the sum to 4 bits once more "
          "would ruin it; dequantize() first");
  const at::NoGradGuard no_grad;
  const at::ScalarType dtype = weight.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor before = weight.detach().clone();
  const auto wide_sum = [&] {
    return at::addmm(before.to(dtype), active->B.to(dtype), active->A.to(dtype), 1, active->scale());
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

void LinearImpl::unmerge() {
  if (!is_merged()) return;
  require(is_unmergeable(),
          "the weight of a layer was written to since its adapter was merged, so that it cannot be told what "
          "it was before; load the model anew");
  const at::NoGradGuard no_grad;
  weight.copy_(std::exchange(before_merge_, at::Tensor()));
}

}  // namespace pacer::modules
