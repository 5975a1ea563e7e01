#include <pacer/modules/detail/product.h>

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_scaled_mm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>

#include <pacer/core/error.h>
#include <pacer/modules/fp8_scaling.h>
#include <pacer/modules/replayed.h>

namespace pacer::detail {
namespace {

constexpr int64_t kMultiple = 16;  // of sizes

// As scaled_product, of decoded values: in fp32, rounded once.
at::Tensor decoded_product(const at::Tensor& a, const at::Tensor& b, const at::Tensor& factor,
                           at::ScalarType dtype, const at::Tensor& bias) {
  at::Tensor product = at::mm(a.to(at::kFloat), b.to(at::kFloat).t()).mul_(factor);
  if (bias.defined()) product.add_(bias);
  return product.to(dtype);
}

// Of a weight [out, in], whatever its storage.
struct WeightForm {
  at::Device device;
  at::ScalarType dtype;
  int64_t out, in;
};

bool multiplies(Fp8Layer& layer, const at::Tensor& x, int64_t rows, const WeightForm& weight) {
  require(x.device() == layer.device() && weight.device == layer.device(),
          "a pacer::modules::Linear in 8-bit floats has its scales on ", layer.device(),
          ", but its input is on ", x.device(), " and its weight on ", weight.device,
          "; move the model before the Session or Fp8Scaling is made");
  const bool fits =
      rows > 0 && rows % kMultiple == 0 && weight.out % kMultiple == 0 && weight.in % kMultiple == 0;
  if (fits && is_castable(x) && is_castable(weight.dtype)) return true;
  layer.count_other_call();
  return false;
}

}  // namespace

at::Tensor scaled_product(const at::Tensor& a, const at::Tensor& a_inverse, kernels::Fp8Format a_format,
                          const at::Tensor& b, const at::Tensor& b_inverse, at::ScalarType dtype,
                          const at::Tensor& bias, bool fast) {
  const at::ScalarType of_a = a_format == kernels::Fp8Format::e4m3 ? at::kFloat8_e4m3fn : at::kFloat8_e5m2;
  const at::Tensor a_values = a.view(of_a), b_values = b.view(at::kFloat8_e4m3fn);
  // LibTorch multiplies 8-bit floats on few CPUs, and on the others by a loop for reference.
  if (a.is_cpu()) return decoded_product(a_values, b_values, a_inverse * b_inverse, dtype, bias);
  std::optional<at::Tensor> added;
  if (bias.defined()) added = bias;
  return at::_scaled_mm(a_values, b_values.t(), a_inverse, b_inverse, added,
                        /*scale_result=*/std::nullopt, dtype, fast);
}

at::ScalarType computing_type(const at::Tensor& x, bool in_8_bits) {
  const at::DeviceType device = x.device().type();
  if (at::autocast::is_autocast_enabled(device)) return at::autocast::get_autocast_dtype(device);
  return in_8_bits && x.scalar_type() == at::kFloat ? at::kBFloat16 : x.scalar_type();
}

Fp8LayerPtr fp8_layer(const torch::nn::Module& module) {
  const auto& scaling = Fp8Scope::current();
  return scaling ? scaling->layer_of(module) : nullptr;
}

// The first run of a region that backward runs again has no gradients, but it is one of training.
bool pass_records(bool is_training) {
  return is_training && (at::GradMode::is_enabled() || region_is_running());
}

bool multiplies(Fp8Layer& layer, const at::Tensor& x, int64_t rows, const at::Tensor& weight) {
  return multiplies(layer, x, rows,
                    WeightForm{weight.device(), weight.scalar_type(), weight.size(0), weight.size(1)});
}
bool multiplies(Fp8Layer& layer, const at::Tensor& x, int64_t rows, const modules::Nf4Weight& weight) {
  return multiplies(
      layer, x, rows,
      WeightForm{weight->codes.device(), weight->dtype, weight->out_features, weight->in_features});
}

Fp8Matrix Product::cast_weight(bool transposed) const {
  return nf4_.is_empty() ? fp8_->cast_weight(weight_) : fp8_->cast_weight(nf4_, transposed);
}

at::Tensor Product::forward(const Operand& x, const at::Tensor& bias) const {
  if (!fp8_) return at::linear(x.values, weight_, bias);
  const Fp8Matrix weight = cast_weight(/*transposed=*/false);
  return scaled_product(x.codes, x.inverse, kernels::Fp8Format::e4m3, weight.codes, weight.inverse, dtype_,
                        bias, /*fast=*/true);
}

at::Tensor Product::input_gradient(const Operand& dy, at::ScalarType dtype) const {
  if (!fp8_) return at::mm(dy.values, weight_);
  const Fp8Matrix weight = cast_weight(/*transposed=*/true);
  return scaled_product(dy.codes, dy.inverse, fp8_->gradients(), weight.transposed, weight.inverse, dtype, {},
                        /*fast=*/false);
}

at::Tensor Product::weight_gradient(const Operand& dy, const Operand& x) const {
  if (!fp8_) return at::mm(dy.values.t(), x.values);
  return scaled_product(dy.transposed, dy.inverse, fp8_->gradients(), x.transposed, x.inverse,
                        weight_.scalar_type(), {}, /*fast=*/false);
}

void refuse_second_derivative() {
  require(!at::GradMode::is_enabled(),
          "layers of pacer::modules that fuse or compute in 8-bit floats have no second derivative; use "
          "torch::nn::Linear and torch::nn::LayerNorm, or leave the forward pass outside of Fp8Scope and "
          "Precision::fp8");
}

}  // namespace pacer::detail
