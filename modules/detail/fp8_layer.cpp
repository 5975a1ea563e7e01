#include <pacer/modules/detail/fp8_layer.h>

#include <limits>

#include <ATen/ops/linalg_vector_norm.h>

namespace pacer::detail {

Fp8Matrix Fp8Layer::cast_weight(const at::Tensor& weight) {
  const auto version = static_cast<uint32_t>(weight._version());
  if (weight_ && weight_->version == version && weight_->memory == weight.const_data_ptr()) {
    return weight_->matrix;
  }
  Fp8Extras extras;
  extras.transposed = true;
  const Fp8Matrix matrix = tensors_->cast(weight, {kernels::Fp8Format::e4m3, std::nullopt}, extras);
  if (keeps_weight_) weight_ = KeptWeight{matrix, version, weight.const_data_ptr()};
  return matrix;
}

Fp8Matrix Fp8Layer::cast_weight(const modules::Nf4Weight& weight, bool transposed) {
  const at::Tensor values = weight->decode(weight->dtype);
  const auto version = static_cast<uint32_t>(weight->codes._version());
  const void* memory = weight->codes.const_data_ptr();
  const bool is_known = measured_ && measured_->weight.lock() == weight.ptr() &&
                        measured_->dtype == weight->dtype && measured_->version == version &&
                        measured_->memory == memory;
  if (!is_known) {
    const at::Tensor amax = at::linalg_vector_norm(values, std::numeric_limits<double>::infinity());
    measured_ = Measured{amax.to(at::kFloat), weight.ptr(), weight->dtype, version, memory};
  }
  Fp8Tensors::Role role{kernels::Fp8Format::e4m3, std::nullopt};
  role.amax = measured_->amax;
  Fp8Extras extras;
  extras.transposed = transposed;
  return tensors_->cast(values, role, extras);
}

}  // namespace pacer::detail
