#include <pacer/modules/lora_adapter.h>

#include <cmath>
#include <ostream>

#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/nn/init.h>

#include <pacer/core/error.h>

namespace pacer::modules {

LoraAdapterImpl::LoraAdapterImpl(const LoraMatrices& sizes, const LoraOptions& lora)
    : matrices(sizes), options(lora) {
  require(r() >= 1, "LoraOptions::r must be at least 1, not ", r());
  LoraAdapterImpl::reset();
}

LoraAdapterImpl::LoraAdapterImpl(int64_t in, int64_t out, const LoraOptions& lora)
    : LoraAdapterImpl(LoraMatrices{LoraKind::linear, {lora.r(), in}, {out, lora.r()}}, lora) {}

void LoraAdapterImpl::reset() {
  const bool is_frozen = A.defined() && !A.requires_grad();  // so is a clone
  A = register_parameter("A", at::zeros(matrices.a, at::kFloat), !is_frozen);
  B = register_parameter("B", at::zeros(matrices.b, at::kFloat), !is_frozen);
  if (matrices.kind == LoraKind::embedding) {
    torch::nn::init::normal_(B);
  } else {
    const double bound = 1 / std::sqrt(static_cast<double>(A.numel()) / static_cast<double>(r()));
    torch::nn::init::uniform_(A, -bound, bound);
  }
}

double LoraAdapterImpl::scale() const {
  const auto rank = static_cast<double>(r());
  return alpha() / (options.rslora() ? std::sqrt(rank) : rank);
}

at::Tensor LoraAdapterImpl::merged_into(const at::Tensor& weight) const {
  const at::ScalarType dtype = weight.scalar_type();
  const at::Tensor a = A.to(dtype).flatten(1), b = B.to(dtype).flatten(1);
  if (matrices.kind == LoraKind::embedding) return at::addmm(weight.t(), b, a, 1, scale()).t();
  return at::addmm(weight.flatten(1), b, a, 1, scale()).view_as(weight);
}

void LoraAdapterImpl::pretty_print(std::ostream& stream) const {
  stream << "pacer::modules::LoraAdapter(r=" << r() << ", alpha=" << alpha()
         << ", dropout=" << options.dropout() << ")";
}

}  // namespace pacer::modules
