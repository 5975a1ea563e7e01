// What only OneBitAdam refuses.
#include "support/catch.h"

#include "support/optimizers/onebit_adam_ranks.h"
#include "support/optimizers/onebit_refusals.h"

namespace pacer::testing::onebit_adam_refusals {

TEST_CASE("a refresh that makes no sense, or is not of the whole run, is refused",
          "[onebit_adam][refusals]") {
  const auto base = frozen_at_two<OneBitAdam>();
  const auto backwards = OneBitAdamOptions(base).refresh_variance_every(-1);
  CHECK(unless_sentence(refusal_of<OneBitAdam>(backwards), {"OneBitAdam", "refresh_variance_every", "-1"}) ==
        "");
  CHECK(unless_groups_must_agree<OneBitAdam>(base, OneBitAdamOptions(base).refresh_variance_every(5)) == "");
}

TEST_CASE("options of Adam with L2 are refused by name", "[onebit_adam][refusals]") {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::vector<Tensor>{at::ones({4}).requires_grad_()},
                      std::make_unique<FusedAdamOptions>(0.1));
  CHECK(unless_sentence(refusal([&] { OneBitAdam(groups, frozen_at_two<OneBitAdam>()); }),
                        {"L2", "OneBitAdamOptions"}) == "");
}

}  // namespace pacer::testing::onebit_adam_refusals
