#include <pacer/modules/kept_operators.h>

#include <pacer/modules/detail/operator_list.h>

namespace pacer {

KeptOperators::KeptOperators(std::initializer_list<std::string> names)
    : KeptOperators(std::vector<std::string>(names)) {}
KeptOperators::KeptOperators(const std::vector<std::string>& names)
    : list_(detail::checked_operators(names)) {}

KeptOperators KeptOperators::attention() {
  return {"aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_efficient_attention",
          "aten::_scaled_dot_product_cudnn_attention", "aten::_scaled_dot_product_flash_attention_for_cpu"};
}

KeptOperators KeptOperators::products() { return {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"}; }

std::vector<std::string> KeptOperators::names() const {
  return list_ ? list_->names : std::vector<std::string>();
}

}  // namespace pacer
