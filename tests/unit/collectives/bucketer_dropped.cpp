// Windows that are given up while their gradients are being added up: what is under way neither gets into later
// gradients nor is forgotten.
#include <chrono>
#include <exception>
#include <future>
#include <string>
#include <utility>
#include <vector>

#include <pacer/collectives/gradient_bucketer.h>

#include "support/catch.h"
#include "support/collectives/ranks.h"
#include "support/optimizers/optimizers.h"

namespace pacer::testing::dropped_windows {
namespace {

using namespace std::chrono_literals;
using Named = std::vector<std::pair<std::string, Tensor>>;

Named some_parameters() {
  Named named;
  for (const int64_t size : {300, 5, 40}) {
    named.emplace_back(std::to_string(named.size()), torch::ones({size}).requires_grad_());
  }
  return named;
}

// From the last parameter down to number `first`: each gets the gradient `factor`.
void backward(const Named& named, double factor, size_t first = 0) {
  for (size_t i = named.size(); i-- > first;) (named[i].second * factor).sum().backward();
}

bool all_are(const Named& named, double value) {
  for (const auto& item : named) {
    const Tensor& gradient = item.second.grad();
    if (!gradient.defined() || !gradient.eq(value).all().item<bool>()) return false;
  }
  return true;
}

Ranks two_ranks() { return Communicator::in_process(2, CommunicatorOptions().timeout(20s)); }

// Something that one rank has done, for which another one waits.
class Event {
 public:
  void set() { promise_.set_value(); }
  void wait() { RANK_REQUIRE(promise_.get_future().wait_for(20s) == std::future_status::ready); }

 private:
  std::promise<void> promise_;
};

}  // namespace

TEST_CASE("sums of a window that was dropped do not get into later gradients", "[collectives]") {
  for (const bool in_place : {false, true}) {
    CAPTURE(in_place);
    const auto worlds = two_ranks();
    Event has_added, has_sent;
    REQUIRE(first_of(run_ranks(2, [&](int rank) {
              const Named named = some_parameters();
              GradientBucketer bucketer(named, worlds[static_cast<size_t>(rank)],
                                        BucketOptions().in_place(in_place));
              if (rank == 1) has_added.wait();
              bucketer.begin_backward();
              backward(named, 100);
              RANK_REQUIRE(bucketer.buckets_sent() == 1);
              bucketer.drop();
              for (const auto& item : named) RANK_REQUIRE(!item.second.grad().defined());
              backward(named, 1);  // of a micro-step that sends nothing
              if (rank == 0) {
                has_added.set();
                has_sent.wait();  // only now there are the sums of what was dropped
              } else {
                has_sent.set();
              }
              RANK_REQUIRE(all_are(named, 1));
              for (int window = 0; window < 2; ++window) {
                bucketer.begin_backward();
                backward(named, 2 + rank);
                bucketer.end_backward();
                bucketer.wait();
                RANK_REQUIRE(all_are(named, window == 0 ? 2 + 5 : 5));
                for (const auto& item : named) item.second.mutable_grad().reset();
              }
            })) == "");
  }
}

TEST_CASE("a window may be dropped before its backward has ended on one rank, and behind that on another",
          "[collectives]") {
  for (const bool unused_is_zero : {false, true}) {
    CAPTURE(unused_is_zero);
    const auto worlds = two_ranks();
    REQUIRE(first_of(run_ranks(2, [&](int rank) {
              const Named named = some_parameters();
              GradientBucketer bucketer(named, worlds[static_cast<size_t>(rank)],
                                        BucketOptions().unused_is_zero(unused_is_zero));
              bucketer.begin_backward();
              backward(named, 100);
              if (rank == 0) bucketer.end_backward();
              bucketer.drop();
              bucketer.drop();  // there is nothing more
              bucketer.begin_backward();
              backward(named, 2 + rank);
              bucketer.end_backward();
              bucketer.wait();
              RANK_REQUIRE(all_are(named, 5));
            })) == "");
  }
}

TEST_CASE("ranks that have sent different parts of a window that was dropped are told so", "[collectives]") {
  const auto worlds = two_ranks();
  const auto messages = run_ranks(2, [&](int rank) {
    const Named named = some_parameters();
    GradientBucketer bucketer(named, worlds[static_cast<size_t>(rank)],
                              BucketOptions().bucket_bytes(1).first_bucket_bytes(1));
    bucketer.begin_backward();
    backward(named, 1, /*first=*/rank == 0 ? 2 : 1);
    bucketer.drop();
    bucketer.begin_backward();
  });
  for (const std::string& message : messages) {
    CHECK(contains(message, "buckets sent by rank 0: 1, by rank 1: 2"));
    CHECK(contains(message, "leave()"));
  }
}

TEST_CASE("that the sums of a dropped window failed is an error of the next one", "[collectives]") {
  const auto worlds = two_ranks();
  const auto messages = run_ranks(2, [&](int rank) {
    if (rank == 1) return worlds[1]->leave("it goes no further");
    const Named named = some_parameters();
    GradientBucketer bucketer(named, worlds[0]);
    bucketer.begin_backward();
    try {
      backward(named, 1);
    } catch (const std::exception&) {  // the other rank had left by then
    }
    bucketer.drop();
    bucketer.begin_backward();
  });
  CHECK(contains(messages[0], "it goes no further"));
}

}  // namespace pacer::testing::dropped_windows
