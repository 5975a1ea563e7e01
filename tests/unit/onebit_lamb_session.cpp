// OneBitLamb in a Session: one clip factor for all ranks, what it costs on the wire, and what a Session
// refuses.
#include <algorithm>

#include <pacer/schedulers/gradient_accumulation.h>
#include <pacer/schedulers/gradient_clipping.h>
#include <pacer/schedulers/learning_rate.h>

#include "support/catch.h"

#include "support/onebit_lamb_ranks.h"
#include "support/onebit_sessions.h"

namespace pacer::testing::onebit_lamb_session {

TEST_CASE("a Session clips 1-bit LAMB with one factor for all ranks", "[onebit_lamb][clipping]") {
  for (const int world_size : {1, 2, 4}) {
    for (const double max_norm : {0.05, 2.0, 1e6}) {
      CAPTURE(world_size, max_norm);
      const auto options = OneBitLambOptions(0.01).freeze_step(3).compress_alone(true);
      const std::vector<OneBitLambGroup> groups = {
          {{{40, 5}, {1}}, options}, {{{64}, {3}}, OneBitLambOptions(options).compress(false).lr(0.002)}};
      OneBitLambRanks ranks(world_size, groups);
      OneBitLambTextbook textbook = textbook_of(ranks, groups);
      Sessions sessions(ranks, [&](Session& session) {
        session.use(GradientClipping(max_norm)).use(GradientAccumulation(2));
      });
      int64_t clipped = 0;
      for (int64_t t = 0; t < 12; ++t) {
        // Norms that differ from rank to rank, in two micro-steps.
        auto first = ranks.gradients(100 * t), second = ranks.gradients(100 * t + 1), sums = first;
        for (size_t rank = 0; rank < ranks.size(); ++rank) {
          for (size_t i = 0; i < sums[rank].size(); ++i) {
            first[rank][i].mul_(static_cast<double>(1 + 2 * rank));
            second[rank][i].mul_(static_cast<double>(1 + 2 * rank));
            sums[rank][i] = first[rank][i] + second[rank][i];
          }
        }
        const auto gradients = textbook_gradients(sums);
        const double norm = clipping_norm(textbook, gradients) / 2;
        REQUIRE(sessions.step(ranks, {first, second}) == "");
        const double clip = norm > max_norm ? max_norm / norm : 1.0;
        clipped += clip < 1;
        textbook.step(gradients, clip / 2);
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

TEST_CASE("A3: 1-bit LAMB's compressed step sends a thirtieth of an fp32 ring", "[onebit_lamb]") {
  const int64_t elements = 100'000 + 3'001, ranks_count = 4;
  OneBitLambRanks ranks(ranks_count, {{{{100, 1000}, {3001}}, OneBitLambOptions(0.01).freeze_step(2)}});
  const double ring = 2.0 * (ranks_count - 1) / ranks_count * 4 * static_cast<double>(elements);
  int64_t all = 0;
  for (int64_t t = 1; t <= 6; ++t) {
    CAPTURE(t);
    REQUIRE(ranks.step(ranks.gradients(t)) == "");
    const auto own = ranks.optimizers[1]->bytes_sent();
    const auto bytes = static_cast<double>(ranks.world[1]->bytes_sent() - all);
    CHECK(own == std::max<int64_t>(t - 2, 0) * 2 * (ranks_count - 1) * (16 + 128 * 202 / 8));
    if (t <= 2) CHECK(bytes >= 0.99 * ring);
    if (t > 3) CHECK(bytes <= ring / 30);  // the first one also compares sizes and options
    all = ranks.world[1]->bytes_sent();
  }
  CHECK(ranks.optimizers[0]->compression_error() > 0);
  CHECK(ranks.optimizers[0]->compression_error() < 1);
}

TEST_CASE("a Session refuses 1-bit LAMB's freeze_step while a warm-up still moves",
          "[onebit_lamb][refusals]") {
  for (const int64_t freeze_step : {7, 8}) {
    for (const bool early : {false, true}) {
      CAPTURE(freeze_step, early);
      OneBitLambRanks ranks(
          1, {{{{50}}, OneBitLambOptions(0.01).freeze_step(freeze_step).allow_early_freeze(early)}});
      Sessions sessions(ranks, [](Session& s) { s.use(LearningRate(warmup_cosine({7, 100}))); });
      const std::string message = refusal([&] { (void)sessions.of_rank[0]->begin(at::ones({50})); });
      if (early || freeze_step == 8) {
        CHECK(message == "<no exception>");
        continue;
      }
      CHECK(contains(message, "OneBitLamb"));
      CHECK(contains(message, "learning_rate"));
      CHECK(contains(message, "freeze_step(7)"));
      CHECK(contains(message, "allow_early_freeze(true)"));
    }
  }
}

TEST_CASE("a Session with another Communicator than its OneBitLamb is refused", "[onebit_lamb][refusals]") {
  OneBitLambRanks ranks(1, {{{{50}}, OneBitLambOptions(0.01).freeze_step(3)}});
  Dictated model(ranks.parameters[0]);
  const Ranks others = Communicator::in_process(2);
  Session session(*model, *ranks.optimizers[0], others[0]);
  const std::string message = refusal([&] { (void)session.begin(at::ones({50})); });
  CHECK(contains(message, "OneBitLamb was given a Communicator of 1 ranks"));
  CHECK(contains(message, "of 2; give both the same"));
  others[0]->leave("the test is over");
  others[1]->leave("the test is over");
}

}  // namespace pacer::testing::onebit_lamb_session
