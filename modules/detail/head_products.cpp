#include <pacer/modules/detail/head_products.h>

#include <ATen/ops/addmm.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mm.h>

#include <pacer/core/error.h>
#include <pacer/kernels/cross_entropy.h>
#include <pacer/modules/detail/fp8_tensors.h>
#include <pacer/modules/detail/product.h>

namespace pacer::detail {

HeadProducts::HeadProducts(const at::Tensor& hidden, const at::Tensor& weight, bool in_8_bits,
                           bool for_hidden)
    : hidden_(hidden), weight_(weight) {
  if (!in_8_bits) return;
  const at::Device device = hidden.device();
  require<Unavailable>(
      multiplies_8_bits(device),
      "linear_cross_entropy in 8-bit floats needs a GPU of compute capability 8.9 or later; leave "
      "LinearCrossEntropyOptions::fp8 out");
  kernels::Fp8Rule rule;  // each by its own largest magnitude
  rule.margin = 0;
  Fp8Tensors casts(device, rule, {});
  const Fp8Tensors::Role role{kernels::Fp8Format::e4m3, std::nullopt};
  eight_ = InEight{casts.cast(hidden, role, {}), casts.cast(weight, role, {/*transposed=*/for_hidden}),
                   at::full({1}, 1 / kernels::kCrossEntropyCodes, hidden.options().dtype(at::kFloat))};
}

at::Tensor HeadProducts::logits(int64_t first, int64_t count) const {
  if (!eight_) return at::mm(hidden_.narrow(0, first, count), weight_.t());
  return scaled_product(eight_->hidden.codes.narrow(0, first, count), eight_->hidden.inverse,
                        kernels::Fp8Format::e4m3, eight_->weight.codes, eight_->weight.inverse,
                        hidden_.scalar_type(), {}, /*fast=*/true);
}

void HeadProducts::write_hidden_gradient(const at::Tensor& logits, const at::Tensor& codes,
                                         const at::Tensor& to) const {
  if (!eight_) {
    at::Tensor result = to;
    at::mm_out(result, logits, weight_);
    return;
  }
  to.copy_(scaled_product(codes, eight_->codes_inverse, kernels::Fp8Format::e5m2, eight_->weight.transposed,
                          eight_->weight.inverse, to.scalar_type(), {}, /*fast=*/false));
}

void HeadProducts::add_weight_gradient(const at::Tensor& logits, int64_t first, at::Tensor& sum) const {
  const int64_t count = logits.size(0);
  const at::Tensor transposed = logits.t(), x = hidden_.narrow(0, first, count);
  const bool adds_in_product = x.is_cuda() && x.scalar_type() != at::kFloat;
  if (count == hidden_.size(0)) {
    sum = at::mm(transposed, x);
  } else if (!adds_in_product) {
    const at::Tensor product = at::mm(transposed, x);
    sum = sum.defined() ? sum.add_(product) : product.to(at::kFloat);
  } else if (sum.defined()) {
    at::addmm_out(sum, sum, transposed, x, at::kFloat);
  } else {
    sum = at::mm(transposed, x, at::kFloat);
  }
}

}  // namespace pacer::detail
