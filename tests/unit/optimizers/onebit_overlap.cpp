// 1-bit optimizers whose buckets travel while backward runs: the bits of those that wait for the step, and
// what becomes of a step that cannot follow.
#include <atomic>
#include <thread>

#include "support/catch.h"

#include "support/message_of.h"
#include "support/optimizers/contract.h"
#include "support/optimizers/onebit_overlap_run.h"
#include "support/optimizers/onebit_refusals.h"

#include <pacer/hooks/gradient_accumulation.h>
#include <pacer/hooks/gradient_clipping.h>
#include <pacer/hooks/precision.h>

namespace pacer::testing::onebit_overlap {
namespace {

// `max_norm`: of clipping by the norm of the step before, which some steps then exceed by far; 0: none.
template <class O>
void check_equal(int64_t micro_steps, double max_norm = 0) {
  const auto use = [=](Session& session) {
    if (max_norm > 0) session.use(GradientClipping(GradientClippingOptions(max_norm).by_previous_norm(true)));
    session.use(
        GradientAccumulation(GradientAccumulationOptions(micro_steps).weight_by_tokens(max_norm > 0)));
  };
  Run<O> ahead(true, use), behind(false, use);
  for (int64_t t = 0; t < 12; ++t) {
    CAPTURE(micro_steps, max_norm, t);
    std::vector<std::vector<std::vector<Tensor>>> gradients;
    for (int64_t k = 0; k < micro_steps; ++k) {
      gradients.push_back(ahead.ranks.gradients(t * 8 + k));
      if (max_norm > 0 && t % 3 == 1)
        gradients.back()[static_cast<size_t>(t % kRanks)][static_cast<size_t>(t % 4)].mul_(100);
    }
    for (Run<O>* run : {&ahead, &behind}) {
      run->tokens = max_norm > 0 ? 1000 + 77 * t : 0;
      run->unused = t == 5 ? std::set<size_t>{2} : std::set<size_t>{};
      for (const auto& of_rank : run->ranks.parameters) {
        Tensor(of_rank[1]).requires_grad_(t != 7 && t != 8);
        Tensor(of_rank[4]).requires_grad_(t != 8);
      }
      REQUIRE(first_of(run->step(gradients)) == "");
    }
    REQUIRE(first_change(everything(behind.ranks), everything(ahead.ranks)) == "");
    // The first compressed step and those after a change of what is trained have to plan.
    const bool plans = t <= 2 || t == 7 || t == 8 || t == 9;
    if (!plans) CHECK(ahead.ahead[0] == kBuckets);
    if (t == 5) CHECK(ahead.ahead[1] == 2);  // those behind the one that waits
    if (t < 2) CHECK(ahead.ahead[0] == 0);
    CHECK(behind.ahead[0] == 0);
  }
  CHECK(first_of(ahead.step({ahead.ranks.gradients(1)})) == "");  // a window that ends early
  CHECK(first_of(behind.step({behind.ranks.gradients(1)})) == "");
  CHECK(ahead.sessions.finish(ahead.ranks) == "");
  CHECK(behind.sessions.finish(behind.ranks) == "");
  CHECK(first_change(everything(behind.ranks), everything(ahead.ranks)) == "");
}

// Five steps into a run, with what was saved then.
template <class O>
struct Trained {
  Trained() : run(true) {
    for (int64_t t = 0; t < kSteps; ++t) REQUIRE(first_of(run.step({run.ranks.gradients(t)})) == "");
    for (const auto& optimizer : run.ranks.optimizers) {
      states.push_back(cloned_state(optimizer->export_state()));
      errors.push_back(cloned_state(optimizer->export_rank_state()));
    }
  }

  // The messages of the step that follows.
  std::vector<std::string> step() { return run.step({run.ranks.gradients(kSteps)}); }

  // After a step that failed half-way nothing is saved, and a state that is loaded heals.
  void check_broken() {
    for (size_t rank = 0; rank < kRanks; ++rank) {
      CAPTURE(rank);
      O& optimizer = *run.ranks.optimizers[rank];
      CHECK_THROWS_AS(optimizer.export_state(), Error);
      CHECK_THROWS_AS(optimizer.export_rank_state(), Error);
      CHECK_THROWS_AS(contract(optimizer).begin_backward([] { return StepInputs(); }), Error);
      CHECK_THROWS_AS(contract(optimizer).prepare({}), Error);
      optimizer.import_states(states[rank], errors[rank]);
      CHECK(differing_name(states[rank], optimizer.export_state()) == "");
      CHECK(differing_name(errors[rank], optimizer.export_rank_state()) == "");
    }
  }

  static constexpr int64_t kSteps = 5;
  Run<O> run;
  std::vector<NamedTensors> states, errors;  // by rank
};

}  // namespace

TEMPLATE_TEST_CASE("buckets that travel while backward runs have the bits of those that wait",
                   "[onebit_adam][onebit_lamb][overlap]", OneBitAdam, OneBitLamb) {
  check_equal<TestType>(1);
  check_equal<TestType>(2);
}

TEMPLATE_TEST_CASE("so they have where they are clipped by the norm of the step before",
                   "[onebit_adam][onebit_lamb][overlap][clipping]", OneBitAdam, OneBitLamb) {
  check_equal<TestType>(1, 0.5);
  check_equal<TestType>(2, 10);
}

TEMPLATE_TEST_CASE("a Session that does not clip takes over from one that did",
                   "[onebit_adam][onebit_lamb][overlap][clipping]", OneBitAdam, OneBitLamb) {
  for (const bool overlap : {false, true}) {
    CAPTURE(overlap);
    Run<TestType> first(overlap,
                        [](Session&session) {
                          session.use(GradientClipping(GradientClippingOptions(0.1).by_previous_norm(true)));
                        }),
        fresh(overlap);
    for (int64_t t = 0; t < 5; ++t) REQUIRE(first_of(first.step({first.ranks.gradients(t)})) == "");
    for (size_t rank = 0; rank < kRanks; ++rank) {
      const at::NoGradGuard no_grad;
      for (size_t i = 0; i < first.ranks.parameters[rank].size(); ++i) {
        fresh.ranks.parameters[rank][i].copy_(first.ranks.parameters[rank][i]);
      }
      fresh.ranks.optimizers[rank]->import_states(
          cloned_state(first.ranks.optimizers[rank]->export_state()),
          cloned_state(first.ranks.optimizers[rank]->export_rank_state()));
    }
    REQUIRE(first.sessions.finish(first.ranks) == "");
    first.sessions = Sessions(first.ranks, [](Session&) {});
    for (int64_t t = 5; t < 9; ++t) {
      for (Run<TestType>* run : {&first, &fresh}) {
        REQUIRE(first_of(run->step({run->ranks.gradients(t)})) == "");
      }
      REQUIRE(first_change(everything(fresh.ranks), everything(first.ranks)) == "");
    }
    CHECK((first.ahead[0] > 0) == overlap);
  }
}

TEMPLATE_TEST_CASE("a step without the clipping that momentum has left with is refused",
                   "[onebit_adam][onebit_lamb][overlap][clipping]", OneBitAdam, OneBitLamb) {
  Run<TestType> run(true, [](Session& session) {
    session.use(GradientClipping(GradientClippingOptions(0.1).by_previous_norm(true)));
  });
  for (int64_t t = 0; t < 5; ++t) REQUIRE(first_of(run.step({run.ranks.gradients(t)})) == "");
  std::vector<std::string> said(kRanks);
  std::atomic<int> here{0};  // a rank that fails first would keep the others from coming here
  run.between = [&](size_t rank) {
    for (++here; here < kRanks;) std::this_thread::yield();
    StepInputs inputs;
    inputs.local_weight = kRanks;
    inputs.average = 1.0 / kRanks;
    said[rank] = message_of([&] { contract(*run.ranks.optimizers[rank]).prepare(inputs); });
  };
  run.step({run.ranks.gradients(5)});
  for (const std::string& message : said) CHECK(contains(message, "another one than its momentum left for"));
}

TEMPLATE_TEST_CASE("a gradient that is not finite is an error where momentum has left",
                   "[onebit_adam][onebit_lamb][overlap]", OneBitAdam, OneBitLamb) {
  Trained<TestType> trained;
  Run<TestType>& run = trained.run;
  auto gradients = run.ranks.gradients(5);
  gradients[1][0][17] = std::nan("");
  for (const std::string& message : run.step({gradients})) CHECK(contains(message, "not finite"));
  trained.check_broken();
}

TEMPLATE_TEST_CASE("what changes a gradient whose momentum has left is refused, and the state with it",
                   "[onebit_adam][onebit_lamb][overlap]", OneBitAdam, OneBitLamb) {
  Trained<TestType> trained;
  Run<TestType>& run = trained.run;
  std::vector<std::string> saved(kRanks);
  run.between = [&](size_t rank) {
    saved[rank] = message_of([&] { run.ranks.optimizers[rank]->export_state(); });
    (run.ranks.parameters[rank][3] * 2).sum().backward();
  };
  for (const std::string& message : trained.step()) {
    CHECK(contains(message, "after its momentum had left"));
  }
  for (const std::string& message : saved) CHECK(contains(message, "on the way to the other ranks"));
  trained.check_broken();
}

TEMPLATE_TEST_CASE("so is a gradient that is changed by hand between backward and step",
                   "[onebit_adam][onebit_lamb][overlap]", OneBitAdam, OneBitLamb) {
  for (const bool replaced : {false, true}) {
    Trained<TestType> trained;
    Run<TestType>& run = trained.run;
    run.between = [&](size_t rank) {
      Tensor& gradient = run.ranks.parameters[rank][2].mutable_grad();
      replaced ? gradient = gradient.clone() : gradient.mul_(2);
    };
    for (const std::string& message : trained.step()) {
      CHECK(contains(message, "was changed after its momentum had left"));
    }
    trained.check_broken();
  }
}

TEMPLATE_TEST_CASE("a backward that fails after momentum has left stops the optimizer until it loads",
                   "[onebit_adam][onebit_lamb][overlap]", OneBitAdam, OneBitLamb) {
  Trained<TestType> trained;
  Run<TestType>& run = trained.run;
  std::atomic<int> here{0};  // a rank that fails first would keep the others from starting
  for (const auto& of_rank : run.ranks.parameters) {
    of_rank[0].register_hook([&here](const Tensor&) -> Tensor {
      for (++here; here < kRanks;) std::this_thread::yield();
      throw std::runtime_error("no memory is left");
    });
  }
  for (const std::string& message : trained.step()) {
    CHECK(!message.empty());
  }
  CHECK(run.ranks.parameters[0][0].grad().defined() == false);
  trained.check_broken();
}

TEMPLATE_TEST_CASE("overlap_backward is refused where something must be known first",
                   "[onebit_adam][onebit_lamb][overlap][refusals]", OneBitAdam, OneBitLamb) {
  using O = OptionsOf<TestType>;
  CHECK(unless_sentence(refusal_of<TestType>(options_of<TestType>(true).hierarchical(true)),
                        {"overlap_backward(true)", "hierarchical(true)"}) == "");
  CHECK(unless_groups_must_agree<TestType>(options_of<TestType>(false), options_of<TestType>(true)) == "");
  for (const int world_size : {1, 2}) {
    OneBitRanks<TestType> ranks(world_size, {{{{4}}, O(options_of<TestType>(true))}});
    CHECK(unless_sentence(ranks.step(ranks.gradients(0)), {"overlap_backward(true) needs a Session"}) == "");
  }
  const std::function<void(Session&)> hooks[] = {
      [](Session& session) { session.use(GradientClipping(0.1)); },
      [](Session& session) { session.use(Precision::fp16()); },
      [](Session& session) {
        session.use(GradientClipping(GradientClippingOptions(0.1).by_previous_norm(true)))
            .use(Precision::fp16());
      }};
  for (const auto& use : hooks) {
    OneBitRanks<TestType> ranks(2, {{{{4}}, O(options_of<TestType>(true))}});
    Sessions sessions(ranks, use);
    CHECK(unless_sentence(sessions.step(ranks, {ranks.gradients(0)}),
                          {"overlap_backward(true)", "GradientClipping without by_previous_norm()"}) == "");
  }
}

}  // namespace pacer::testing::onebit_overlap
