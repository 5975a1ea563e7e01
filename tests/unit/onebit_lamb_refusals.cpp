// What OneBitLamb refuses, in one sentence and without having changed anything.
#include <limits>

#include <torch/serialize/archive.h>

#include "support/catch.h"

#include "support/onebit_lamb_refusals.h"

namespace pacer::testing::onebit_lamb_refusals {
namespace {

std::string refusal_of(const OneBitLambOptions& options, at::ScalarType dtype = at::kFloat) {
  return refusal([&] { OneBitLamb({at::ones({4}, dtype).requires_grad_()}, options); });
}

}  // namespace

TEST_CASE("options of 1-bit LAMB that say nothing, too much or nonsense are refused",
          "[onebit_lamb][refusals]") {
  using O = OneBitLambOptions;
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const auto plain = O(0.01);
  const auto with = [&](const auto& set) {
    O options = lamb_frozen_at_two();
    set(options);
    return options;
  };
  const std::vector<std::pair<O, std::vector<std::string>>> cases = {
      {plain, {"either freeze_step", "or freeze_automatically"}},
      {O(lamb_frozen_at_two()).freeze_automatically(100), {"either freeze_step", "or freeze_automatically"}},
      {O(plain).freeze_step(0), {"freeze_step must be at least 1", "not 0"}},
      {O(plain).freeze_step(-3), {"freeze_step must be at least 1", "not -3"}},
      {O(plain).freeze_automatically(3), {"at least 4 planned steps", "not 3"}},
      {with([](O& o) { o.variance_floor(-0.1); }), {"OneBitLamb", "variance_floor", "-0.1"}},
      {with([](O& o) { o.variance_floor(1.5); }), {"OneBitLamb", "variance_floor", "1.5"}},
      {with([&](O& o) { o.variance_floor(nan); }), {"OneBitLamb", "variance_floor", "nan"}},
      {with([](O& o) { o.master_weights(MasterWeights::none); }),
       {"OneBitLamb", "master_weights at automatic"}},
      {with([](O& o) { o.lr(-1); }), {"OneBitLamb", "-1"}},
      {with([](O& o) {
         o.betas({0.9, 1.0});
       }),
       {"OneBitLamb", "1"}},
      {with([](O& o) { o.eps(-1e-8); }), {"OneBitLamb", "-1e-08"}},
      {with([](O& o) { o.weight_decay(-1); }), {"OneBitLamb", "-1"}},
      {with([](O& o) { o.min_coeff(-1); }), {"OneBitLamb", "min_coeff", "-1"}},
      {with([](O& o) { o.min_coeff(0.5).max_coeff(0.25); }), {"OneBitLamb", "max_coeff", "0.25"}},
      {with([&](O& o) { o.max_coeff(nan); }), {"OneBitLamb", "max_coeff", "nan"}},
      {with([](O& o) { o.coeff_beta(-0.1); }), {"OneBitLamb", "coeff_beta", "-0.1"}},
      {with([](O& o) { o.coeff_beta(1.0); }), {"OneBitLamb", "coeff_beta", "1"}},
      {with([&](O& o) { o.coeff_beta(nan); }), {"OneBitLamb", "coeff_beta", "nan"}},
      {with([](O& o) { o.factor_min(3).factor_max(2); }), {"OneBitLamb", "factor_min", "3", "2"}},
      {with([](O& o) { o.factor_min(-0.5); }), {"OneBitLamb", "factor_min", "-0.5"}},
      {with([](O& o) { o.factor_min(0); }), {"OneBitLamb", "factor_min", "0"}},
      {with([&](O& o) { o.factor_min(nan); }), {"OneBitLamb", "factor_min", "nan"}},
      {with([&](O& o) { o.factor_max(nan); }), {"OneBitLamb", "factor_max", "nan"}},
      {with([](O& o) { o.factor_threshold(-0.1); }), {"OneBitLamb", "factor_threshold", "-0.1"}},
      {with([](O& o) { o.factor_threshold(1.0); }), {"OneBitLamb", "factor_threshold", "1"}},
      {with([&](O& o) { o.factor_threshold(nan); }), {"OneBitLamb", "factor_threshold", "nan"}},
  };
  for (const auto& [options, parts] : cases) CHECK(unless_sentence(refusal_of(options), parts) == "");
  CHECK(refusal_of(lamb_frozen_at_two()) == "<no exception>");
  CHECK(refusal_of(O(plain).freeze_automatically(4)) == "<no exception>");
  const auto edges = with([](O& o) {
    o.min_coeff(0).max_coeff(0).coeff_beta(0).factor_min(1).factor_max(1).factor_threshold(0);
  });
  CHECK(refusal_of(edges) == "<no exception>");
}

TEST_CASE("what is said of a whole run of 1-bit LAMB must be the same in all groups",
          "[onebit_lamb][refusals]") {
  using O = OneBitLambOptions;
  const auto base = lamb_frozen_at_two();
  const std::vector<O> others = {O(base).freeze_step(3),
                                 O(base).freeze_step(std::nullopt).freeze_automatically(50),
                                 O(base).allow_early_freeze(true),
                                 O(base).variance_floor(0.02),
                                 O(base).scale(kernels::ScaleNorm::l1),
                                 O(base).block_scales(true),
                                 O(base).compress_alone(true),
                                 O(base).hierarchical(true),
                                 O(base).one_bit(false)};
  for (const O& other : others) {
    const auto groups = std::vector<OneBitLambGroup>{{{{4}}, base}, {{{3}}, other}};
    CHECK(unless_sentence(refusal([&] { OneBitLambRanks(1, groups); }),
                          {"OneBitLamb", "group 1 and group 0 differ"}) == "");
    // A group that comes later is no different.
    OneBitLambRanks ranks(1, {{{{4}}, base}});
    torch::optim::OptimizerParamGroup late({at::ones({2}).requires_grad_()}, std::make_unique<O>(other));
    CHECK(unless_refused_whole(ranks, 0, {"group 1 and group 0 differ"},
                               [&] { ranks.optimizers[0]->add_param_group(late); }) == "");
    CHECK(ranks.optimizers[0]->param_groups().size() == 1);
  }
  auto own = O(base).lr(1).betas({0.5, 0.6}).eps(1).weight_decay(0).bias_correction(true).compress(false);
  own.min_coeff(1).max_coeff(2).coeff_beta(0.5).factor_min(0.1).factor_max(9).factor_threshold(0.2);
  own.adapt(false);
  CHECK(refusal([&] { OneBitLambRanks(1, {{{{4}}, base}, {{{3}}, own}}); }) == "<no exception>");
}

TEST_CASE("parameters and groups that 1-bit LAMB cannot compress are refused", "[onebit_lamb][refusals]") {
  CHECK(unless_sentence(refusal_of(lamb_frozen_at_two(), at::kDouble),
                        {"OneBitLamb", "parameter 0.0 is fp64", "compress(false)"}) == "");
  CHECK(refusal_of(lamb_frozen_at_two().compress(false), at::kDouble) == "<no exception>");
  const Tensor gaps = at::ones({8, 8}).narrow(1, 0, 4).requires_grad_();
  CHECK(unless_sentence(refusal([&] { OneBitLamb({gaps}, lamb_frozen_at_two()); }),
                        {"OneBitLamb", "0.0 has gaps", "compress(false)"}) == "");

  const auto with_options = [](std::unique_ptr<torch::optim::OptimizerOptions> options) {
    return refusal([&] {
      std::vector<torch::optim::OptimizerParamGroup> groups;
      groups.emplace_back(std::vector<Tensor>{at::ones({4}).requires_grad_()}, std::move(options));
      OneBitLamb(groups, lamb_frozen_at_two());
    });
  };
  CHECK(unless_sentence(with_options(std::make_unique<FusedAdamWOptions>(0.1)),
                        {"group 0", "use OneBitLambOptions"}) == "");
}

TEST_CASE("fp64 parameters train beside those that 1-bit LAMB compresses", "[onebit_lamb]") {
  const Tensor single = at::ones({300}).requires_grad_(), fine = at::ones({9}, at::kDouble).requires_grad_();
  std::vector<torch::optim::OptimizerParamGroup> groups;
  const auto options = lamb_frozen_at_two().compress_alone(true);
  groups.emplace_back(std::vector<Tensor>{single}, std::make_unique<OneBitLambOptions>(options));
  groups.emplace_back(std::vector<Tensor>{fine},
                      std::make_unique<OneBitLambOptions>(OneBitLambOptions(options).compress(false)));
  OneBitLamb optimizer(groups, options);
  const Tensor twin = fine.detach().clone().requires_grad_();
  FusedLamb peer({twin}, FusedLambOptions(0.01).weight_decay(options.weight_decay()).bias_correction(false));
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

TEST_CASE("1-bit LAMB takes a group before the freeze and not after it", "[onebit_lamb][refusals]") {
  OneBitLambRanks ranks(2, small_lamb_groups(lamb_frozen_at_two()));
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
            ranks, 0, {"OneBitLamb", "cannot be added after the variance froze", "step 2"},
            [&] { ranks.optimizers[0]->add_param_group(torch::optim::OptimizerParamGroup({late})); }) == "");
  NamedParameters named;
  named.insert("late", late);
  CHECK(unless_refused_whole(ranks, 1, {"cannot be added after the variance froze"},
                             [&] { ranks.optimizers[1]->add_param_group(NamedParamGroup(named)); }) == "");
  CHECK(ranks.optimizers[0]->param_groups().size() == 3);
}

TEST_CASE("archives of one file are refused by 1-bit LAMB", "[onebit_lamb][refusals]") {
  OneBitLambRanks ranks(1, small_lamb_groups(lamb_frozen_at_two()));
  take_steps(ranks, 0, 4);
  torch::serialize::OutputArchive out;
  torch::serialize::InputArchive in;
  CHECK(unless_refused_whole(ranks, 0, {"OneBitLamb cannot be saved", "Checkpoints"},
                             [&] { ranks.optimizers[0]->save(out); }) == "");
  CHECK(unless_refused_whole(ranks, 0, {"OneBitLamb cannot be loaded", "import_states"},
                             [&] { ranks.optimizers[0]->load(in); }) == "");
}

TEST_CASE("1-bit LAMB refuses a parameter that changes its dtype or shape after the freeze",
          "[onebit_lamb][refusals]") {
  for (const bool by_dtype : {true, false}) {
    OneBitLambRanks ranks(1, small_lamb_groups(lamb_frozen_at_two().compress_alone(true)));
    take_steps(ranks, 0, 4);
    Tensor& p = ranks.parameters[0][1];
    const Tensor before = p.detach().clone();
    p.mutable_grad() = Tensor();
    p.set_data(by_dtype ? before.to(at::kBFloat16) : before.narrow(0, 0, 5).clone());
    p.mutable_grad() = at::ones_like(p).detach();
    CHECK(unless_refused_whole(ranks, 0, {"parameter 0.1", "after the freeze", "load a checkpoint"},
                               [&] { ranks.optimizers[0]->step(); }) == "");
    p.mutable_grad() = Tensor();
    p.set_data(before);
    take_steps(ranks, 4, 6);
  }
}

TEST_CASE("what 1-bit LAMB compresses, and how, cannot change after the freeze", "[onebit_lamb][refusals]") {
  for (const size_t group : {0u, 1u}) {
    OneBitLambRanks ranks(1, small_lamb_groups(lamb_frozen_at_two().compress_alone(true)));
    take_steps(ranks, 0, 4);
    auto& options = static_cast<OneBitLambOptions&>(ranks.optimizers[0]->param_groups()[group].options());
    options.compress(!options.compress());
    ranks.set(ranks.gradients(4));
    CAPTURE(group);
    CHECK(unless_refused_whole(ranks, 0, {"OneBitLamb"}, [&] { ranks.optimizers[0]->step(); }) == "");
  }
}

TEST_CASE("1-bit LAMB says which parameters it knows", "[onebit_lamb][refusals]") {
  OneBitLambRanks ranks(1, small_lamb_groups(lamb_frozen_at_two()));
  const Tensor stranger = at::ones({3});
  const OneBitLamb& optimizer = *ranks.optimizers[0];
  CHECK(unless_sentence(refusal([&] { optimizer.coefficient(stranger); }), {}) == "");
  CHECK(unless_sentence(refusal([&] { optimizer.factor(stranger); }), {}) == "");
  CHECK(unless_sentence(refusal([&] { optimizer.momentum_scale(stranger); }), {}) == "");
}

}  // namespace pacer::testing::onebit_lamb_refusals
