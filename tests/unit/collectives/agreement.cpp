// The comparison of facts between ranks: which difference is named, for lists that differ anywhere, and what
// it costs while all agree.
#include <random>

#include <pacer/collectives/agreement.h>

#include "support/catch.h"
#include "support/collectives/ranks.h"
#include "support/optimizers/optimizers.h"

namespace pacer::testing {
namespace {

using Facts = std::vector<Fact>;

std::vector<std::string> compare(const std::vector<Facts>& facts, const Ranks& worlds) {
  return run_ranks(static_cast<int>(facts.size()), [&](int rank) {
    const auto r = static_cast<size_t>(rank);
    require_agreement(*worlds[r], 7, facts[r]);
  });
}

}  // namespace

TEST_CASE("equal facts cost one small message", "[collectives][agreement]") {
  Facts facts;
  for (int i = 0; i < 1000; ++i) facts.push_back({"parameter " + std::to_string(i), std::string(200, 'x')});
  const auto worlds = Communicator::in_process(4);
  REQUIRE(first_of(compare(std::vector<Facts>(4, facts), worlds)) == "");
  CHECK(worlds[0]->traffic().size() == 1);
  CHECK(worlds[0]->traffic()[0].calls == 1);
  CHECK(worlds[0]->bytes_sent() <= 3 * 128);
}

TEST_CASE("the first difference is named on every rank, wherever it is", "[collectives][agreement]") {
  std::mt19937 random(5);
  for (int round = 0; round < 60; ++round) {
    const size_t count = 1 + random() % 40, place = random() % count, world_size = 2 + random() % 4;
    Facts facts;
    for (size_t i = 0; i < count; ++i)
      facts.push_back({"fact " + std::to_string(i), std::to_string(random())});
    std::vector<Facts> all(world_size, facts);
    const size_t odd = random() % world_size;
    std::string expected;
    switch (random() % 4) {
      case 0:  // another value, and others after it
        all[odd][place].value = "other";
        for (size_t i = place + 1; i < count; ++i) all[odd][i].value += "x";
        expected = "fact " + std::to_string(place) + ": other";
        break;
      case 1:  // another name
        all[odd][place].what = "renamed";
        expected = "renamed: " + facts[place].value;
        break;
      case 2:  // one less
        all[odd].erase(all[odd].begin() + static_cast<std::ptrdiff_t>(place));
        expected = "fact " + std::to_string(place) + ": " + facts[place].value;
        break;
      default:  // one more at the end
        all[odd].push_back({"more", "of it"});
        expected = "nothing more";
    }
    INFO(count << " facts, place " << place << ", rank " << odd << " of " << world_size);
    const auto worlds = Communicator::in_process(static_cast<int>(world_size));
    const auto messages = compare(all, worlds);
    for (const std::string& message : messages) {
      CHECK(contains(message, "the ranks disagree: rank 0 has \""));
      CHECK(contains(message, expected));
    }
    // Nothing is broken by it.
    REQUIRE(first_of(compare(std::vector<Facts>(world_size, facts), worlds)) == "");
  }
}

TEST_CASE("long facts are cut in messages, and differ all the same", "[collectives][agreement]") {
  const std::string text(100'000, 'y');
  const auto worlds = Communicator::in_process(2);
  const auto messages = compare({{{"long", text + "a"}}, {{"long", text + "b"}}}, worlds);
  for (const std::string& message : messages) {
    CHECK(contains(message, "the ranks disagree"));
    CHECK(message.size() < 1000);
  }
}

TEST_CASE("ranks with other intents are told who does what", "[collectives][agreement]") {
  const auto worlds = Communicator::in_process(3);
  const auto messages = run_ranks(3, [&](int rank) {
    RankStatus status;
    status.intent = rank == 2 ? Intent::finish : Intent::step;
    status.step = 11;
    status.micro_steps = 4;
    StatusExchange(*worlds[static_cast<size_t>(rank)], status).wait();
  });
  for (const std::string& message : messages) {
    CHECK(contains(
        message,
        "rank 0 takes a step of 4 micro-steps after step 11, rank 2 has no more data after step 11"));
  }
  std::vector<std::vector<RankStatus>> seen(3);
  REQUIRE(first_of(run_ranks(3, [&](int rank) {
            RankStatus status;
            status.weight = rank + 0.5;
            status.tokens = 100 * rank;
            seen[static_cast<size_t>(rank)] =
                StatusExchange(*worlds[static_cast<size_t>(rank)], status).wait();
          })) == "");
  for (const auto& all : seen) {
    REQUIRE(all.size() == 3);
    for (int rank = 0; rank < 3; ++rank) {
      CHECK(all[static_cast<size_t>(rank)].weight == rank + 0.5);
      CHECK(all[static_cast<size_t>(rank)].tokens == 100 * rank);
    }
  }
}

}  // namespace pacer::testing
