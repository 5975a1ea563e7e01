// What only OneBitAdam refuses, and fp64 parameters beside those it compresses.
#include "support/catch.h"

#include "support/onebit_adam_ranks.h"
#include "support/onebit_refusals.h"

namespace pacer::testing::onebit_adam_refusals {

TEST_CASE("a refresh that makes no sense, or is not of the whole run, is refused",
          "[onebit_adam][refusals]") {
  const auto base = frozen_at_two<OneBitAdam>();
  const auto backwards = OneBitAdamOptions(base).refresh_variance_every(-1);
  CHECK(unless_sentence(refusal([&] { OneBitAdam({at::ones({4}).requires_grad_()}, backwards); }),
                        {"OneBitAdam", "refresh_variance_every", "-1"}) == "");
  CHECK(unless_groups_must_agree<OneBitAdam>(base, OneBitAdamOptions(base).refresh_variance_every(5)) == "");
}

TEST_CASE("options of Adam with L2 are refused by name", "[onebit_adam][refusals]") {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::vector<Tensor>{at::ones({4}).requires_grad_()},
                      std::make_unique<FusedAdamOptions>(0.1));
  CHECK(unless_sentence(refusal([&] { OneBitAdam(groups, frozen_at_two<OneBitAdam>()); }),
                        {"L2", "OneBitAdamOptions"}) == "");
}

TEST_CASE("fp64 parameters train beside compressed ones", "[onebit_adam]") {
  const Tensor single = at::ones({300}).requires_grad_(), fine = at::ones({9}, at::kDouble).requires_grad_();
  std::vector<torch::optim::OptimizerParamGroup> groups;
  const auto options = frozen_at_two<OneBitAdam>().compress_alone(true);
  groups.emplace_back(std::vector<Tensor>{single}, std::make_unique<OneBitAdamOptions>(options));
  groups.emplace_back(std::vector<Tensor>{fine},
                      std::make_unique<OneBitAdamOptions>(OneBitAdamOptions(options).compress(false)));
  OneBitAdam optimizer(groups, options);
  const Tensor twin = fine.detach().clone().requires_grad_();
  FusedAdamW peer({twin}, FusedAdamWOptions(0.01).weight_decay(options.weight_decay()));
  std::string said;
  HeardWarnings ear(said);
  const c10::WarningUtils::WarningHandlerGuard guard(&ear);
  for (uint64_t t = 0; t < 6; ++t) {
    single.mutable_grad() = onebit_gradient(single, 0, t, 0);
    fine.mutable_grad() = onebit_gradient(fine, 0, t, 1);
    twin.mutable_grad() = fine.grad().clone();
    optimizer.step();
    peer.step();
    REQUIRE(same_bits(fine, twin));
  }
}

}  // namespace pacer::testing::onebit_adam_refusals
