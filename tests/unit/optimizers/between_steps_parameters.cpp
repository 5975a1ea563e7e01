// What users did to parameters and gradients between two steps, and what it must come to. Each case corrupted
// weights or state without a word before its fix.
#include "support/catch.h"

#include <algorithm>

#include <pacer/optimizers/fused_lamb.h>

#include "support/checkpoints/archives.h"
#include "support/optimizers/between_steps.h"

namespace pacer::testing::between_steps {

TEMPLATE_TEST_CASE("after the freeze a parameter that needs no gradient stays as it is, on all ranks",
                   "[lifecycle]", OneBitAdam, OneBitLamb) {
  for (const int ranks_in_all : {1, 2}) {
    for (const bool exchanges : {false, true}) {
      CAPTURE(ranks_in_all, exchanges);
      OneBitRanks<TestType> ranks(
          ranks_in_all,
          {{{{40}, {300}, {7}}, alone<TestType>().compress_alone(exchanges).one_bit(exchanges)}});
      const auto step = [&](int64_t t) {
        auto gradients = ranks.gradients(t);
        for (size_t r = 0; r < ranks.size(); ++r) {
          for (size_t i = 0; i < 3; ++i) {
            if (!ranks.parameters[r][i].requires_grad()) gradients[r][i] = Tensor();
          }
        }
        REQUIRE(ranks.step(gradients) == "");
      };
      for (int64_t t = 0; t < 4; ++t) step(t);
      for (auto& of_rank : ranks.parameters) of_rank[1].requires_grad_(false);
      const Tensor before = copy_of(ranks.parameters[0][1]), other = copy_of(ranks.parameters[0][0]);
      for (int64_t t = 4; t < 24; ++t) step(t);
      CHECK(same_bits(ranks.parameters[0][1], before));
      CHECK_FALSE(same_bits(ranks.parameters[0][0], other));
      for (auto& of_rank : ranks.parameters) of_rank[1].requires_grad_(true);
      for (int64_t t = 24; t < 28; ++t) step(t);
      CHECK_FALSE(same_bits(ranks.parameters[0][1], before));
      for (const auto& of_rank : ranks.parameters) CHECK(same_bits(of_rank, ranks.parameters[0]));
    }
  }
}

TEMPLATE_TEST_CASE("a tensor that never had a step takes one of usual size after the freeze", "[lifecycle]",
                   OneBitAdam, OneBitLamb) {
  const auto parameters = leaves({torch::ones({400}), torch::ones({400})});
  auto options = alone<TestType>().bias_correction(true).freeze_step(40).weight_decay(0);
  TestType optimizer(parameters, options);
  parameters[1].requires_grad_(false);
  for (uint64_t t = 0; t < 40; ++t) {
    set_gradients(parameters, 0, t);
    parameters[1].mutable_grad() = Tensor();
    optimizer.step();
  }
  REQUIRE(optimizer.frozen_at() == 40);
  parameters[1].requires_grad_(true);
  const Tensor before = copy_of(parameters[1]);
  set_gradients(parameters, 0, 40);
  optimizer.step();
  const auto& state =
      static_cast<const FusedAdamStateFields&>(*optimizer.state().at(parameters[1].unsafeGetTensorImpl()));
  CHECK(state.step() == 41);
  CHECK(largest_move(parameters[1], before) < 10 * options.lr());
}

TEST_CASE("zeros that somebody writes into a bf16 parameter are zeros", "[lifecycle]") {
  const auto check = [](auto& optimizer, const Tensor& p, int64_t steps_before) {
    for (int64_t t = 0; t < steps_before; ++t)
      set_gradients({p}, 0, static_cast<uint64_t>(t)), optimizer.step();
    for (const int way : {0, 1, 2}) {
      const torch::NoGradGuard no_grad;
      if (way == 0) p.mul_(torch::arange(473).remainder(2).to(p.dtype()));
      if (way == 1) p.zero_();
      if (way == 2) p.data().zero_();
      set_gradients({p}, 0, static_cast<uint64_t>(50 + way));
      optimizer.step();
      CHECK(count_true(p.isnan()) == 0);
      CHECK((way == 0 || p.abs().max().template item<double>() < 0.2));
    }
  };
  torch::manual_seed(4);
  for (const auto master : {MasterWeights::remainder, MasterWeights::remainder_8, MasterWeights::fp32}) {
    const auto make = [] { return torch::randn({473}, at::kDouble).to(at::kBFloat16).requires_grad_(); };
    const Tensor a = make(), b = make(), c = make();
    FusedAdamW adam({a}, FusedAdamWOptions(0.01).master_weights(master));
    FusedLamb lamb({b}, FusedLambOptions(0.01).master_weights(master));
    OneBitAdam onebit({c}, alone<OneBitAdam>().master_weights(master));
    check(adam, a, 3);
    check(lamb, b, 3);
    check(onebit, c, 5);
  }
}

TEST_CASE("two parameters cannot have one name", "[lifecycle]") {
  const auto named = [](const char* name) {
    NamedParameters parameters;
    parameters.insert(name, torch::ones({2}).requires_grad_());
    return NamedParamGroup(parameters);
  };
  const std::vector<std::string> parts = {"\"weight\"", "prefix"};
  const auto is_refused = [&](const std::string& message) {
    return contains(message, parts[0]) && contains(message, parts[1]);
  };
  CHECK(is_refused(refusal([&] { FusedAdamW({named("weight"), named("weight")}); })));
  FusedAdamW optimizer({named("weight"), named("bias")});
  CHECK(is_refused(refusal([&] { optimizer.add_param_group(named("weight")); })));
  CHECK(optimizer.param_groups().size() == 2);
  optimizer.add_param_group(named("other"));
  NamedParameters of_model;
  FusedAdamW half_named({torch::ones({2}).requires_grad_(), torch::ones({2}).requires_grad_()});
  of_model.insert("0.1", half_named.param_groups()[0].params()[0]);
  CHECK(contains(refusal([&] { half_named.name_parameters(of_model); }), "called"));
}

TEMPLATE_TEST_CASE("without a Session ranks stay alike when layers are unfrozen or added in warm-up",
                   "[lifecycle]", OneBitAdam, OneBitLamb) {
  OneBitRanks<TestType> ranks(2, {{{{40}, {300}}, OptionsOf<TestType>(0.01).freeze_step(6)}});
  for (auto& of_rank : ranks.parameters) of_rank[1].requires_grad_(false);
  const auto step = [&](int64_t t) {
    auto gradients = ranks.gradients(t);
    for (size_t r = 0; r < 2; ++r) {
      for (size_t i = 0; i < gradients[r].size(); ++i) {
        if (!ranks.parameters[r][i].requires_grad()) gradients[r][i] = Tensor();
      }
    }
    REQUIRE(ranks.step(gradients) == "");
    REQUIRE(same_bits(ranks.parameters[0], ranks.parameters[1]));
  };
  step(0);
  for (auto& of_rank : ranks.parameters) of_rank[1].requires_grad_(true);
  step(1);
  for (size_t r = 0; r < 2; ++r) {
    ranks.parameters[r].push_back(torch::ones({5}).requires_grad_());
    ranks.optimizers[r]->param_groups()[0].params().push_back(ranks.parameters[r].back());
  }
  for (int64_t t = 2; t < 12; ++t) step(t);
  // On one rank only: an error on both, which names it, and again in the next step.
  ranks.parameters[1][0].requires_grad_(false);
  for (int64_t t = 12; t < 14; ++t) {
    auto gradients = ranks.gradients(t);
    ranks.set(gradients);
    const auto messages =
        run_ranks(2, [&](int rank) { ranks.optimizers[static_cast<size_t>(rank)]->step(); });
    for (const std::string& message : messages) CHECK(contains(message, "frozen"));
  }
}

TEMPLATE_TEST_CASE(
    "a parameter without a gradient on any rank sits the step out, whatever the number of ranks",
    "[lifecycle]", OneBitAdam, OneBitLamb) {
  for (const int world_size : {1, 2, 3}) {
    CAPTURE(world_size);
    const auto options = OptionsOf<TestType>(0.01).weight_decay(0.1).freeze_step(3);
    OneBitRanks<TestType> ranks(
        world_size, {{{{40}, {30}}, options}, {{{9}, {8}}, OptionsOf<TestType>(options).compress(false)}});
    const auto before = clones(ranks.parameters[0]);
    const auto steps_of = [&](size_t i) {
      return ranks.optimizers[0]
          ->export_state()
          .at(ranks.optimizers[0]->parameter_name(ranks.parameters[0][i]) + "/step")
          .template item<int64_t>();
    };
    for (int64_t t = 0; t < 6; ++t) {
      auto gradients = ranks.gradients(t);
      for (auto& of_rank : gradients) of_rank[1] = of_rank[3] = Tensor();
      if (world_size > 1) gradients[1][0] = Tensor();  // one rank only: zero there
      REQUIRE(ranks.step(gradients) == "");
      if (t < 3) CHECK(same_bits(ranks.parameters[0][1], before[1]));
      CHECK(same_bits(ranks.parameters[0][3], before[3]));
      CHECK(steps_of(0) == t + 1);
      CHECK(steps_of(3) == 0);
      for (const auto& of_rank : ranks.parameters) CHECK(same_bits(of_rank, ranks.parameters[0]));
    }
  }
}

TEST_CASE("a trust ratio made of weight decay alone is not averaged", "[lifecycle]") {
  const auto parameters = leaves({torch::ones({40}), torch::ones({40})});
  OneBitLamb optimizer(parameters, OneBitLambOptions(0.01).weight_decay(0.01).freeze_step(20));
  for (uint64_t t = 0; t < 5; ++t) {
    set_gradients(parameters, 0, t);
    parameters[1].mutable_grad() = at::zeros({40});
    optimizer.step();
  }
  CHECK(optimizer.coefficient(parameters[1]) == 1);
  CHECK(optimizer.coefficient(parameters[0]) != 1);
}

TEST_CASE("parameters of InferenceMode are refused in a sentence, and leave no state behind", "[lifecycle]") {
  Tensor p;
  {
    const c10::InferenceMode inference;
    p = torch::ones({3});
  }
  p.mutable_grad() = torch::ones({3});
  const std::string message = refusal([&] {
    FusedAdamW optimizer({p});
    optimizer.step();
  });
  CHECK(contains(message, "InferenceMode"));
}

TEST_CASE("parameters whose step counts are equal again share the scalars of a step again", "[lifecycle]") {
  std::vector<Tensor> parameters;
  for (int i = 0; i < 16; ++i) parameters.push_back(torch::ones({2}).requires_grad_());
  FusedAdamW optimizer(parameters, FusedAdamWOptions(0.01).finite_check(true));
  const auto clocks = [&] {
    std::vector<const void*> all;
    for (const Tensor& p : parameters) all.push_back(state_of(optimizer, p).clock().get());
    std::sort(all.begin(), all.end());
    return std::unique(all.begin(), all.end()) - all.begin();
  };
  set_gradients(parameters, 0, 0);
  optimizer.step();
  for (uint64_t t = 0; t < 4; ++t) {  // one half, then the other: counts are equal after two steps
    for (uint64_t half = 0; half < 2; ++half) {
      set_gradients(parameters, 0, 2 * t + half);
      for (size_t i = 0; i < parameters.size(); ++i) {
        if (((i >> t) & 1) == half) parameters[i].mutable_grad() = Tensor();
      }
      optimizer.step();
    }
  }
  set_gradients(parameters, 0, 20);
  optimizer.step();
  CHECK(clocks() == 1);
}

TEST_CASE("gaps that come after construction are refused in compressed groups", "[lifecycle]") {
  const auto parameters = leaves({torch::ones({8}), torch::ones({8})});
  OneBitAdam optimizer(parameters, OneBitAdamOptions(0.01).freeze_step(2).compress_vectors(true));
  set_gradients(parameters, 0, 0);
  optimizer.step();
  parameters[0].set_data(torch::zeros({16}).slice(0, 0, 16, 2));
  set_gradients(parameters, 0, 1);
  CHECK(contains(refusal([&] { optimizer.step(); }), "gaps"));
}

}  // namespace pacer::testing::between_steps
