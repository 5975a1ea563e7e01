#include <pacer/optimizers/lamb_options.h>

#include <torch/serialize/archive.h>

#include <pacer/optimizers/detail/option_archive.h>

namespace pacer {

void FusedLambOptions::serialize(torch::serialize::InputArchive& archive) {
  detail::read_rule_options(*this, archive);
  min_coeff(detail::read_option(archive, "min_coeff").toDouble());
  max_coeff(detail::read_option(archive, "max_coeff").toDouble());
  adapt(detail::read_option(archive, "adapt").toBool());
  detail::read_own_options(*this, archive);
}

void FusedLambOptions::serialize(torch::serialize::OutputArchive& archive) const {
  detail::write_rule_options(*this, archive);
  archive.write("min_coeff", c10::IValue(min_coeff()));
  archive.write("max_coeff", c10::IValue(max_coeff()));
  archive.write("adapt", c10::IValue(adapt()));
  detail::write_own_options(*this, archive);
}

bool operator==(const FusedLambOptions& left, const FusedLambOptions& right) {
  return detail::same_common_options(left, right) && left.min_coeff() == right.min_coeff() &&
         left.max_coeff() == right.max_coeff() && left.adapt() == right.adapt();
}

}  // namespace pacer
