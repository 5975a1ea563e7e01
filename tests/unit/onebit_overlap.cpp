// 1-bit optimizers whose buckets travel while backward runs: the bits of those that wait for the step, and
// what becomes of a step that cannot follow.
#include <atomic>
#include <thread>

#include "support/catch.h"

#include "support/onebit_adam_ranks.h"
#include "support/onebit_lamb_ranks.h"
#include "support/onebit_refusals.h"
#include "support/onebit_sessions.h"

#include <pacer/schedulers/gradient_accumulation.h>
#include <pacer/schedulers/gradient_clipping.h>

namespace pacer::testing::onebit_overlap {
namespace {

constexpr int kRanks = 3;
constexpr size_t kBuckets = 5;

template <class O>
OptionsOf<O> options_of(bool overlap) {
  return OptionsOf<O>(0.01).freeze_step(2).weight_decay(0.1).bucket_bytes(1).overlap_backward(overlap);
}
template <class O>
GroupsOf<O> groups_of(bool overlap) {
  const auto options = options_of<O>(overlap);
  return {{{{300}, {7}, {40, 50}, {3000}, {64}}, options}, {{{5}}, OptionsOf<O>(options).compress(false)}};
}

template <class Action>
std::string error_of(const Action& action) {
  try {
    action();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

int64_t sent_there(const Communicator& world) {
  int64_t calls = 0;
  for (const Traffic& traffic : world.traffic()) {
    if (traffic.group == "lane momentum there") calls += traffic.calls;
  }
  return calls;
}

// Ranks in Sessions, whose loss leaves parameters out that are not trained or are `unused` on a rank.
template <class O>
struct Run {
  explicit Run(bool overlap, int64_t micro_steps = 1)
      : ranks(kRanks, groups_of<O>(overlap)), sessions(ranks, [&](Session& session) {
          if (micro_steps > 1) session.use(GradientAccumulation(micro_steps));
        }) {
    ahead.resize(kRanks);
  }
  Tensor loss(size_t rank, const std::vector<Tensor>& gradients) const {
    Tensor sum;
    for (size_t i = 0; i < gradients.size(); ++i) {
      const Tensor& p = ranks.parameters[rank][i];
      if (!p.requires_grad() || (rank == 1 && unused.count(i) != 0)) continue;
      const Tensor part = (p * gradients[i]).sum();
      sum = sum.defined() ? sum + part : part;
    }
    return sum;
  }
  // Each rank's message, "" where the step came to its end.
  std::vector<std::string> step(const std::vector<std::vector<std::vector<Tensor>>>& micro_steps) {
    return run_ranks(kRanks, [&](int number) {
      const auto rank = static_cast<size_t>(number);
      std::string said;
      HeardWarnings ear(said);
      const c10::WarningUtils::WarningHandlerGuard guard(&ear);
      Session& session = *sessions.of_rank[rank];
      for (const auto& gradients : micro_steps) {
        const int64_t before = sent_there(*ranks.world[rank]);
        static_cast<void>(session.begin(at::zeros({1})));
        session.backward(loss(rank, gradients[rank]));
        ahead[rank] = sent_there(*ranks.world[rank]) - before;
        if (between) between(rank);
        session.step();
      }
    });
  }

  OneBitRanks<O> ranks;
  Sessions sessions;
  std::set<size_t> unused;
  std::vector<int64_t> ahead;                // [rank]: buckets that left during the last backward
  std::function<void(size_t rank)> between;  // backward and step
};

template <class O>
void check_equal(int64_t micro_steps) {
  Run<O> ahead(true, micro_steps), behind(false, micro_steps);
  for (int64_t t = 0; t < 12; ++t) {
    CAPTURE(micro_steps, t);
    std::vector<std::vector<std::vector<Tensor>>> gradients;
    for (int64_t k = 0; k < micro_steps; ++k) gradients.push_back(ahead.ranks.gradients(t * 8 + k));
    for (Run<O>* run : {&ahead, &behind}) {
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
      CHECK_THROWS_AS(optimizer.begin_backward([] { return StepInputs(); }), Error);
      CHECK_THROWS_AS(optimizer.prepare({}), Error);
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
    saved[rank] = error_of([&] { run.ranks.optimizers[rank]->export_state(); });
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
  OneBitRanks<TestType> ranks(2, {{{{4}}, O(options_of<TestType>(true))}});
  Sessions sessions(ranks, [](Session& session) { session.use(GradientClipping(0.1)); });
  CHECK(unless_sentence(sessions.step(ranks, {ranks.gradients(0)}),
                        {"overlap_backward(true)", "GradientClipping"}) == "");
}

}  // namespace pacer::testing::onebit_overlap
