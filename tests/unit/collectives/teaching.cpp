// The schemes of examples/collectives over threads: sums by hand and to the bound of any order of additions,
// equal bits on all ranks, and bytes that are what their comments say. The bubble of a pipeline, by hand.
#include <chrono>
#include <thread>

#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/stack.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>

#include "../../../examples/collectives/bubble.cpp"  // NOLINT(bugprone-suspicious-include): they are no library
#include "../../../examples/collectives/schemes.cpp"  // NOLINT(bugprone-suspicious-include)
#include "support/catch.h"
#include "support/collectives/ranks.h"

namespace pacer::testing {
namespace {

using torch::Tensor;
using TensorList = std::vector<Tensor>;

// What collectives are counted with, without those that only compare.
int64_t payload_sent(const Communicator& world, const std::string& operation = "") {
  int64_t bytes = 0;
  for (const Traffic& entry : world.traffic()) {
    if (entry.operation != "agreement" && (operation.empty() || entry.operation == operation)) {
      bytes += entry.bytes_sent;
    }
  }
  return bytes;
}

// Runs `scheme` over threads and returns every rank's tensors. `make(rank)` is what it starts with.
std::vector<TensorList> sums_of(const collectives::Scheme& scheme, const Ranks& world,
                                const std::function<TensorList(int)>& make) {
  std::vector<TensorList> all(world.size());
  for (size_t r = 0; r < world.size(); ++r) all[r] = make(static_cast<int>(r));
  REQUIRE(first_of(run_ranks(static_cast<int>(world.size()), [&](int rank) {
            const auto r = static_cast<size_t>(rank);
            scheme.run(*world[r], all[r]);
          })) == "");
  return all;
}

}  // namespace

TEST_CASE("every scheme leaves the sum over ranks in every rank's gradients", "[collectives_teaching]") {
  for (const auto& scheme : collectives::schemes_after_backward()) {
    for (const int world_size : {1, 2, 3, 4, 7}) {
      for (const int64_t n : {0, 1, 5, 64, 1001}) {
        INFO(scheme.name << ", " << world_size << " ranks, " << n << " elements");
        // Element i of rank r is i + 1000 r; whole numbers, so that the sum is exact in any order.
        const auto make = [&](int rank) {
          return TensorList{torch::full({2, 3}, rank, at::kFloat),
                            torch::arange(n).add(1000 * rank).to(at::kFloat),
                            torch::arange(6, at::kFloat).add(rank).view({2, 3}).t(), torch::full({}, 1.0f)};
        };
        const float w = static_cast<float>(world_size), ranks = w * (w - 1) / 2;
        for (const TensorList& sums : sums_of(scheme, Communicator::in_process(world_size), make)) {
          REQUIRE(sums[0].equal(torch::full({2, 3}, ranks)));
          REQUIRE(sums[1].equal(torch::arange(n).to(at::kFloat) * w + 1000 * ranks));
          REQUIRE(sums[2].equal((torch::arange(6, at::kFloat) * w + ranks).view({2, 3}).t()));
          REQUIRE(sums[3].item<float>() == w);
        }
      }
    }
  }
}

// Any order of W - 1 additions is within gamma(W-1) * sum |x| of the exact sum, gamma(k) = k u / (1 - k u),
// u = 2^-24 (Higham, "Accuracy and Stability of Numerical Algorithms", section 4.2).
TEST_CASE("a scheme gives all ranks the same bits, within the bound of any order of additions",
          "[collectives_teaching]") {
  constexpr int kRanks = 5;
  constexpr double kUnit = 1.0 / (1 << 24), kGamma = (kRanks - 1) * kUnit / (1 - (kRanks - 1) * kUnit);
  torch::manual_seed(3);
  TensorList parts;
  for (int r = 0; r < kRanks; ++r) parts.push_back(torch::randn({10007}));
  const Tensor all = torch::stack(parts).to(at::kDouble);
  const Tensor exact = all.sum(0), bound = all.abs().sum(0) * kGamma;
  for (const auto& scheme : collectives::schemes_after_backward()) {
    INFO(scheme.name);
    const auto sums = sums_of(scheme, Communicator::in_process(kRanks),
                              [&](int rank) { return TensorList{parts[static_cast<size_t>(rank)].clone()}; });
    for (const TensorList& own : sums) {
      REQUIRE(own[0].equal(sums[0][0]));
      REQUIRE((own[0].to(at::kDouble) - exact).abs().le(bound).all().item<bool>());
    }
  }
}

TEST_CASE("the schemes send as many bytes and messages as their comments say", "[collectives_teaching]") {
  constexpr int64_t kElements = 1800, kTensors = 3, kBytes = 4 * kElements;
  for (const int world_size : {2, 3, 4, 5}) {
    const int64_t w = world_size;
    for (const auto& scheme : collectives::schemes_after_backward()) {
      const auto world = Communicator::in_process(world_size);
      sums_of(scheme, world, [&](int) { return TensorList(kTensors, torch::ones({kElements / kTensors})); });
      for (const auto& own : world) {
        INFO(scheme.name << ", rank " << own->rank() << " of " << world_size);
        const int64_t sends = traffic_of(*own, "send").calls, reduces = traffic_of(*own, "all_reduce").calls;
        if (scheme.name == "gather_and_broadcast") {
          REQUIRE(payload_sent(*own) == (own->rank() == 0 ? (w - 1) * kBytes : kBytes));
          REQUIRE(sends == (own->rank() == 0 ? w - 1 : 1));
        } else if (scheme.name == "all_to_all_sum") {
          REQUIRE(payload_sent(*own) == (w - 1) * kBytes);
          REQUIRE(sends == w - 1);
        } else if (scheme.name == "ring_all_reduce") {
          REQUIRE(payload_sent(*own) == 2 * (w - 1) * kBytes / w);
          REQUIRE(static_cast<double>(payload_sent(*own)) == collectives::least_bytes(kBytes, world_size));
          REQUIRE(sends == 2 * (w - 1));
        } else {
          REQUIRE(payload_sent(*own, "all_reduce") == payload_sent(*own));
          REQUIRE(payload_sent(*own) == 2 * (w - 1) * kBytes / w);
          REQUIRE(reduces == (scheme.name == "per_tensor" ? kTensors : 1));
        }
      }
    }
  }
}

TEST_CASE("the overlapped scheme leaves the same sums as one bucket and sends before backward ends",
          "[collectives_teaching]") {
  constexpr int kRanks = 3;
  const auto world = Communicator::in_process(kRanks);
  torch::manual_seed(5);
  std::vector<torch::nn::Sequential> models, twins;
  std::vector<Tensor> batches;
  for (int r = 0; r < kRanks; ++r) {
    torch::nn::Sequential model(torch::nn::Linear(8, 16), torch::nn::Linear(16, 16),
                                torch::nn::Linear(16, 4));
    if (r > 0) {
      const torch::NoGradGuard no_grad;
      for (size_t i = 0; i < model->parameters().size(); ++i) {
        model->parameters()[i].copy_(models[0]->parameters()[i]);
      }
    }
    models.push_back(model);
    twins.push_back(std::dynamic_pointer_cast<torch::nn::SequentialImpl>(model->clone()));
    batches.push_back(torch::randn({6, 8}));
  }
  REQUIRE(first_of(run_ranks(kRanks, [&](int rank) {
            const auto r = static_cast<size_t>(rank);
            std::vector<std::pair<std::string, Tensor>> parameters;
            for (const auto& item : models[r]->named_parameters()) {
              parameters.emplace_back(item.key(), item.value());
            }
            GradientBucketer bucketer(parameters, world[r],
                                      BucketOptions().bucket_bytes(1200).first_bucket_bytes(100));
            // Late, so that who does not wait for the others is seen.
            if (rank == 0) std::this_thread::sleep_for(std::chrono::milliseconds(100));
            collectives::bucketed_and_overlapped(bucketer, models[r]->forward(batches[r]).square().sum());
            std::vector<Tensor> sums;
            for (const Tensor& parameter : models[r]->parameters()) sums.push_back(parameter.grad().clone());
            require<Error>(bucketer.buckets_sent_early() >= 2, "only ", bucketer.buckets_sent_early(),
                           " buckets left while backward ran");

            twins[r]->forward(batches[r]).square().sum().backward();
            std::vector<Tensor> gradients;
            for (const Tensor& parameter : twins[r]->parameters()) gradients.push_back(parameter.grad());
            collectives::one_bucket(*world[r], gradients);
            for (size_t i = 0; i < gradients.size();
                 ++i) {  // threads add in rank order, whatever the buckets
              require<Error>(sums[i].equal(gradients[i]), "gradient ", i, " differs");
            }
          })) == "");
}

TEST_CASE("gradients of two dtypes are refused in a sentence", "[collectives_teaching]") {
  const auto world = Communicator::in_process(2);
  TensorList mixed = {torch::ones({2}), torch::ones({2}, at::kDouble)};
  REQUIRE_THROWS_WITH(collectives::one_bucket(*world[0], mixed),
                      "the schemes take gradients of one dtype, not Float and Double");
}

TEST_CASE("the bubble of a pipeline is what one finds by hand", "[collectives_teaching]") {
  for (const int64_t stages : {2, 4, 7}) {
    for (const double message : {0.05, 0.25}) {
      const auto bubbles = collectives::simulate_bubbles({stages, message});
      REQUIRE(bubbles.size() == 2);
      REQUIRE(bubbles[0].schedule == "gpipe");
      REQUIRE(bubbles[1].schedule == "1f1b");
      const auto p = static_cast<double>(stages);
      for (const auto& bubble : bubbles) {
        REQUIRE(bubble.points.front().micro_batches == 1);
        REQUIRE(bubble.points.back().micro_batches == 64);
        for (const auto& point : bubble.points) {
          INFO(bubble.schedule << ", " << stages << " stages, " << point.micro_batches << " micro-batches");
          const auto m = static_cast<double>(point.micro_batches);
          const bool is_gpipe = bubble.schedule == "gpipe";
          REQUIRE(point.idle == Catch::Approx((p - 1) / (m + p - 1)));
          REQUIRE(point.formula == Catch::Approx(point.idle));
          REQUIRE(point.alive == (is_gpipe ? m : std::min(m, p)));
          REQUIRE(point.alive_formula == point.alive);
          // A micro-batch takes 3 and meets two messages at each of p - 1 borders. GPipe waits for them in
          // its ramps only. 1F1B has p micro-batches on their way, which come around in 3 p and the messages.
          const double around = 2 * (p - 1) * message;
          if (is_gpipe) {
            REQUIRE(point.idle_messages == Catch::Approx(1 - 3 * m / (3 * (m + p - 1) + around)));
          } else {
            REQUIRE(point.idle_messages > around / (3 * p + around));
          }
        }
      }
      const double last = bubbles[1].points.back().idle_messages, limit = 2 * (p - 1) * message;
      REQUIRE(last < limit / (3 * p + limit) + (p - 1) / (64 + p - 1));
    }
  }
}

}  // namespace pacer::testing
