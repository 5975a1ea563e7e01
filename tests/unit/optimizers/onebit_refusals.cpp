// What all 1-bit optimizers refuse, in one sentence and without having changed anything; and what they take.
#include <limits>

#include <torch/serialize/archive.h>

#include "support/catch.h"
#include "support/heard_warnings.h"

#include "support/kernels/lamb.h"
#include "support/optimizers/onebit_adam_ranks.h"
#include "support/optimizers/onebit_lamb_ranks.h"
#include "support/optimizers/onebit_refusals.h"

namespace pacer::testing::onebit_refusals {

TEMPLATE_TEST_CASE("options that say nothing, too much or nonsense are refused",
                   "[onebit_adam][onebit_lamb][refusals]", OneBitAdam, OneBitLamb) {
  using O = OptionsOf<TestType>;
  const std::string name = Family<TestType>::kName;
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const auto plain = O(0.01);
  const auto with = [&](const auto& set) {
    O options = frozen_at_two<TestType>();
    set(options);
    return options;
  };
  const std::vector<std::pair<O, std::vector<std::string>>> cases = {
      {plain, {"either freeze_step", "or freeze_automatically"}},
      {with([](O& o) { o.freeze_automatically(100); }), {"either freeze_step", "or freeze_automatically"}},
      {O(plain).freeze_step(0), {"freeze_step must be at least 1", "not 0"}},
      {O(plain).freeze_step(-3), {"freeze_step must be at least 1", "not -3"}},
      {O(plain).freeze_automatically(3), {"at least 4 planned steps", "not 3"}},
      {with([](O& o) { o.variance_floor(-0.1); }), {name, "variance_floor", "-0.1"}},
      {with([](O& o) { o.variance_floor(1.5); }), {name, "variance_floor", "1.5"}},
      {with([&](O& o) { o.variance_floor(nan); }), {name, "variance_floor", "nan"}},
      {with([](O& o) { o.master_weights(MasterWeights::none); }), {name, "master_weights at automatic"}},
      {with([](O& o) { o.lr(-1); }), {name, "-1"}},
      {with([](O& o) {
         o.betas({0.9, 1.0});
       }),
       {name, "1"}},
      {with([](O& o) { o.eps(-1e-8); }), {name, "-1e-08"}},
      {with([](O& o) { o.weight_decay(-1); }), {name, "-1"}},
  };
  for (const auto& [options, parts] : cases) {
    CHECK(unless_sentence(refusal_of<TestType>(options), parts) == "");
  }
  CHECK(refusal_of<TestType>(frozen_at_two<TestType>()) == "<no exception>");
  CHECK(refusal_of<TestType>(O(plain).freeze_automatically(4)) == "<no exception>");
}

TEMPLATE_TEST_CASE("what is said of the whole run must be the same in all groups",
                   "[onebit_adam][onebit_lamb][refusals]", OneBitAdam, OneBitLamb) {
  using O = OptionsOf<TestType>;
  const auto base = frozen_at_two<TestType>();
  const std::vector<O> others = {O(base).freeze_step(3),
                                 O(base).freeze_step(std::nullopt).freeze_automatically(50),
                                 O(base).allow_early_freeze(true),
                                 O(base).variance_floor(0.02),
                                 O(base).scale(ScaleNorm::l1),
                                 O(base).block_scales(!base.block_scales()),
                                 O(base).compress_alone(true),
                                 O(base).hierarchical(true),
                                 O(base).one_bit(false)};
  for (const O& other : others) {
    CHECK(unless_groups_must_agree<TestType>(base, other) == "");
  }
  const O own = O(base)
                    .lr(1)
                    .betas({0.5, 0.6})
                    .eps(1)
                    .weight_decay(0)
                    .bias_correction(!base.bias_correction())
                    .compress(false);
  CHECK(refusal([&] { OneBitRanks<TestType>(1, {{{{4}}, base}, {{{3}}, own}}); }) == "<no exception>");
}

TEMPLATE_TEST_CASE("parameters and groups that cannot be compressed are refused",
                   "[onebit_adam][onebit_lamb][refusals]", OneBitAdam, OneBitLamb) {
  const std::string name = Family<TestType>::kName;
  const auto base = frozen_at_two<TestType>();
  CHECK(unless_sentence(refusal_of<TestType>(base, at::kDouble),
                        {name, "parameter 0 of group 0 (shape [", "named_parameters() to see names) is fp64",
                         "compress(false)"}) == "");
  CHECK(refusal_of<TestType>(OptionsOf<TestType>(base).compress(false), at::kDouble) == "<no exception>");
  const Tensor gaps = at::ones({8, 8}).narrow(1, 0, 4).requires_grad_();
  CHECK(unless_sentence(refusal([&] { TestType({gaps}, base); }),
                        {name, "parameter 0 of group 0 (shape [8, 4]; ", ") has gaps", "compress(false)"}) ==
        "");

  const auto with_options = [&](std::unique_ptr<torch::optim::OptimizerOptions> options) {
    return refusal([&] {
      std::vector<torch::optim::OptimizerParamGroup> groups;
      groups.emplace_back(std::vector<Tensor>{at::ones({4}).requires_grad_()}, std::move(options));
      TestType(groups, base);
    });
  };
  CHECK(unless_sentence(with_options(std::make_unique<FusedAdamWOptions>(0.1)),
                        {"group 0", "use " + name + "Options"}) == "");
}

TEMPLATE_TEST_CASE("fp64 parameters train beside compressed ones", "[onebit_adam][onebit_lamb]", OneBitAdam,
                   OneBitLamb) {
  using Options = OptionsOf<TestType>;
  using Peer = PeerOf<TestType>;
  const Tensor single = at::ones({300}).requires_grad_(), fine = at::ones({9}, at::kDouble).requires_grad_();
  std::vector<torch::optim::OptimizerParamGroup> groups;
  const Options options = frozen_at_two<TestType>().compress_alone(true);
  groups.emplace_back(std::vector<Tensor>{single}, std::make_unique<Options>(options));
  groups.emplace_back(std::vector<Tensor>{fine}, std::make_unique<Options>(Options(options).compress(false)));
  TestType optimizer(groups, options);
  const Tensor twin = fine.detach().clone().requires_grad_();
  Peer peer(
      {twin},
      OptionsOf<Peer>(0.01).weight_decay(options.weight_decay()).bias_correction(options.bias_correction()));
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

TEMPLATE_TEST_CASE("a group can be added before the freeze and not after it",
                   "[onebit_adam][onebit_lamb][refusals]", OneBitAdam, OneBitLamb) {
  OneBitRanks<TestType> ranks(2, small_groups(frozen_at_two<TestType>()));
  take_steps(ranks, 0, 1);
  std::vector<Tensor> added;
  for (auto& optimizer : ranks.optimizers) {
    added.push_back(at::ones({40}).requires_grad_());
    optimizer->add_param_group(torch::optim::OptimizerParamGroup({added.back()}));
  }
  for (int64_t t = 1; t < 5; ++t) {
    for (size_t rank = 0; rank < 2; ++rank) {
      added[rank].mutable_grad() = onebit_gradient(added[rank], rank, static_cast<uint64_t>(t), 9);
    }
    take_steps(ranks, t, t + 1);
    REQUIRE(same_bits(added[0], added[1]));
  }
  CHECK(ranks.optimizers[1]->export_rank_state().count("2.0/worker_error") == 1);
  const Tensor late = at::ones({3}).requires_grad_();
  CHECK(unless_refused_whole(
            ranks, 0, {Family<TestType>::kName, "cannot be added after the variance froze", "step 2"},
            [&] { ranks.optimizers[0]->add_param_group(torch::optim::OptimizerParamGroup({late})); }) == "");
  NamedParameters named;
  named.insert("late", late);
  CHECK(unless_refused_whole(ranks, 1, {"cannot be added after the variance froze"},
                             [&] { ranks.optimizers[1]->add_param_group(NamedParamGroup(named)); }) == "");
  CHECK(ranks.optimizers[0]->param_groups().size() == 3);
}

TEMPLATE_TEST_CASE("archives of one file are refused", "[onebit_adam][onebit_lamb][refusals]", OneBitAdam,
                   OneBitLamb) {
  OneBitRanks<TestType> ranks(1, small_groups(frozen_at_two<TestType>()));
  take_steps(ranks, 0, 4);
  torch::serialize::OutputArchive out;
  torch::serialize::InputArchive in;
  CHECK(unless_refused_whole(ranks, 0, {Family<TestType>::kName, "cannot be saved", "Checkpoints"},
                             [&] { ranks.optimizers[0]->save(out); }) == "");
  CHECK(unless_refused_whole(ranks, 0, {Family<TestType>::kName, "cannot be loaded", "import_states"},
                             [&] { ranks.optimizers[0]->load(in); }) == "");
}

TEMPLATE_TEST_CASE("a parameter that changes its dtype or shape after the freeze is refused",
                   "[onebit_adam][onebit_lamb][refusals]", OneBitAdam, OneBitLamb) {
  for (const bool by_dtype : {true, false}) {
    OneBitRanks<TestType> ranks(1, small_groups(frozen_at_two<TestType>().compress_alone(true)));
    take_steps(ranks, 0, 4);
    Tensor& p = ranks.parameters[0][1];
    const Tensor before = p.detach().clone();
    p.mutable_grad() = Tensor();
    p.set_data(by_dtype ? before.to(at::kBFloat16) : before.narrow(0, 0, 5).clone());
    p.mutable_grad() = at::ones_like(p).detach();
    CHECK(unless_refused_whole(
              ranks, 0, {"parameter 1 of group 0 (shape [", "after the variance froze", "load a checkpoint"},
              [&] { ranks.optimizers[0]->step(); }) == "");
    p.mutable_grad() = Tensor();
    p.set_data(before);
    take_steps(ranks, 4, 6);
  }
}

TEMPLATE_TEST_CASE("a group cannot begin or cease to be compressed after the freeze",
                   "[onebit_adam][onebit_lamb][refusals]", OneBitAdam, OneBitLamb) {
  for (const size_t group : {0u, 1u}) {
    OneBitRanks<TestType> ranks(1, small_groups(frozen_at_two<TestType>().compress_alone(true)));
    take_steps(ranks, 0, 4);
    auto& options = static_cast<OptionsOf<TestType>&>(ranks.optimizers[0]->param_groups()[group].options());
    options.compress(!options.compress());
    const auto values = clones(ranks.parameters[0]);
    ranks.set(ranks.gradients(4));
    CAPTURE(group);
    CHECK(unless_refused_whole(ranks, 0, {Family<TestType>::kName}, [&] { ranks.optimizers[0]->step(); }) ==
          "");
    CHECK(same_bits(values, ranks.parameters[0]));
  }
}

}  // namespace pacer::testing::onebit_refusals
