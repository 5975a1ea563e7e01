// The sequence-length schedule: known lengths, the cases that broke other curricula, and what it refuses.
// Bounds and monotony over random configurations are in tests/property/schedulers_rules.cpp.
#include <limits>

#include <pacer/core/error.h>
#include <pacer/schedulers/length_schedule.h>

#include "support/catch.h"

namespace pacer::testing {
namespace {

using Catch::Matchers::ContainsSubstring;

Progress length_progress(int64_t step, int64_t tokens = 0) {
  Progress progress;
  progress.step = step;
  progress.tokens = tokens;
  return progress;
}

int64_t length_at(const LengthSchedule& schedule, int64_t step, int64_t tokens = 0) {
  return schedule.length(length_progress(step, tokens));
}

bool settled_at(const LengthSchedule& schedule, int64_t step, int64_t tokens = 0) {
  return schedule.settled(length_progress(step, tokens));
}

}  // namespace

TEST_CASE("a linear ramp goes from the first to the last length in multiples of 8", "[schedulers][length]") {
  const LengthSchedule schedule = LengthSchedule(64, 1024).ramp_steps(10'000);
  CHECK(length_at(schedule, 0) == 64);
  CHECK(length_at(schedule, 83) == 64);  // 71.97
  CHECK(length_at(schedule, 84) == 72);  // 72.06
  CHECK(length_at(schedule, 5'000) == 544);
  CHECK(length_at(schedule, 4'999) == 536);  // 543.9
  CHECK(length_at(schedule, 9'999) == 1016);
  CHECK(length_at(schedule, 10'000) == 1024);
  CHECK(length_at(schedule, std::numeric_limits<int64_t>::max()) == 1024);
  CHECK_FALSE(settled_at(schedule, 9'999));
  CHECK(settled_at(schedule, 10'000));
}

TEST_CASE("a root ramp arrives exactly on the values that pow just misses", "[schedulers][length]") {
  // Where the share done is (k / m)^2, root 2 is k / m of the way; pow misses it for k = 13, m = 15 and more.
  for (int64_t m = 1; m <= 50; ++m) {
    const LengthSchedule schedule = LengthSchedule(1, 1 + m).ramp_steps(m * m).root(2).difficulty_step(1);
    for (int64_t k = 1; k <= m; ++k) {
      REQUIRE(length_at(schedule, k * k) == 1 + k);
      REQUIRE(length_at(schedule, k * k - 1) == k);
    }
  }
  CHECK(length_at(LengthSchedule(8, 808).ramp_steps(1'000).root(3), 216) == 488);  // six tenths of the way
  const LengthSchedule square = LengthSchedule(8, 808).ramp_steps(10'000).root(2);
  CHECK(length_at(square, 2'500) == 408);
  CHECK(length_at(LengthSchedule(8, 808).ramp_steps(100).root(0.5), 50) == 208);  // a quarter of the way
}

TEST_CASE("a ramp by tokens looks at tokens only", "[schedulers][length]") {
  const LengthSchedule schedule = LengthSchedule(8, 88).ramp_tokens(1'000);
  CHECK(length_at(schedule, 1'000'000, 0) == 8);
  CHECK(length_at(schedule, 0, 500) == 48);
  CHECK_FALSE(settled_at(schedule, 1'000'000, 999));
  CHECK(settled_at(schedule, 0, 1'000));
  CHECK(length_at(LengthSchedule(8, 88).ramp_steps(1'000), 0, 1'000'000) == 8);
}

TEST_CASE("no length is below the first or beyond the last, whatever the step", "[schedulers][length]") {
  const LengthSchedule small = LengthSchedule(4, 64).ramp_steps(60);
  CHECK(length_at(small, 0) == 4);  // 8 does not go into 4
  CHECK(length_at(small, 3) == 4);  // 7
  CHECK(length_at(small, 4) == 8);
  CHECK(length_at(LengthSchedule(10, 64).ramp_steps(60), 0) == 10);
  CHECK(length_at(LengthSchedule(64, 100).ramp_steps(10), 9) == 96);  // 100 is no multiple of 8, but the end
  CHECK(length_at(LengthSchedule(64, 100).ramp_steps(10), 10) == 100);
  const LengthSchedule wide = LengthSchedule(5, 9).ramp_steps(10).difficulty_step(1'000);
  for (int64_t step = 0; step < 10; ++step) CHECK(length_at(wide, step) == 5);
  CHECK(length_at(wide, 10) == 9);
}

TEST_CASE("a ramp of no steps and a ramp to where it starts divide by nothing", "[schedulers][length]") {
  CHECK(length_at(LengthSchedule(64, 1024).ramp_steps(0), 0) == 1024);
  CHECK(settled_at(LengthSchedule(64, 1024).ramp_tokens(0), 0));
  CHECK(length_at(LengthSchedule(60, 60).ramp_steps(10).root(2), 5) == 60);
}

TEST_CASE("lengths up to the end of 64 bits do not overflow", "[schedulers][length]") {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  const LengthSchedule schedule = LengthSchedule(1, kMost).ramp_steps(kMost);
  CHECK(length_at(schedule, kMost - 1) >= kMost - 8);
  CHECK(length_at(schedule, kMost) == kMost);
  CHECK(length_at(LengthSchedule(kMost, kMost).ramp_steps(kMost), 1) == kMost);
  const int64_t middle = length_at(schedule, int64_t{1} << 62);
  CHECK(middle >= int64_t{1} << 62);
  CHECK(middle - (int64_t{1} << 62) < int64_t{1} << 23);  // the lift of 2^-40
}

TEST_CASE("a table is taken as written", "[schedulers][length]") {
  const LengthSchedule schedule = LengthSchedule(64, 1024).table({{100, 100}, {200, 333}, {300, 1024}});
  CHECK(length_at(schedule, 0) == 64);
  CHECK(length_at(schedule, 99) == 64);
  CHECK(length_at(schedule, 100) == 100);
  CHECK(length_at(schedule, 299) == 333);
  CHECK_FALSE(settled_at(schedule, 299));
  CHECK(length_at(schedule, 300) == 1024);
  CHECK(settled_at(schedule, 300));
  const LengthSchedule by_tokens = LengthSchedule(64, 1024).by_tokens().table({{1'000, 1024}});
  CHECK(length_at(by_tokens, 5'000, 999) == 64);
  CHECK(length_at(by_tokens, 0, 1'000) == 1024);
}

TEST_CASE("a custom function is rounded and clamped", "[schedulers][length]") {
  const LengthSchedule schedule = LengthSchedule(64, 1024).custom([](int64_t step) { return step; });
  CHECK(length_at(schedule, 0) == 64);
  CHECK(length_at(schedule, 79) == 72);
  CHECK(length_at(schedule, 80) == 80);
  CHECK_FALSE(settled_at(schedule, 1'023));
  CHECK(length_at(schedule, 1'030) == 1024);
  CHECK(settled_at(schedule, 1'030));
  const LengthSchedule negative =
      LengthSchedule(64, 1024).custom([](int64_t) { return std::numeric_limits<int64_t>::min(); });
  CHECK(length_at(negative, 5) == 64);
  const LengthSchedule by_tokens = LengthSchedule(64, 1024)
                                       .custom([](int64_t tokens) { return tokens / 2; })
                                       .difficulty_step(1)
                                       .by_tokens();
  CHECK(length_at(by_tokens, 0, 401) == 200);
}

TEST_CASE("a sequence-length schedule refuses what is out of range", "[schedulers][length]") {
  CHECK_THROWS_AS(LengthSchedule(0, 8), InvalidArgument);
  CHECK_THROWS_WITH(LengthSchedule(9, 8), ContainsSubstring("9") && ContainsSubstring("swap"));
  LengthSchedule schedule(8, 64);
  CHECK_THROWS_WITH(schedule.ramp_steps(-1), ContainsSubstring("ramp_steps"));
  CHECK_THROWS_WITH(schedule.ramp_tokens(-1), ContainsSubstring("ramp_tokens"));
  CHECK_THROWS_WITH(schedule.difficulty_step(0), ContainsSubstring("difficulty_step"));
  for (const double bad :
       {0.0, -1.0, std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    CHECK_THROWS_WITH(schedule.root(bad), ContainsSubstring("root"));
  }
  CHECK_THROWS_WITH(schedule.table({}), ContainsSubstring("empty"));
  CHECK_THROWS_WITH(schedule.table({{-1, 64}}), ContainsSubstring("boundaries"));
  CHECK_THROWS_WITH(schedule.table({{5, 16}, {5, 64}}), ContainsSubstring("boundaries"));
  CHECK_THROWS_WITH(schedule.table({{5, 7}, {6, 64}}), ContainsSubstring("decrease"));
  CHECK_THROWS_WITH(schedule.table({{5, 32}, {6, 16}, {7, 64}}), ContainsSubstring("decrease"));
  CHECK_THROWS_WITH(schedule.table({{5, 32}}), ContainsSubstring("ends at 32"));
  CHECK_THROWS_WITH(schedule.table({{5, 65}}), ContainsSubstring("ends at 65"));
  CHECK_THROWS_WITH(schedule.custom(nullptr), ContainsSubstring("empty function"));
  CHECK_THROWS_WITH(schedule.length(length_progress(0)), ContainsSubstring("no way"));
  CHECK_THROWS_WITH(schedule.settled(length_progress(0)), ContainsSubstring("no way"));
  schedule.ramp_steps(10);
  CHECK_NOTHROW(schedule.validate());
  CHECK_THROWS_AS(length_at(schedule, -1), InvalidArgument);
  CHECK_THROWS_AS(length_at(schedule, 0, -1), InvalidArgument);
}

TEST_CASE("a sequence-length schedule refuses contradictions and keeps what it had", "[schedulers][length]") {
  const auto twice = [](int64_t step) { return 2 * step; };
  LengthSchedule ramp = LengthSchedule(8, 64).ramp_steps(8);
  CHECK_THROWS_WITH(ramp.ramp_tokens(8), ContainsSubstring("ramp_steps and ramp_tokens"));
  CHECK_THROWS_WITH(ramp.table({{1, 64}}), ContainsSubstring("more than one"));
  CHECK_THROWS_WITH(ramp.custom(twice), ContainsSubstring("more than one"));
  CHECK_THROWS_WITH(ramp.by_tokens(), ContainsSubstring("ramp_tokens"));
  CHECK(length_at(ramp, 4) == 32);  // 36

  LengthSchedule table = LengthSchedule(8, 64).table({{1, 64}});
  CHECK_THROWS_WITH(table.root(2), ContainsSubstring("root"));
  CHECK_THROWS_WITH(table.difficulty_step(4), ContainsSubstring("difficulty_step"));
  CHECK_THROWS_WITH(table.custom(twice), ContainsSubstring("more than one"));
  CHECK_THROWS_WITH(LengthSchedule(8, 64).custom(twice).root(2), ContainsSubstring("root"));
  CHECK_THROWS_WITH(LengthSchedule(8, 64).difficulty_step(4).table({{1, 64}}),
                    ContainsSubstring("difficulty_step"));
  CHECK_THROWS_WITH(LengthSchedule(8, 64).root(2).custom(twice), ContainsSubstring("root"));
  CHECK(length_at(table, 1) == 64);
}

}  // namespace pacer::testing
