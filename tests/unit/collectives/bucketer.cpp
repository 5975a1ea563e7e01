// The GradientBucketer over threads: where gradients lie, when they are sent, in which order, and what is
// left out; sums against sums made by hand.
#include <algorithm>
#include <cmath>

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>

#include <pacer/collectives/gradient_bucketer.h>

#include "support/catch.h"
#include "support/collectives/ranks.h"
#include "support/optimizers/optimizers.h"

namespace pacer::testing {
namespace {

using Named = std::vector<std::pair<std::string, Tensor>>;

// Parameters "0", "1", ... of these sizes.
Named parameters_of_sizes(const std::vector<int64_t>& sizes, at::ScalarType type = at::kFloat) {
  Named named;
  for (const int64_t size : sizes) {
    named.emplace_back(std::to_string(named.size()), torch::ones({size}, type).requires_grad_());
  }
  return named;
}

// Every parameter gets the gradient (its number + 1) * factor, the last one first.
void backward(const Named& named, double factor, const std::vector<size_t>& without = {}) {
  for (size_t i = named.size(); i-- > 0;) {
    if (std::count(without.begin(), without.end(), i)) continue;
    (named[i].second * (static_cast<double>(i + 1) * factor)).sum().backward();
  }
}

std::vector<std::vector<std::string>> buckets_of(const Named& named, int64_t bytes, int64_t first) {
  return GradientBucketer(named, Communicator::in_process(1)[0],
                          BucketOptions().bucket_bytes(bytes).first_bucket_bytes(first))
      .buckets();
}

int64_t all_reduces(const Communicator& world) { return traffic_of(world, "all_reduce").calls; }

}  // namespace

TEST_CASE("buckets fill from the last parameter on, each to its limit, one dtype each", "[collectives]") {
  using Names = std::vector<std::vector<std::string>>;
  const Named named = parameters_of_sizes({128, 128, 256, 1});  // 512, 512, 1024, 512 bytes with padding
  CHECK(buckets_of(named, 1024, 1024) == Names{{"3", "2"}, {"1", "0"}});
  CHECK(buckets_of(named, 1024, 512) == Names{{"3"}, {"2"}, {"1", "0"}});
  CHECK(buckets_of(named, 1025, 513) == Names{{"3", "2"}, {"1", "0"}});
  CHECK(buckets_of(named, 1 << 20, 1) == Names{{"3"}, {"2", "1", "0"}});
  CHECK(buckets_of(named, 1 << 20, 1 << 20) == Names{{"3", "2", "1", "0"}});
  CHECK(buckets_of(named, 1, 1) == Names{{"3"}, {"2"}, {"1"}, {"0"}});
  Named mixed = named;
  mixed.emplace_back("half", torch::ones({8}, at::kBFloat16).requires_grad_());
  mixed.emplace_back("frozen", torch::ones({8}));
  CHECK(buckets_of(mixed, 1 << 20, 1 << 20) == Names{{"half"}, {"3", "2", "1", "0"}});
  CHECK(buckets_of({}, 1, 1).empty());
}

TEST_CASE("gradients become sums over ranks, as views, while backward runs", "[collectives]") {
  for (const int world_size : {1, 2, 3}) {
    const auto worlds = Communicator::in_process(world_size);
    const auto check = [&](int rank) {
      const Named named = parameters_of_sizes({300, 0, 5, 700, 1});
      GradientBucketer bucketer(named, worlds[static_cast<size_t>(rank)],
                                BucketOptions().bucket_bytes(2000).first_bucket_bytes(600));
      for (int step = 1; step <= 3; ++step) {
        bucketer.begin_backward();
        backward(named, step * (rank + 1));
        bucketer.end_backward();
        RANK_REQUIRE(bucketer.buckets_sent_early() == bucketer.buckets_sent());
        RANK_REQUIRE(bucketer.buckets_sent() == static_cast<int64_t>(bucketer.buckets().size()));
        bucketer.wait();
        for (size_t i = 0; i < named.size(); ++i) {
          const double sum = static_cast<double>(i + 1) * step * world_size * (world_size + 1) / 2;
          RANK_REQUIRE(named[i].second.grad().eq(sum).all().item<bool>());
          named[i].second.mutable_grad().detach_();  // as zero_grad does
          named[i].second.mutable_grad().reset();
        }
      }
    };
    REQUIRE(first_of(run_ranks(world_size, check)) == "");
  }
}

TEST_CASE("the first bucket travels before backward has reached the first layer", "[collectives]") {
  const auto worlds = Communicator::in_process(2);
  std::vector<int64_t> sent_by_then(2), in_all(2);
  std::vector<torch::nn::Sequential> models;
  for (int i = 0; i < 2; ++i) {
    models.push_back(
        torch::nn::Sequential(torch::nn::Linear(4, 4), torch::nn::Linear(4, 4), torch::nn::Linear(4, 4)));
  }
  REQUIRE(first_of(run_ranks(2, [&](int rank) {
            const auto r = static_cast<size_t>(rank);
            Named named;
            for (const auto& item : models[r]->named_parameters())
              named.emplace_back(item.key(), item.value());
            GradientBucketer bucketer(named, worlds[r],
                                      BucketOptions().bucket_bytes(1).first_bucket_bytes(1));
            Tensor x = torch::ones({2, 4});
            const Tensor h = models[r]->children()[0]->as<torch::nn::Linear>()->forward(x);
            h.register_hook([&](const Tensor&) { sent_by_then[r] = all_reduces(*worlds[r]); });
            bucketer.begin_backward();
            models[r]
                ->children()[2]
                ->as<torch::nn::Linear>()
                ->forward(models[r]->children()[1]->as<torch::nn::Linear>()->forward(h))
                .sum()
                .backward();
            bucketer.end_backward();
            bucketer.wait();
            in_all[r] = all_reduces(*worlds[r]);
          })) == "");
  for (const int64_t sent : sent_by_then) CHECK(sent == 4);
  for (const int64_t sent : in_all) CHECK(sent == 6);
}

TEST_CASE("all ranks take over the order in which rank 0's gradients came", "[collectives]") {
  const auto worlds = Communicator::in_process(3);
  std::vector<std::vector<std::vector<std::string>>> orders(3);
  REQUIRE(first_of(run_ranks(3, [&](int rank) {
            const Named named = parameters_of_sizes({128, 128, 128, 128});
            GradientBucketer bucketer(named, worlds[static_cast<size_t>(rank)],
                                      BucketOptions().bucket_bytes(1024).first_bucket_bytes(512));
            const std::vector<size_t> order =
                rank == 0 ? std::vector<size_t>{1, 3, 0, 2} : std::vector<size_t>{2, 0, 3, 1};
            for (int step = 0; step < 3; ++step) {
              bucketer.begin_backward();
              for (const size_t i : order) (named[i].second * (rank + 1)).sum().backward();
              bucketer.end_backward();
              bucketer.wait();
              for (const auto& item : named) {
                RANK_REQUIRE(item.second.grad().eq(6).all().item<bool>());
                item.second.mutable_grad().reset();
              }
            }
            orders[static_cast<size_t>(rank)] = bucketer.buckets();
          })) == "");
  for (const auto& order : orders) {
    CHECK(order == std::vector<std::vector<std::string>>{{"1"}, {"3", "0"}, {"2"}});
  }
}

TEST_CASE("a known order is used from the first window on", "[collectives]") {
  const auto world = Communicator::in_process(1)[0];
  const Named named = parameters_of_sizes({128, 128, 128});
  GradientBucketer bucketer(named, world, BucketOptions().bucket_bytes(1).first_bucket_bytes(1));
  CHECK(bucketer.order().empty());
  CHECK(contains(refusal([&] { bucketer.use_order({0, 1}); }), "each of the 3"));
  CHECK(contains(refusal([&] { bucketer.use_order({0, 1, 1}); }), "each of the 3"));
  bucketer.use_order({1, 2, 0});
  CHECK(bucketer.order() == std::vector<int64_t>{1, 2, 0});
  const auto buckets = bucketer.buckets();
  CHECK(buckets == std::vector<std::vector<std::string>>{{"1"}, {"2"}, {"0"}});
  bucketer.begin_backward();
  backward(named, 1);
  bucketer.end_backward();
  bucketer.wait();
  CHECK(bucketer.buckets() == buckets);
}

TEST_CASE("what is zero everywhere is not sent, what is done is sent at once", "[collectives]") {
  const auto worlds = Communicator::in_process(2);
  REQUIRE(first_of(run_ranks(2, [&](int rank) {
            Communicator& world = *worlds[static_cast<size_t>(rank)];
            const Named named = parameters_of_sizes({128, 128, 128, 128});
            GradientBucketer bucketer(named, worlds[static_cast<size_t>(rank)],
                                      BucketOptions().bucket_bytes(1024).first_bucket_bytes(1024));
            // Buckets {3, 2} and {1, 0}. Bucket 0 is zero as a whole; of bucket 1 parameter 1 is done, with a
            // gradient from an earlier backward.
            (named[1].second * 5).sum().backward();
            bucketer.begin_backward({named[2].second, named[3].second}, {named[1].second});
            backward(named, rank + 1, {1, 2, 3});
            bucketer.end_backward();
            bucketer.wait();
            RANK_REQUIRE(all_reduces(world) == 1);
            RANK_REQUIRE(bucketer.buckets_sent() == 1);
            RANK_REQUIRE(named[0].second.grad().eq(3).all().item<bool>());
            RANK_REQUIRE(named[1].second.grad().eq(10).all().item<bool>());
            for (const size_t i : {2, 3}) RANK_REQUIRE(named[i].second.grad().eq(0).all().item<bool>());
            for (const auto& item : named) item.second.mutable_grad().reset();
            // One of a bucket is zero: the bucket travels.
            bucketer.begin_backward({named[2].second});
            backward(named, rank + 1, {2});
            bucketer.end_backward();
            bucketer.wait();
            RANK_REQUIRE(all_reduces(world) == 3);
            RANK_REQUIRE(named[2].second.grad().eq(0).all().item<bool>());
            RANK_REQUIRE(named[3].second.grad().eq(12).all().item<bool>());
          })) == "");
}

TEST_CASE("bf16 on the wire rounds each gradient once and each sum once, alike on all ranks",
          "[collectives]") {
  const auto worlds = Communicator::in_process(2);
  std::vector<Tensor> own(2), sums(2);
  for (int rank = 0; rank < 2; ++rank) own[static_cast<size_t>(rank)] = torch::randn({1000});
  REQUIRE(first_of(run_ranks(2, [&](int rank) {
            const auto r = static_cast<size_t>(rank);
            const Named named = parameters_of_sizes({1000});
            GradientBucketer bucketer(named, worlds[r], BucketOptions().wire_dtype(at::kBFloat16));
            bucketer.begin_backward();
            (named[0].second * own[r]).sum().backward();
            bucketer.end_backward();
            bucketer.wait();
            sums[r] = named[0].second.grad().clone();
            RANK_REQUIRE(worlds[r]->bytes_sent() >= 2 * 1024);
            RANK_REQUIRE(bucketer.bucket_bytes() == std::vector<int64_t>{2 * 1024});
          })) == "");
  CHECK(sums[0].equal(sums[1]));
  // bf16 has 8 significant bits: rounding changes a value by 2^-8 of it at most; two terms, and their sum.
  const double unit = std::ldexp(1.0, -8);
  const Tensor bound = (own[0].abs() + own[1].abs()) * (unit + unit * (1 + unit));
  CHECK((sums[0] - (own[0] + own[1])).abs().le(bound).all().item<bool>());
  CHECK_FALSE(sums[0].equal(own[0] + own[1]));
}

TEST_CASE("fp16 gradients are divided before they are added", "[collectives]") {
  const auto worlds = Communicator::in_process(4);
  REQUIRE(first_of(run_ranks(4, [&](int rank) {
            const Named named = parameters_of_sizes({10}, at::kHalf);
            GradientBucketer bucketer(named, worlds[static_cast<size_t>(rank)]);
            bucketer.begin_backward();
            (named[0].second * 40000).sum(at::kHalf).backward();
            bucketer.end_backward();
            bucketer.wait();
            RANK_REQUIRE(bucketer.scale() == 0.25);
            RANK_REQUIRE(named[0].second.grad().eq(40000).all().item<bool>());
          })) == "");
}

TEST_CASE("views have their parameter's memory order", "[collectives]") {
  const auto world = Communicator::in_process(1)[0];
  Tensor parameter = torch::randn({2, 3, 4, 5}).contiguous(at::MemoryFormat::ChannelsLast).requires_grad_();
  Tensor scalar = torch::ones({}).requires_grad_();
  const Tensor slope = torch::randn({2, 3, 4, 5});
  GradientBucketer bucketer({{"p", parameter}, {"s", scalar}}, world);
  bucketer.begin_backward();
  ((parameter * slope).sum() * scalar).backward();
  bucketer.end_backward();
  bucketer.wait();
  CHECK(parameter.grad().strides() == parameter.strides());
  CHECK(parameter.grad().equal(slope));
  CHECK(scalar.grad().dim() == 0);
}

TEST_CASE("a hook that was there is still called, and stays when the bucketer goes", "[collectives]") {
  struct Counter : torch::autograd::PostAccumulateGradHook {
    explicit Counter(int& calls) : calls_(calls) {}
    void operator()(const Tensor&) override { ++calls_; }
    int& calls_;
  };
  int calls = 0;
  const Named named = parameters_of_sizes({4});
  torch::autograd::impl::set_post_acc_grad_hooks(named[0].second, std::make_unique<Counter>(calls));
  {
    GradientBucketer bucketer(named, Communicator::in_process(1)[0]);
    bucketer.begin_backward();
    backward(named, 1);
    bucketer.end_backward();
    bucketer.wait();
    CHECK(calls == 1);
  }
  backward(named, 1);
  CHECK(calls == 2);
}

TEST_CASE("a bucketer refuses what it cannot reduce, and says why", "[collectives]") {
  const auto world = Communicator::in_process(1)[0];
  const Named named = parameters_of_sizes({4, 4});
  CHECK(contains(refusal([&] { GradientBucketer(named, nullptr); }), "Communicator"));
  CHECK(contains(refusal([&] { GradientBucketer(named, world, BucketOptions().bucket_bytes(0)); }),
                 "bucket_bytes"));
  CHECK(contains(refusal([&] { GradientBucketer(named, world, BucketOptions().first_bucket_bytes(-1)); }),
                 "first_bucket_bytes"));
  CHECK(contains(refusal([&] { GradientBucketer(named, world, BucketOptions().wire_dtype(at::kInt)); }),
                 "bf16"));
  CHECK(contains(refusal([&] { GradientBucketer({{"u", Tensor()}}, world); }), "parameter u is undefined"));
  GradientBucketer bucketer(named, world);
  CHECK(contains(refusal([&] { bucketer.wait(); }), "without begin_backward"));
  CHECK(contains(refusal([&] { bucketer.end_backward(); }), "without begin_backward"));
  bucketer.begin_backward();
  CHECK(contains(refusal([&] { bucketer.begin_backward(); }), "before wait"));
  backward(named, 1, {0});
  CHECK(contains(refusal([&] { bucketer.end_backward(); }), "1 of 2 parameters not at all: 0"));
  bucketer.drop();
  Named sparse = {{"e", torch::randn({4, 2}).requires_grad_()}};
  GradientBucketer other(sparse, world);
  other.begin_backward();
  const auto embed = [&] {
    torch::embedding(sparse[0].second, torch::tensor({1, 2}), -1, false, true).sum().backward();
  };
  CHECK(contains(refusal(embed), "parameter e is sparse"));
}

}  // namespace pacer::testing
