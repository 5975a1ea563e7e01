// Gradients that are touched while they are added up over ranks: what wait() says of them, and that the sums
// of the windows behind it are as if nothing had happened.
#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <torch/types.h>

#include <pacer/collectives/gradient_bucketer.h>
#include <pacer/core/error.h>
#include <pacer/parallel/parameter_shards.h>

#include "support/catch.h"
#include "support/collectives/ranks.h"
#include "support/message_of.h"

namespace pacer::testing::withheld {
namespace {

using Catch::Matchers::ContainsSubstring;
using torch::Tensor;
using Named = std::vector<std::pair<std::string, Tensor>>;

constexpr int kRanks = 2;
constexpr int64_t kElements = 1000;

Named two_parameters() {
  Named named;
  for (const char* name : {"a", "b"}) named.emplace_back(name, at::ones({kElements}).requires_grad_());
  return named;
}

// Gradients of (number + 1) * factor, the last parameter's first.
void backward(const Named& named, double factor) {
  for (size_t i = named.size(); i-- > 0;) {
    (named[i].second * (static_cast<double>(i + 1) * factor)).sum().backward();
  }
}

// Alike on both ranks is what each one adds in a window: this times its rank + 1.
double of_window(int window) { return window == 1 ? 1 : 100; }
double sum_of(int window, size_t i) { return 3 * of_window(window) * static_cast<double>(i + 1); }

void require_all(const Tensor& gradient, double value) {
  RANK_REQUIRE(gradient.defined());
  RANK_REQUIRE(gradient.eq(value).all().item<bool>());
}

// Rank 1 comes late to the first window, so that rank 0's sums are under way still where wait() finds what
// was done to a gradient.
void come_late(int rank) {
  if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(300));
}

std::string on_both(const std::function<void(int, const std::shared_ptr<Communicator>&)>& f) {
  const auto worlds =
      Communicator::in_process(kRanks, CommunicatorOptions().timeout(std::chrono::seconds(20)));
  return first_of(run_ranks(kRanks, [&](int rank) { f(rank, worlds[static_cast<size_t>(rank)]); }));
}

}  // namespace

TEST_CASE("where wait() of a bucketer throws, the sums under way are over", "[collectives]") {
  for (const bool in_place : {false, true}) {
    for (const bool is_cleared : {false, true}) {
      CAPTURE(in_place, is_cleared);
      CHECK(on_both([&](int rank, const std::shared_ptr<Communicator>& world) {
              const Named named = two_parameters();
              GradientBucketer bucketer(named, world, BucketOptions().in_place(in_place));
              come_late(rank);
              bucketer.begin_backward();
              backward(named, of_window(1) * (rank + 1));
              bucketer.end_backward();
              if (rank == 0) {
                Tensor& gradient = named[1].second.mutable_grad();
                gradient = is_cleared ? Tensor() : at::zeros({kElements});
                RANK_REQUIRE(message_of<InvalidArgument>([&] { bucketer.wait(); }).find("parameter b") !=
                             std::string::npos);
              } else {
                bucketer.wait();
                require_all(named[1].second.grad(), sum_of(1, 1));
              }
              require_all(named[0].second.grad(), sum_of(1, 0));
              for (const auto& [name, parameter] : named) parameter.mutable_grad().reset();
              bucketer.begin_backward();
              backward(named, of_window(2) * (rank + 1));
              bucketer.end_backward();
              bucketer.wait();
              for (size_t i = 0; i < named.size(); ++i) require_all(named[i].second.grad(), sum_of(2, i));
            }) == "");
    }
  }
}

TEST_CASE("where wait() of shards throws, the sums under way are over", "[shards]") {
  for (const bool is_cleared : {false, true}) {
    for (const bool accumulates : {false, true}) {
      CAPTURE(is_cleared, accumulates);
      CHECK(on_both([&](int rank, const std::shared_ptr<Communicator>& world) {
              const Named named = two_parameters();
              ParameterShards shards(named, world,
                                     ParameterShardsOptions().reduce_every_backward(!accumulates));
              come_late(rank);
              shards.begin_backward();
              backward(named, of_window(1) * (rank + 1));
              shards.end_backward();
              if (rank == 0) {
                Tensor& gradient = named[1].second.mutable_grad();
                gradient = is_cleared ? Tensor() : at::zeros({kElements});
                RANK_REQUIRE(message_of<InvalidArgument>([&] { shards.wait(); }).find("parameter b") !=
                             std::string::npos);
              } else {
                shards.wait();
              }
              for (const auto& [name, parameter] : named) parameter.mutable_grad().reset();
              shards.begin_backward();
              backward(named, of_window(2) * (rank + 1));
              shards.end_backward();
              shards.wait();
              for (size_t i = 0; i < named.size(); ++i) {
                require_all(shards.parts()[i].gradient, sum_of(2, i));
              }
            }) == "");
    }
  }
}

TEST_CASE("who touches a gradient that travels is told what to do, without a Session and in one",
          "[collectives][shards]") {
  const auto worlds = Communicator::in_process(1);
  const auto check = [](const std::string& words) {
    const std::string said = words.substr(0, words.find('\n'));  // LibTorch adds where it was thrown
    CHECK_THAT(said, ContainsSubstring("parameter b") && ContainsSubstring("call wait() first") &&
                         !ContainsSubstring("Session"));
  };
  const auto touch = [](const Named& named) {
    return message_of([&] { (void)named[1].second.grad().sum().item<double>(); });
  };
  const auto replace = [](const Named& named) { named[1].second.mutable_grad() = at::zeros({kElements}); };
  {
    const Named named = two_parameters();
    GradientBucketer bucketer(named, worlds[0]);
    bucketer.begin_backward();
    backward(named, 1);
    bucketer.end_backward();
    check(touch(named));
    replace(named);
    check(message_of([&] { bucketer.wait(); }));
  }
  {
    const Named named = two_parameters();
    ParameterShards shards(named, worlds[0]);
    shards.begin_backward();
    backward(named, 1);
    shards.end_backward();
    check(touch(named));
    replace(named);
    check(message_of([&] { shards.wait(); }));
  }
}

}  // namespace pacer::testing::withheld
