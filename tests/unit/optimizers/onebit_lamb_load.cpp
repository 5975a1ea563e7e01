// OneBitLamb's state: what it saves comes back to the bit, and how it goes on with another number of ranks.
#include <cmath>

#include "support/catch.h"

#include "support/optimizers/contract.h"
#include "support/optimizers/onebit_lamb_ranks.h"
#include "support/optimizers/onebit_refusals.h"

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
    optimizer.import_states(state, contract(optimizer).join_rank_states(state, errors));
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

}  // namespace

TEST_CASE("what 1-bit LAMB saves is what it exports after a load", "[onebit_lamb]") {
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    for (const int world_size : {1, 3}) {
      for (const int64_t steps : {0, 1, 2, 3, 7}) {  // before, at and after the freeze
        CAPTURE(dtype, world_size, steps);
        OneBitLambRanks ranks(world_size, elastic_groups(frozen_at_two<OneBitLamb>().compress_alone(true)),
                              dtype);
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

TEST_CASE("1-bit LAMB on another number of ranks is the textbook's to the bit", "[onebit_lamb]") {
  const std::pair<int, int> changes[] = {{4, 2}, {2, 4}, {4, 3}, {3, 8}, {1, 4}, {4, 1}};
  for (const auto& [before, after] : changes) {
    for (const bool block_scales : {false, true}) {
      CAPTURE(before, after, block_scales);
      const auto options = frozen_at_two<OneBitLamb>().compress_alone(true).block_scales(block_scales);
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
  const auto groups = elastic_groups(frozen_at_two<OneBitLamb>());
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
  const auto groups = elastic_groups(frozen_at_two<OneBitLamb>());
  OneBitLambRanks alone(1, groups), others(3, groups);
  OneBitLambTextbook textbook = textbook_of(alone, groups);
  REQUIRE(differ_after(alone, textbook, 6) == "");
  go_on(alone, others);
  OneBitLambTextbook next = continued(textbook, others, groups);
  REQUIRE(difference_from(next, others) == "");
  REQUIRE(differ_after(others, next, 6) == "");
}

}  // namespace pacer::testing::onebit_lamb_load
