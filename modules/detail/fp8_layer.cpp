#include <pacer/modules/detail/fp8_layer.h>

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

}  // namespace pacer::detail
