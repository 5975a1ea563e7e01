#include <pacer/modules/rms_norm.h>

#include <ATen/ops/ones.h>

#include <pacer/core/error.h>
#include <pacer/modules/detail/fused_call.h>
#include <pacer/modules/detail/norm_rows.h>

namespace pacer::modules {

RmsNormImpl::RmsNormImpl(const RmsNormOptions& norm_options) : options(norm_options) {
  require(options.features() > 0, "RmsNorm needs a number of features above 0, not ", options.features());
  RmsNormImpl::reset();
}

void RmsNormImpl::reset() {
  const bool is_frozen = weight.defined() && !weight.requires_grad();  // so is a clone
  weight = register_parameter("weight", at::ones({options.features()}), !is_frozen);
}

void RmsNormImpl::pretty_print(std::ostream& stream) const {
  stream << "pacer::modules::RmsNorm(features=" << options.features() << ", eps=" << options.eps() << ")";
}

at::Tensor RmsNormImpl::forward(const at::Tensor& x) {
  const detail::FusedCall call("RmsNorm", x, options.features(), {}, is_training());
  return detail::norm_rows(call, call.inputs_of(*this)).view(x.sizes());
}

}  // namespace pacer::modules
