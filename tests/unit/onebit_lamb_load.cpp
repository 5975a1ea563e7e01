// OneBitLamb's state: what it saves comes back to the bit, what it refuses to load, and how it goes on with
// another number of ranks.
#include <cmath>

#include "support/catch.h"

#include "support/onebit_lamb_refusals.h"

namespace pacer::testing::onebit_lamb_load {
namespace {

// Momenta of unlike sizes, one without elements, and a chunk boundary within a tensor.
std::vector<OneBitLambGroup> elastic_groups(const OneBitLambOptions& options) {
  return {{{{700}, {3}, {0}, {5, 50}}, options}, {{{5}}, OneBitLambOptions(options).compress(false)}};
}

std::vector<NamedTensors> rank_states_of(const OneBitLambRanks& ranks) {
  std::vector<NamedTensors> states;
  for (const auto& optimizer : ranks.optimizers)
    states.push_back(cloned_state(optimizer->export_rank_state()));
  return states;
}

// `to` goes on where `from` has stopped.
void go_on(const OneBitLambRanks& from, OneBitLambRanks& to) {
  const NamedTensors state = cloned_state(from.optimizers[0]->export_state());
  const auto errors = rank_states_of(from);
  const at::NoGradGuard no_grad;
  for (size_t rank = 0; rank < to.size(); ++rank) {
    for (size_t i = 0; i < to.parameters[rank].size(); ++i) {
      to.parameters[rank][i].copy_(from.parameters[0][i]);
    }
    OneBitLamb& optimizer = *to.optimizers[rank];
    optimizer.import_states(state, optimizer.join_rank_states(errors));
  }
}

// The textbook of `to`, which goes on from `last`: each worker has the mean of the errors there were, rounded
// once; the server's stay with their elements.
OneBitLambTextbook continued(const OneBitLambTextbook& last, const OneBitLambRanks& to,
                             const std::vector<OneBitLambGroup>& groups) {
  OneBitLambTextbook next = textbook_of(to, groups);
  next.parameters = last.parameters;
  next.attempts = last.attempts;
  next.skipped = last.skipped;
  next.frozen_at = last.frozen_at;
  const auto& before = last.exchange.worker_errors;
  for (auto& errors : next.exchange.worker_errors) {
    for (size_t k = 0; k < errors.size(); ++k) {
      double sum = 0;
      for (const auto& of_rank : before) sum += static_cast<double>(of_rank[k]);
      errors[k] = static_cast<float>(sum / static_cast<double>(before.size()));
    }
  }
  next.exchange.server_error = last.exchange.server_error;
  return next;
}

// Every rank 0 is given the state of rank 0 of another number of ranks.
void check_other_worlds(int64_t elements) {
  std::vector<std::unique_ptr<OneBitLambRanks>> runs;
  for (const int world_size : {1, 2, 3}) {
    runs.push_back(
        std::make_unique<OneBitLambRanks>(world_size, small_lamb_groups(lamb_frozen_at_two(), elements)));
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

TEST_CASE("what 1-bit LAMB saves is what it exports after a load", "[onebit_lamb]") {
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    for (const int world_size : {1, 3}) {
      for (const int64_t steps : {0, 1, 2, 3, 7}) {  // before, at and after the freeze
        CAPTURE(dtype, world_size, steps);
        OneBitLambRanks ranks(world_size, elastic_groups(lamb_frozen_at_two().compress_alone(true)), dtype);
        take_steps(ranks, 0, steps);
        const auto before = everything(ranks);
        const auto read = [&](const OneBitLamb& optimizer, const Tensor& p) {
          return std::vector<double>{optimizer.coefficient(p), optimizer.factor(p),
                                     optimizer.momentum_scale(p)};
        };
        std::vector<std::vector<double>> own;
        for (size_t i = 0; i < 4; ++i) own.push_back(read(*ranks.optimizers[0], ranks.parameters[0][i]));
        ranks.resume();
        CHECK(first_change(before, everything(ranks)) == "");
        CHECK(first_change(everything(ranks), before) == "");
        for (size_t rank = 0; rank < ranks.size(); ++rank) {
          CHECK(ranks.optimizers[rank]->attempts() == steps);
          for (size_t i = 0; i < 4; ++i) {
            CHECK(read(*ranks.optimizers[rank], ranks.parameters[rank][i]) == own[i]);
          }
        }
      }
    }
  }
}

TEST_CASE("1-bit LAMB refuses state of another number of ranks, or without its errors",
          "[onebit_lamb][refusals]") {
  check_other_worlds(3000);
}

TEST_CASE("1-bit LAMB refuses it where two and three ranks serve chunks of one size",
          "[onebit_lamb][refusals]") {
  check_other_worlds(300);
}

TEST_CASE("1-bit LAMB refuses state that was frozen by another rule, or makes no sense",
          "[onebit_lamb][refusals]") {
  OneBitLambRanks others(1, small_lamb_groups(OneBitLambOptions(0.01).freeze_automatically(50)));
  for (const bool exchanges : {false, true}) {
    for (const int64_t steps : {1, 4}) {
      CAPTURE(exchanges, steps);
      OneBitLambRanks ranks(1, small_lamb_groups(lamb_frozen_at_two().compress_alone(exchanges)));
      take_steps(ranks, 0, steps);
      OneBitLamb& optimizer = *ranks.optimizers[0];
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
      CHECK(with("onebit/attempts", number_tensor(int64_t{-1})) == "");
      CHECK(with("onebit/frozen_at", number_tensor(int64_t{0})) == "");
      CHECK(with("onebit/frozen_at", number_tensor(2.0)) == "");
      CHECK(with("0.0/exp_avg_sq", at::zeros({299})) == "");
      CHECK(with("nobody/exp_avg", at::zeros({3})) == "");
      if (steps == 4) CHECK(with("0.0/fresh_variance", at::zeros({299})) == "");
      for (const auto& [key, value] : mine) {
        NamedTensors state = cloned_state(mine);
        state.erase(key);
        CAPTURE(key);
        CHECK(unless_refused_whole(ranks, 0, {}, [&] { optimizer.import_states(state, errors); }) == "");
      }
      for (const auto& [key, value] : errors) {
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

TEST_CASE("1-bit LAMB on another number of ranks is the textbook's to the bit", "[onebit_lamb]") {
  const std::pair<int, int> changes[] = {{4, 2}, {2, 4}, {4, 3}, {3, 8}, {1, 4}, {4, 1}};
  for (const auto& [before, after] : changes) {
    for (const bool block_scales : {false, true}) {
      CAPTURE(before, after, block_scales);
      const auto options = lamb_frozen_at_two().compress_alone(true).block_scales(block_scales);
      const auto groups = elastic_groups(options);
      OneBitLambRanks ranks(before, groups), others(after, groups);
      OneBitLambTextbook textbook = textbook_of(ranks, groups);
      REQUIRE(differ_after(ranks, textbook, 7) == "");
      go_on(ranks, others);
      OneBitLambTextbook next = continued(textbook, others, groups);
      REQUIRE(difference_from(next, others) == "");
      REQUIRE(differ_after(others, next, 7) == "");
      for (size_t rank = 1; rank < others.size(); ++rank) {
        REQUIRE(same_bits(others.parameters[0], others.parameters[rank]));
      }
    }
  }
}

TEST_CASE("1-bit LAMB on a single rank adds what was owed to the momentum once, in its own units",
          "[onebit_lamb]") {
  const auto groups = elastic_groups(lamb_frozen_at_two());
  OneBitLambRanks ranks(4, groups), with(1, groups), without(1, groups);
  OneBitLambTextbook textbook = textbook_of(ranks, groups);
  REQUIRE(differ_after(ranks, textbook, 6) == "");
  go_on(ranks, with);
  go_on(ranks, without);
  without.optimizers[0]->import_states(cloned_state(ranks.optimizers[0]->export_state()), {});
  CHECK_FALSE(with.optimizers[0]->export_rank_state().empty());
  for (int64_t t = 6; t < 8; ++t) {
    take_steps(with, t, t + 1);
    take_steps(without, t, t + 1);
    const double decay = t == 6 ? 1 : 0.9;
    const auto a = with.optimizers[0]->export_state(), b = without.optimizers[0]->export_state();
    CHECK(with.optimizers[0]->export_rank_state().empty());
    for (size_t i = 0; i < 4; ++i) {
      const OneBitLambParameter& p = textbook.parameters[i];
      const std::string key = with.optimizers[0]->parameter_name(with.parameters[0][i]) + "/exp_avg";
      const auto more = to_doubles(a.at(key)), less = to_doubles(b.at(key));
      for (size_t k = 0; k < more.size(); ++k) {
        double owed = textbook.exchange.server_error[p.offset + k];
        for (const auto& of_rank : textbook.exchange.worker_errors) owed += of_rank[p.offset + k] / 4.0;
        CAPTURE(t, i, k);
        const double expected = decay * owed / static_cast<double>(p.scale);
        REQUIRE(more[k] - less[k] == Catch::Approx(expected).epsilon(1e-4).margin(1e-6));
      }
    }
  }
}

TEST_CASE("a run of 1-bit LAMB that compressed nothing goes on with signs", "[onebit_lamb]") {
  const auto groups = elastic_groups(lamb_frozen_at_two());
  OneBitLambRanks alone(1, groups), others(3, groups);
  OneBitLambTextbook textbook = textbook_of(alone, groups);
  REQUIRE(differ_after(alone, textbook, 6) == "");
  go_on(alone, others);
  OneBitLambTextbook next = continued(textbook, others, groups);
  REQUIRE(difference_from(next, others) == "");
  REQUIRE(differ_after(others, next, 6) == "");
}

TEST_CASE("a rank that leaves in the middle of 1-bit LAMB's step stops the others until they load",
          "[onebit_lamb]") {
  OneBitLambRanks ranks(3, {{{{300}, {7}}, lamb_frozen_at_two()}});
  take_steps(ranks, 0, 4);
  std::vector<NamedTensors> states, errors = rank_states_of(ranks);
  for (const auto& optimizer : ranks.optimizers) states.push_back(cloned_state(optimizer->export_state()));
  const auto values = clones(ranks.parameters[0]);
  ranks.set(ranks.gradients(4));
  const auto messages = run_ranks(3, [&](int rank) {
    const auto r = static_cast<size_t>(rank);
    if (rank != 2) {
      ranks.optimizers[r]->step();
      return;
    }
    // Still there when ranks ask whether all gradients are finite, and gone when signs travel.
    const Tensor own = at::zeros({1}, at::kDouble), all = at::empty({3}, at::kDouble);
    ranks.world[r]->all_gather_host(all, own).wait();
    ranks.world[r]->leave("its host is going down");
  });
  for (size_t rank = 0; rank < 2; ++rank) {
    OneBitLamb& optimizer = *ranks.optimizers[rank];
    CAPTURE(rank, messages[rank]);
    CHECK(contains(messages[rank], "its host is going down"));
    CHECK(same_bits(values, ranks.parameters[rank]));
    CHECK_THROWS_AS(optimizer.export_state(), Error);
    CHECK_THROWS_AS(optimizer.export_rank_state(), Error);
    CHECK_THROWS_AS(optimizer.step(), Error);
    optimizer.import_states(states[rank], errors[rank]);
    CHECK(differing_name(states[rank], optimizer.export_state()) == "");
    CHECK(differing_name(errors[rank], optimizer.export_rank_state()) == "");
  }
  ranks.resume();  // a new communicator: training goes on
  take_steps(ranks, 4, 6);
}

}  // namespace pacer::testing::onebit_lamb_load
