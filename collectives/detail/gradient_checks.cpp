#include <pacer/collectives/detail/gradient_checks.h>

#include <algorithm>

#include <pacer/collectives/communication_error.h>
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

void require_same_sent(Communicator& ranks, const char* what, int64_t sent) {
  const std::vector<std::string> of_ranks = ranks.exchange(std::to_string(sent));
  for (size_t rank = 1; rank < of_ranks.size(); ++rank) {
    if (of_ranks[rank] == of_ranks[0]) continue;
    const int first = ranks.rank_in_world(0), other = ranks.rank_in_world(static_cast<int>(rank));
    throw CommunicationError(
        concatenate("the ranks dropped a window of gradients at different places (", what, " sent by rank ",
                    first, ": ", of_ranks[0], ", by rank ", other, ": ", of_ranks[rank],
                    "); a rank that cannot go on must leave() the others"),
        "agreement", 0, -1, {other});
  }
}

}  // namespace pacer::detail
