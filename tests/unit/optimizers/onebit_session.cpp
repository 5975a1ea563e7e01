// All 1-bit optimizers in a Session: one clip factor for all ranks, what it costs on the wire, and what a
// Session refuses.
#include <pacer/hooks/gradient_accumulation.h>
#include <pacer/hooks/gradient_clipping.h>
#include <pacer/schedulers/learning_rate.h>
#include <pacer/schedulers/sequence_length.h>
#include <pacer/session/session.h>

#include "support/catch.h"

#include "support/optimizers/onebit_adam_ranks.h"
#include "support/optimizers/onebit_lamb_ranks.h"
#include "support/optimizers/onebit_sessions.h"

namespace pacer::testing::onebit_session {
namespace {

using Gradients = std::vector<std::vector<Tensor>>;  // [rank][parameter]

// Gradients of one step in so many micro-steps, with norms that differ from rank to rank.
template <class O>
std::vector<Gradients> uneven_parts(const OneBitRanks<O>& ranks, int64_t step, int micro_steps) {
  std::vector<Gradients> parts;
  for (int m = 0; m < micro_steps; ++m) {
    parts.push_back(ranks.gradients(100 * step + m));
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      for (Tensor& g : parts.back()[rank]) g.mul_(static_cast<double>(1 + 2 * rank));
    }
  }
  return parts;
}

Gradients sum_of(const std::vector<Gradients>& parts) {
  Gradients sums = parts[0];
  for (size_t m = 1; m < parts.size(); ++m) {
    for (size_t rank = 0; rank < sums.size(); ++rank) {
      for (size_t i = 0; i < sums[rank].size(); ++i) sums[rank][i] = sums[rank][i] + parts[m][rank][i];
    }
  }
  return sums;
}

}  // namespace

TEMPLATE_TEST_CASE("a Session clips with one factor for all ranks, whatever each one's own norm",
                   "[onebit_adam][onebit_lamb][clipping]", OneBitAdam, OneBitLamb) {
  using O = OptionsOf<TestType>;
  for (const int world_size : {1, 2, 4}) {
    for (const int micro_steps : {1, 2}) {
      for (const double max_norm : {0.05, 2.0, 1e6}) {
        CAPTURE(world_size, micro_steps, max_norm);
        const O options = Family<TestType>::refreshed(O(0.01).freeze_step(3).compress_alone(true), 4);
        const GroupsOf<TestType> groups = {{{{40, 5}, {1}}, options},
                                           {{{64}, {3}}, O(options).compress(false).lr(0.002)}};
        OneBitRanks<TestType> ranks(world_size, groups);
        auto textbook = textbook_of(ranks, groups);
        Sessions sessions(ranks, [&](Session& session) {
          session.use(GradientClipping(max_norm)).use(GradientAccumulation(micro_steps));
        });
        int64_t clipped = 0;
        for (int64_t t = 0; t < 12; ++t) {
          const auto parts = uneven_parts(ranks, t, micro_steps);
          const auto gradients = textbook_gradients(sum_of(parts));
          const double norm = clipping_norm(textbook, gradients) / micro_steps;
          REQUIRE(sessions.step(ranks, parts) == "");
          const double clip = norm > max_norm ? max_norm / norm : 1.0;
          clipped += clip < 1;
          textbook.step(gradients, clip / micro_steps);
          CAPTURE(t);
          for (const auto& session : sessions.of_rank) {
            REQUIRE(session->gradient_norm() == Catch::Approx(norm).epsilon(1e-14));
          }
          REQUIRE(difference_from(textbook, ranks) == "");
        }
        CHECK(clipped == (max_norm == 0.05 ? 12 : max_norm == 1e6 ? 0 : clipped));
        CHECK(sessions.finish(ranks) == "");
      }
    }
  }
}

TEMPLATE_TEST_CASE("a gradient of zero is not clipped and only momentum moves",
                   "[onebit_adam][onebit_lamb][clipping]", OneBitAdam, OneBitLamb) {
  const GroupsOf<TestType> groups = {{{{50}}, OptionsOf<TestType>(0.01).freeze_step(1)}};
  OneBitRanks<TestType> ranks(2, groups);
  auto textbook = textbook_of(ranks, groups);
  Sessions sessions(ranks, [](Session& session) { session.use(GradientClipping(0.1)); });
  for (int64_t t = 0; t < 6; ++t) {
    auto gradients = ranks.gradients(t);
    for (auto& of_rank : gradients) of_rank[0].mul_(t == 0 ? 1e-3 : 0.0);
    REQUIRE(sessions.step(ranks, {gradients}) == "");
    textbook.step(textbook_gradients(gradients));
    REQUIRE(difference_from(textbook, ranks) == "");
  }
  CHECK(sessions.of_rank[0]->gradient_norm() == 0);
  CHECK(sessions.finish(ranks) == "");
}

TEMPLATE_TEST_CASE("A3: a compressed step sends a thirtieth of an fp32 ring, and gradients not at all",
                   "[onebit_adam][onebit_lamb]", OneBitAdam, OneBitLamb) {
  const int64_t elements = 100'000 + 3'001, ranks_count = 4;
  for (const bool block_scales : {false, true}) {
    CAPTURE(block_scales);
    const auto options = OptionsOf<TestType>(0.01).freeze_step(2).block_scales(block_scales);
    OneBitRanks<TestType> ranks(ranks_count, {{{{100, 1000}, {3001}}, options}});
    const double ring = 2.0 * (ranks_count - 1) / ranks_count * 4 * static_cast<double>(elements);
    int64_t all = 0, own = 0, summed = 0;
    for (int64_t t = 1; t <= 6; ++t) {
      CAPTURE(t);
      REQUIRE(ranks.step(ranks.gradients(t)) == "");
      const Communicator& world = *ranks.world[1];
      const int64_t step_bytes = world.bytes_sent() - all,
                    own_bytes = ranks.optimizers[1]->bytes_sent() - own;
      const int64_t sum_bytes = traffic_of(world, "all_reduce").bytes_sent - summed;
      if (t <= 2) {
        CHECK(own_bytes == 0);
        CHECK(static_cast<double>(sum_bytes) >= 0.99 * ring);
      } else {
        CHECK(sum_bytes == 0);
        CHECK(static_cast<double>(own_bytes) <= ring / 30);
        CHECK(static_cast<double>(own_bytes) >= ring / 33);
        // The first one also compares sizes and options.
        if (t > 3) CHECK(static_cast<double>(step_bytes) <= ring / 30);
        if (!block_scales) CHECK(own_bytes == 2 * (ranks_count - 1) * (16 + 128 * 202 / 8));
      }
      all += step_bytes;
      own += own_bytes;
      summed += sum_bytes;
    }
    const double error = ranks.optimizers[0]->compression_error();
    CHECK(error > 0);
    CHECK(error < 1);
  }
}

TEST_CASE("what travels is counted for the phase of its step, refreshes among them", "[onebit_adam]") {
  // Warm-up 1 to 3, then 4 5 6 7, of which 5 and 7 refresh. In a Session gradients leave before the optimizer
  // hears of the step.
  const int64_t elements = 40'000;
  for (const bool in_session : {false, true}) {
    CAPTURE(in_session);
    OneBitAdamRanks ranks(2,
                          {{{{200, 200}}, OneBitAdamOptions(0.01).freeze_step(3).refresh_variance_every(2)}});
    Sessions sessions(ranks, [](Session&) {});
    for (int64_t t = 1; t <= 7; ++t) {
      REQUIRE((in_session ? sessions.step(ranks, {ranks.gradients(t)}) : ranks.step(ranks.gradients(t))) ==
              "");
    }
    const Communicator& world = *ranks.world[1];
    // Of one step: half of everything twice. Buckets add some padding, and a Session its loss.
    const int64_t ring = 4 * elements;
    CHECK(traffic_of(world, "all_reduce", "warm-up").bytes_sent / ring == 3);
    CHECK(traffic_of(world, "all_reduce", "compressed").bytes_sent / ring == 0);
    CHECK(traffic_of(world, "all_reduce", "refresh").bytes_sent / ring == 2);
    const int64_t signs = traffic_of(world, "all_to_all", "compressed").bytes_sent +
                          traffic_of(world, "all_gather", "compressed").bytes_sent;
    CHECK(signs == ranks.optimizers[1]->bytes_sent());
    CHECK(signs > 0);
    for (const Traffic& traffic : world.traffic()) {
      CHECK((traffic.operation == "agreement" || !traffic.phase.empty()));
    }
    if (in_session) CHECK(sessions.finish(ranks) == "");
  }
}

TEMPLATE_TEST_CASE("a Session refuses a freeze_step while a curriculum or a warm-up still moves",
                   "[onebit_adam][onebit_lamb][refusals]", OneBitAdam, OneBitLamb) {
  struct Case {
    std::string word;  // "" : not refused
    bool early;
    int64_t freeze_step;
    std::function<void(Session&)> use;
  };
  const auto lengths = [](Session& s) { s.use(SequenceLength(SequenceLengthOptions(8, 50).ramp_steps(10))); };
  const auto rates = [](Session& s) { s.use(LearningRate(warmup_cosine({7, 100}))); };
  const auto chain = [](Session& s) {
    s.use(LearningRate(constant_schedule({2})
                           .then(12, warmup_cosine({7, 100}))
                           .then_at_token(1'000'000, constant_schedule())));
  };
  const std::vector<Case> cases = {
      {"sequence_length", false, 10, lengths},
      {"", false, 11, lengths},
      {"", true, 9, lengths},
      {"learning_rate", false, 7, rates},
      {"", false, 8, rates},
      {"", true, 1, rates},
      {"", true, 7, rates},
      {"", true, 8, rates},
      {"learning_rate", false, 10, chain},
      {"learning_rate", false, 19, chain},
      {"", false, 20, chain},
  };
  for (const Case& c : cases) {
    CAPTURE(c.word, c.early, c.freeze_step);
    const auto options = OptionsOf<TestType>(0.01).freeze_step(c.freeze_step).allow_early_freeze(c.early);
    OneBitRanks<TestType> ranks(1, {{{{50}}, options}});
    Sessions sessions(ranks, c.use);
    const auto before = cloned_state(ranks.optimizers[0]->export_state());
    const auto values = clones(ranks.parameters[0]);
    Session& session = *sessions.of_rank[0];
    const Tensor batch = at::ones({1, 50});
    const std::string message = refusal([&] { (void)session.begin(batch); });
    if (c.word.empty()) {
      CHECK(message == "<no exception>");
      continue;
    }
    CHECK(contains(message, Family<TestType>::kName));
    CHECK(contains(message, c.word));
    CHECK(contains(message, "freeze_step(" + std::to_string(c.freeze_step) + ")"));
    CHECK(contains(message, "allow_early_freeze(true)"));
    CHECK(message.find('\n') == std::string::npos);
    CHECK(differing_name(before, ranks.optimizers[0]->export_state()) == "");
    CHECK(same_bits(values, ranks.parameters[0]));
  }
}

TEMPLATE_TEST_CASE("a Session with another Communicator than its optimizer is refused",
                   "[onebit_adam][onebit_lamb][refusals]", OneBitAdam, OneBitLamb) {
  OneBitRanks<TestType> ranks(1, {{{{50}}, OptionsOf<TestType>(0.01).freeze_step(3)}});
  Dictated model(ranks.parameters[0]);
  const Ranks others = Communicator::in_process(2);
  Session session(*model, *ranks.optimizers[0], others[0]);
  const std::string message = refusal([&] { (void)session.begin(at::ones({50})); });
  CHECK(contains(message, std::string(Family<TestType>::kName) + " was given a Communicator of 1 ranks"));
  CHECK(contains(message, "of 2; give both the same"));
  others[0]->leave("the test is over");
  others[1]->leave("the test is over");
}

}  // namespace pacer::testing::onebit_session
