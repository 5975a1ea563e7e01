#include <pacer/modules/lora_adapter.h>

#include <cmath>
#include <limits>
#include <ostream>

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/nn/init.h>

#include <pacer/core/error.h>

namespace pacer::modules {
namespace {

// The lengths of the rows. One of zeros has no direction, and a length by which zeros can be divided.
at::Tensor row_lengths(const at::Tensor& weight) {
  return at::linalg_vector_norm(weight, 2, {1}).clamp_min(std::numeric_limits<float>::min());
}

}  // namespace

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
  if (options.dora())
    magnitude = register_parameter("magnitude", at::ones(matrices.b[0], at::kFloat), !is_frozen);
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

at::Tensor LoraAdapterImpl::plain_sum(const at::Tensor& weight) const {
  const at::ScalarType dtype = weight.scalar_type();
  const at::Tensor a = A.to(dtype).flatten(1), b = B.to(dtype).flatten(1);
  if (matrices.kind == LoraKind::embedding) return at::addmm(weight.t(), b, a, 1, scale()).t();
  return at::addmm(weight.flatten(1), b, a, 1, scale()).view_as(weight);
}

at::Tensor LoraAdapterImpl::merged_into(const at::Tensor& weight) const {
  const at::Tensor sum = plain_sum(weight);
  return options.dora() ? sum * row_factors(weight).unsqueeze(1) : sum;
}

at::Tensor LoraAdapterImpl::row_factors(const at::Tensor& weight) const {
  const at::ScalarType dtype = weight.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  at::Tensor lengths;
  {
    const at::NoGradGuard no_grad;
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    lengths = row_lengths(plain_sum(weight.to(dtype)));
  }
  return magnitude.to(dtype) / lengths;
}

void LoraAdapterImpl::reset_magnitude(const at::Tensor& weight) {
  const at::NoGradGuard no_grad;
  const at::ScalarType dtype = weight.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  magnitude.copy_(row_lengths(plain_sum(weight.to(dtype))));
}

void LoraAdapterImpl::pretty_print(std::ostream& stream) const {
  stream << "pacer::modules::LoraAdapter(r=" << r() << ", alpha=" << alpha()
         << ", dropout=" << options.dropout() << (options.dora() ? ", dora" : "") << ")";
}

}  // namespace pacer::modules
