// Buckets that leave in order, against a restatement that keeps lists of names: gradients in any order, absent ones,
// those that come twice or too late, and backwards that are given up in the middle.
#include <algorithm>
#include <cstddef>
#include <random>
#include <set>
#include <vector>

#include <pacer/collectives/detail/arrival_order.h>

#include "support/catch.h"

namespace pacer::testing::arrival_order {
namespace {

// Each bucket is the set of those that it waits for.
struct Restatement {
  std::vector<std::set<size_t>> members;  // by bucket
  std::vector<std::set<size_t>> waits_for = {};
  std::set<size_t> absent, arrived;
  std::vector<size_t> left;

  void reset() {
    waits_for = members;
    absent.clear();
    arrived.clear();
    left.clear();
  }
  bool arrive(size_t position) {
    absent.erase(position);
    arrived.insert(position);
    return forget(position);
  }
  void set_absent(size_t position) {
    if (forget(position)) absent.insert(position);
  }
  bool forget(size_t position) {
    size_t erased = 0;
    for (std::set<size_t>& bucket : waits_for) erased += bucket.erase(position);
    return erased == 1;
  }
  bool next_is_full() const { return left.size() < members.size() && waits_for[left.size()].empty(); }
  bool has_left(size_t position) const {
    return std::any_of(left.begin(), left.end(),
                       [&](size_t bucket) { return members[bucket].count(position) == 1; });
  }
};

void require_same(const detail::ArrivalOrder& order, const Restatement& wanted, size_t positions) {
  REQUIRE(order.next() == wanted.left.size());
  REQUIRE(order.next_is_full() == wanted.next_is_full());
  for (size_t i = 0; i < positions; ++i) {
    CAPTURE(i);
    const bool is_absent = wanted.absent.count(i) == 1, has_arrived = wanted.arrived.count(i) == 1;
    REQUIRE(order.is_absent(i) == is_absent);
    REQUIRE(order.has_arrived(i) == has_arrived);
    REQUIRE(order.is_awaited(i) == (!is_absent && !has_arrived));
    REQUIRE(order.has_left(i) == wanted.has_left(i));
  }
}

}  // namespace

TEST_CASE("buckets leave in order, whatever the order in which gradients arrive", "[collectives]") {
  std::mt19937 random(7);
  for (int trial = 0; trial < 300; ++trial) {
    const size_t positions = 1 + random() % 12, buckets = 1 + random() % 5;
    CAPTURE(trial, positions, buckets);
    detail::ArrivalOrder order;
    Restatement wanted;
    wanted.members.resize(buckets);
    std::vector<size_t> shuffled;
    for (size_t i = 0; i < positions; ++i) shuffled.push_back(i);
    std::shuffle(shuffled.begin(), shuffled.end(), random);
    for (const size_t i : shuffled) {
      const size_t bucket = i == 0 ? buckets - 1 : random() % buckets;  // others may have none
      order.put(i, bucket);
      REQUIRE(order.bucket_of(i) == bucket);
      wanted.members[bucket].insert(i);
    }
    for (int backward = 0; backward < 4; ++backward) {
      CAPTURE(backward);
      order.reset();  // often before all of the last one's have left
      wanted.reset();
      require_same(order, wanted, positions);
      for (size_t event = random() % (4 * positions); event > 0; --event) {
        const size_t i = random() % positions;
        switch (random() % 8) {
          case 0:
            order.set_absent(i);
            wanted.set_absent(i);
            break;
          case 1:
          case 2:
            for (; wanted.next_is_full(); wanted.left.push_back(wanted.left.size())) {
              REQUIRE(order.next_is_full());
              REQUIRE(order.leave() == wanted.left.size());
            }
            break;
          default:
            REQUIRE(order.arrive(i) == wanted.arrive(i));
        }
        require_same(order, wanted, positions);
      }
      if (backward % 2 == 1) {
        order.set_rest_absent();
        for (size_t i = 0; i < positions; ++i) wanted.set_absent(i);
        require_same(order, wanted, positions);
        while (order.next_is_full()) wanted.left.push_back(order.leave());
        REQUIRE(wanted.left.size() == buckets);
      }
    }
  }
}

TEST_CASE("a position that is put into another bucket counts there from the next backward on",
          "[collectives]") {
  detail::ArrivalOrder order;
  for (const size_t i : {0, 1, 2}) order.put(i, i);
  order.reset();
  order.arrive(0);
  CHECK(order.leave() == 0);
  for (const size_t i : {0, 1, 2}) order.put(i, i == 0 ? 1 : 0);
  order.reset();
  order.arrive(1);
  CHECK_FALSE(order.next_is_full());
  order.arrive(2);
  CHECK(order.next_is_full());
  CHECK(order.leave() == 0);
  CHECK_FALSE(order.next_is_full());
  CHECK(order.has_left(2));
  CHECK_FALSE(order.has_left(0));
  order.arrive(0);
  CHECK(order.leave() == 1);
  CHECK_FALSE(order.next_is_full());
}

}  // namespace pacer::testing::arrival_order
