// What becomes of a pacer::modules::Linear: 4-bit storage, and what adapters ask of it.
#include <utility>

#include <ATen/core/grad_mode.h>

#include <pacer/core/error.h>
#include <pacer/modules/linear.h>

namespace pacer::modules {

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

std::shared_ptr<torch::nn::Module> LinearImpl::clone(const std::optional<torch::Device>& device) const {
  auto copy = Cloneable::clone(device);
  static_cast<LinearImpl&>(*copy).take_merge_of(*this);
  return copy;
}

LoraMatrices LinearImpl::lora_matrices(int64_t r) const {
  return {LoraKind::linear, {r, options.in_features()}, {options.out_features(), r}};
}

std::string LinearImpl::why_no_adapter(const LoraOptions& lora) const {
  const int64_t in = options.in_features();
  if (lora.dropout() == 0 || in % 4 == 0) return "";
  return detail::concatenate("takes ", in,
                             " features, where dropout of an adapter needs a multiple of 4; leave "
                             "LoraOptions::dropout out, or this layer out of the targets");
}

std::string LinearImpl::why_no_merge() const {
  if (!nf4_) return "";
  return "is in 4 bits, and rounding the sum to 4 bits once more would ruin it; dequantize() the model first";
}

at::Tensor LinearImpl::weight_values() const { return nf4_ ? nf4_->decode(nf4_->dtype) : weight; }

at::Tensor LinearImpl::stored_weight() const { return nf4_ ? nf4_->codes : weight; }

}  // namespace pacer::modules
