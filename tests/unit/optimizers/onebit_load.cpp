// What all 1-bit optimizers refuse to load, and what loading heals: a step that failed half-way.
#include "support/catch.h"

#include <pacer/optimizers/detail/step_agreement.h>

#include "support/optimizers/contract.h"
#include "support/optimizers/onebit_adam_ranks.h"
#include "support/optimizers/onebit_lamb_ranks.h"
#include "support/optimizers/onebit_refusals.h"

namespace pacer::testing::onebit_load {
namespace {

// Every rank 0 is given the state of rank 0 of another number of ranks.
template <class O>
void check_other_worlds(int64_t elements) {
  std::vector<std::unique_ptr<OneBitRanks<O>>> runs;
  for (const int world_size : {1, 2, 3}) {
    runs.push_back(std::make_unique<OneBitRanks<O>>(world_size, small_groups(frozen_at_two<O>(), elements)));
    take_steps(*runs.back(), 0, 5);
  }
  for (size_t from = 0; from < 3; ++from) {
    const auto state = cloned_state(runs[from]->optimizers[0]->export_state());
    const auto errors = cloned_state(runs[from]->optimizers[0]->export_rank_state());
    for (size_t to = 0; to < 3; ++to) {
      if (from == to) continue;
      CAPTURE(elements, from, to);
      CHECK(unless_refused_whole(*runs[to], 0, {"the state to load"},
                                 [&] { runs[to]->optimizers[0]->import_states(state, errors); }) == "");
    }
    if (from == 0) continue;
    CHECK(unless_refused_whole(*runs[from], 0, {"errors of this rank"},
                               [&] { runs[from]->optimizers[0]->import_state(state); }) == "");
  }
}

}  // namespace

TEMPLATE_TEST_CASE("state of another number of ranks, or without its errors, is refused",
                   "[onebit_adam][onebit_lamb][refusals]", OneBitAdam, OneBitLamb) {
  check_other_worlds<TestType>(3000);
}

TEMPLATE_TEST_CASE("so it is where two and three ranks serve chunks of one size",
                   "[onebit_adam][onebit_lamb][refusals]", OneBitAdam, OneBitLamb) {
  check_other_worlds<TestType>(300);
}

TEMPLATE_TEST_CASE("state that was frozen by another rule, or makes no sense, is refused",
                   "[onebit_adam][onebit_lamb][refusals]", OneBitAdam, OneBitLamb) {
  OneBitRanks<TestType> others(1, small_groups(OptionsOf<TestType>(0.01).freeze_automatically(50)));
  for (const bool exchanges : {false, true}) {
    for (const int64_t steps : {1, 4}) {
      CAPTURE(exchanges, steps);
      OneBitRanks<TestType> ranks(1, small_groups(frozen_at_two<TestType>().compress_alone(exchanges)));
      take_steps(ranks, 0, steps);
      TestType& optimizer = *ranks.optimizers[0];
      const auto mine = cloned_state(optimizer.export_state());
      const auto errors = cloned_state(optimizer.export_rank_state());
      const auto theirs = cloned_state(others.optimizers[0]->export_state());
      CHECK(unless_refused_whole(ranks, 0, {}, [&] { optimizer.import_states(theirs, {}); }) == "");
      CHECK(unless_refused_whole(others, 0, {}, [&] { others.optimizers[0]->import_states(mine, errors); }) ==
            "");
      const auto with = [&](const std::string& key, const Tensor& value) {
        NamedTensors state = cloned_state(mine);
        state[key] = value;
        return unless_refused_whole(ranks, 0, {key}, [&] { optimizer.import_states(state, errors); });
      };
      for (const int64_t group : {0, 1}) {  // OneBitLamb misses averages of trust ratios, or has too many
        const std::string number = std::to_string(group);
        NamedTensors state = cloned_state(mine);
        state["group/" + number + "/compress"] = number_tensor(group == 1);
        const std::string says = std::is_same_v<TestType, OneBitLamb>
                                     ? "\"" + number + ".0/trust_average\""
                                     : "parameter group " + number + " is compressed here or in the state";
        CHECK(unless_refused_whole(ranks, 0, {says}, [&] { optimizer.import_states(state, errors); }) == "");
      }
      CHECK(with("onebit/attempts", number_tensor(int64_t{-1})) == "");
      CHECK(with("onebit/frozen_at", number_tensor(int64_t{0})) == "");
      CHECK(with("onebit/frozen_at", number_tensor(2.0)) == "");
      if (steps == 4) {  // frozen at 2
        CHECK(with("onebit/attempts", number_tensor(int64_t{1})) == "");
        CHECK(with("onebit/freeze_is_due", number_tensor(int64_t{1})) == "");
        CHECK(with("0.0/fresh_variance", at::zeros({299})) == "");
      }
      CHECK(with("0.0/exp_avg_sq", at::zeros({299})) == "");
      CHECK(with("nobody/exp_avg", at::zeros({3})) == "");
      for (const auto& [key, value] : mine) {
        if (contains(key, "state_version"))
          continue;  // without it the state counts as one of an older version
        NamedTensors state = cloned_state(mine);
        state.erase(key);
        CAPTURE(key);
        CHECK(unless_refused_whole(ranks, 0, {}, [&] { optimizer.import_states(state, errors); }) == "");
      }
      for (const auto& [key, value] : errors) {
        if (contains(key, "state_version")) continue;
        NamedTensors incomplete = cloned_state(errors);
        incomplete.erase(key);
        CAPTURE(key);
        CHECK(unless_refused_whole(ranks, 0, {}, [&] { optimizer.import_states(mine, incomplete); }) == "");
      }
      optimizer.import_states(mine, errors);
      take_steps(ranks, steps, steps + 2);
    }
  }
}

TEMPLATE_TEST_CASE("what belongs to no bucket of a saved state is refused by its name",
                   "[onebit_adam][onebit_lamb][refusals]", OneBitAdam, OneBitLamb) {
  auto options = frozen_at_two<TestType>();
  options.compress_alone(true).bucket_bytes(1);
  OneBitRanks<TestType> ranks(1, {{{{300}, {7}}, options}});
  take_steps(ranks, 0, 4);
  TestType& optimizer = *ranks.optimizers[0];
  const auto state = cloned_state(optimizer.export_state());
  const auto errors = cloned_state(optimizer.export_rank_state());
  for (const char* key : {"0.0/momentum_error", "0.1/more/worker_error", "nobody/worker_error"}) {
    NamedTensors with_more = errors;
    with_more[key] = at::zeros({7});
    CHECK(unless_refused_whole(ranks, 0, {key, "which this rank does not need"},
                               [&] { optimizer.import_states(state, with_more); }) == "");
  }
  NamedTensors with_more = state;
  with_more["nobody/fresh_variance"] = at::zeros({3});
  const std::string why = std::is_same_v<TestType, OneBitLamb> ? "which fits no compressed parameter"
                                                               : "which only OneBitLamb has";
  CHECK(unless_refused_whole(ranks, 0, {"nobody/fresh_variance", why},
                             [&] { optimizer.import_states(with_more, errors); }) == "");
  optimizer.import_states(state, errors);
  take_steps(ranks, 4, 6);
}

TEMPLATE_TEST_CASE("a rank that leaves in the middle of a step stops the others until they load",
                   "[onebit_adam][onebit_lamb]", OneBitAdam, OneBitLamb) {
  const bool in_buckets = GENERATE(false, true);
  auto options = frozen_at_two<TestType>();
  if (in_buckets) options.bucket_bytes(1);
  CAPTURE(in_buckets);
  OneBitRanks<TestType> ranks(3, {{{{300}, {7}}, options}});
  take_steps(ranks, 0, 4);
  std::vector<NamedTensors> states, errors;
  for (const auto& optimizer : ranks.optimizers) {
    states.push_back(cloned_state(optimizer->export_state()));
    errors.push_back(cloned_state(optimizer->export_rank_state()));
  }
  const auto values = clones(ranks.parameters[0]);
  ranks.set(ranks.gradients(4));
  const auto messages = run_ranks(3, [&](int rank) {
    const auto r = static_cast<size_t>(rank);
    if (rank != 2) {
      ranks.optimizers[r]->step();
      return;
    }
    // Still there when ranks compare what they are about to do and ask whether all gradients are finite, and
    // gone when signs travel.
    TestType& own = *ranks.optimizers[r];
    const detail::OptimizerView view{
        detail::traits_of(own.defaults()), own.param_groups(), own.state(), own.defaults(), {}, {}};
    detail::StepAgreement().without_gradient(*ranks.world[r], 4, view);
    const Tensor sent = at::zeros({1}, at::kDouble), all = at::empty({3}, at::kDouble);
    ranks.world[r]->all_gather_host(all, sent).wait();
    ranks.world[r]->leave("its host is going down");
  });
  for (size_t rank = 0; rank < 2; ++rank) {
    TestType& optimizer = *ranks.optimizers[rank];
    CAPTURE(rank, messages[rank]);
    CHECK(contains(messages[rank], "its host is going down"));
    CHECK(same_bits(values, ranks.parameters[rank]));
    CHECK_THROWS_AS(optimizer.export_state(), Error);
    CHECK_THROWS_AS(optimizer.export_rank_state(), Error);
    CHECK_THROWS_AS(optimizer.step(), Error);
    CHECK_THROWS_AS(contract(optimizer).prepare({}), Error);
    CHECK(same_bits(values, ranks.parameters[rank]));
    optimizer.import_states(states[rank], errors[rank]);
    CHECK(differing_name(states[rank], optimizer.export_state()) == "");
    CHECK(differing_name(errors[rank], optimizer.export_rank_state()) == "");
  }
  ranks.resume();  // a new communicator: training goes on
  take_steps(ranks, 4, 6);
}

}  // namespace pacer::testing::onebit_load
