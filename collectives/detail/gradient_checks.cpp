#include <pacer/collectives/detail/gradient_checks.h>

#include <algorithm>

#include <pacer/core/error.h>

namespace pacer::detail {

void check_reducible(const std::string& name, const at::Tensor& parameter, const Communicator& world) {
  require(parameter.defined(), "parameter ", name, " is undefined");
  if (!parameter.requires_grad()) return;
  require(parameter.device() == world.device(), "parameter ", name, " is on ", parameter.device().str(),
          ", but ", world.backend_name(), " joins the ranks on ", world.device().str(),
          "; move the model there first");
}

void check_dense(const std::string& name, const at::Tensor& gradient) {
  require(gradient.layout() == at::kStrided, "the gradient of parameter ", name,
          " is sparse; only dense gradients can be reduced over ranks");
}

void require_all_reached(const std::vector<std::string>& missed, size_t count) {
  constexpr size_t kNamesShown = 5;
  std::string names;
  for (size_t i = 0; i < std::min(missed.size(), kNamesShown); ++i) {
    names += (names.empty() ? "" : ", ") + missed[i];
  }
  require(
      missed.empty(), "backward reached ", missed.size(), " of ", count, " parameters not at all: ", names,
      missed.size() > kNamesShown ? ", ..." : "",
      "; use them, freeze them with requires_grad_(false), or where that is meant set unused_is_zero(true)");
}

}  // namespace pacer::detail
