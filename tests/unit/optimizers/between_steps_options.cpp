// What users did to options between two steps, and what it must come to. Each case corrupted weights or
// options without a word before its fix.
#include "support/catch.h"

#include <pacer/optimizers/fused_lamb.h>

#include "support/checkpoints/archives.h"
#include "support/optimizers/between_steps.h"

namespace pacer::testing::between_steps {

#ifndef __SANITIZE_ADDRESS__
namespace {

// What LibTorch's users write. It is not defined by the language, and works because fields lie where they are
// expected.
void set_through_cast(torch::optim::OptimizerOptions& options) {
  static_cast<torch::optim::AdamWOptions&>(options)
      .lr(0.5)
      .betas({0.25, 0.75})
      .eps(0.125)
      .weight_decay(0.0625);
}
void set_amsgrad_through_cast(torch::optim::OptimizerOptions& options) {
  static_cast<torch::optim::AdamWOptions&>(options).amsgrad(true);
}

}  // namespace
#endif

TEMPLATE_TEST_CASE("without a Session options that differ between ranks are named, in every step",
                   "[lifecycle]", OneBitAdam, OneBitLamb) {
  OneBitRanks<TestType> ranks(2, {{{{40}}, OptionsOf<TestType>(0.01).freeze_step(2)}});
  const auto messages = [&](int64_t t) {
    ranks.set(ranks.gradients(t));
    return run_ranks(2, [&](int rank) { ranks.optimizers[static_cast<size_t>(rank)]->step(); });
  };
  CHECK(messages(0) == std::vector<std::string>{"", ""});
  static_cast<OptionsOf<TestType>&>(ranks.optimizers[1]->param_groups()[0].options()).freeze_step(3);
  for (int64_t t = 1; t < 3; ++t) {
    for (const std::string& message : messages(t)) CHECK(contains(message, "freeze_step"));
  }
  static_cast<OptionsOf<TestType>&>(ranks.optimizers[1]->param_groups()[0].options()).freeze_step(2).lr(0.02);
  static_cast<OptionsOf<TestType>&>(ranks.optimizers[0]->param_groups()[0].options()).lr(0.02);
  CHECK(messages(3) == std::vector<std::string>{"", ""});
}

TEST_CASE("what torch's optimizers do not have keeps its value in take_over and in loads of their files",
          "[lifecycle]") {
  const auto parameters = leaves({torch::randn({6}), torch::randn({4})});
  torch::optim::AdamW theirs(parameters, torch::optim::AdamWOptions(0.5).weight_decay(0.25));
  set_gradients(parameters, 0, 1);
  theirs.step();
  const auto options =
      FusedAdamWOptions(0.01).finite_check(true).seed(77).bias_correction(false).initial_lr(0.3);
  const auto bf16 =
      FusedAdamWOptions(options).master_weights(MasterWeights::none).rounding(Rounding::stochastic);
  FusedAdamW taking(parameters, bf16), loading(parameters, bf16);
  taking.take_over(theirs);
  load_from(loading, saved(theirs));
  for (FusedAdamW* optimizer : {&taking, &loading}) {
    const FusedAdamWOptions& now = options_of(*optimizer);
    CHECK((now.lr() == 0.5 && now.weight_decay() == 0.25));
    CHECK((now.finite_check() && now.seed() == 77 && !now.bias_correction() && now.initial_lr() == 0.3));
    CHECK((now.master_weights() == MasterWeights::none && now.rounding() == Rounding::stochastic));
    CHECK(state_of(*optimizer, parameters[0]).step() == 1);
  }
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(parameters, std::make_unique<torch::optim::AdamWOptions>(0.5));
  FusedAdamW with_their_group(groups, bf16);
  CHECK((options_of(with_their_group).seed() == 77 && options_of(with_their_group).lr() == 0.5));
}

#ifndef __SANITIZE_ADDRESS__  // its companion for undefined behaviour stops at what this case is about
TEST_CASE("LibTorch's cast of options sets the fields that it names", "[lifecycle]") {
  const auto check = [](auto options) {
    using Options = decltype(options);
    set_through_cast(options);
    CHECK((options.lr() == 0.5 && options.betas() == typename Options::betas_t(0.25, 0.75)));
    CHECK((options.eps() == 0.125 && options.weight_decay() == 0.0625));
    Options expected = Options(0.5).betas({0.25, 0.75}).eps(0.125).weight_decay(0.0625);
    CHECK(options == expected);
    set_amsgrad_through_cast(options);
    if constexpr (std::is_same_v<Options, FusedAdamOptions> || std::is_same_v<Options, FusedAdamWOptions>) {
      CHECK(options == expected.amsgrad(true));
    } else {
      CHECK(options.wants_amsgrad());  // and refused in the next step
    }
  };
  check(FusedAdamOptions());
  check(FusedAdamWOptions());
  check(FusedLambOptions());
  check(OneBitAdamOptions());
  check(OneBitLambOptions());
  const auto parameters = leaves({torch::ones({3})});
  FusedLamb lamb(parameters);
  set_amsgrad_through_cast(lamb.param_groups()[0].options());
  CHECK(contains(refusal([&] { lamb.step(); }), "amsgrad"));
}
#endif

}  // namespace pacer::testing::between_steps
