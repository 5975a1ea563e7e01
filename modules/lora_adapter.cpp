#include <pacer/modules/lora_adapter.h>

#include <cmath>
#include <ostream>

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/nn/init.h>

#include <pacer/core/error.h>

namespace pacer::modules {

LoraAdapterImpl::LoraAdapterImpl(int64_t in, int64_t out, const LoraOptions& lora)
    : in_features(in), out_features(out), options(lora) {
  require(r() >= 1, "LoraOptions::r must be at least 1, not ", r());
  LoraAdapterImpl::reset();
}

void LoraAdapterImpl::reset() {
  const bool is_frozen = A.defined() && !A.requires_grad();  // so is a clone
  A = register_parameter("A", at::empty({r(), in_features}, at::kFloat), !is_frozen);
  B = register_parameter("B", at::zeros({out_features, r()}, at::kFloat), !is_frozen);
  const double bound = 1 / std::sqrt(static_cast<double>(in_features));
  torch::nn::init::uniform_(A, -bound, bound);
}

double LoraAdapterImpl::scale() const {
  const auto rank = static_cast<double>(r());
  return alpha() / (options.rslora() ? std::sqrt(rank) : rank);
}

void LoraAdapterImpl::pretty_print(std::ostream& stream) const {
  stream << "pacer::modules::LoraAdapter(r=" << r() << ", alpha=" << alpha()
         << ", dropout=" << options.dropout() << ")";
}

}  // namespace pacer::modules
