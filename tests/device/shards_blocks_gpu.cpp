// Parameters that come and go on a GPU, in a world of one rank: blocks train as whole ones, to the bit, in
// the memory of two blocks beside the parts, and nothing waits for the device.
#include "support/catch.h"

#include <algorithm>
#include <string>
#include <vector>

#include <c10/cuda/CUDACachingAllocator.h>

#include <pacer/parallel/detail/block_gathers.h>
#include <pacer/parallel/parameter_shards.h>

#include "support/both_devices.h"
#include "support/modules/gpu_blocks.h"
#include "support/no_waiting.h"

namespace pacer::testing::shards_blocks_gpu {
namespace {

using gpu_blocks::kGpu;
using gpu_blocks::Mlp;
using gpu_blocks::Stack;

Stack make_stack(at::ScalarType dtype, int64_t depth, int64_t size) {
  Stack stack(depth, size);
  stack->to(kGpu, dtype);
  for (const auto& block : *stack->blocks) block->as<Mlp>()->drop->options.p(0);
  return stack;
}

// A stack whose blocks come and go, as Shards has them.
struct Gathered {
  Gathered(at::ScalarType dtype, int64_t depth, int64_t size, int64_t prefetch = 1)
      : stack(make_stack(dtype, depth, size)) {
    std::vector<ParameterShards::Group> groups;
    for (const auto& block : *stack->blocks) {
      groups.emplace_back();
      for (const auto& item : block->named_parameters()) {
        groups.back().emplace_back(std::to_string(groups.size()) + item.key(), item.value());
      }
    }
    shards = std::make_shared<ParameterShards>(groups, Communicator::alone(kGpu));
    shards->keep_parts();
    gathers = std::make_shared<detail::BlockGathers>(shards, groups.size(),
                                                     detail::BlockGathersOptions{prefetch, false});
    stack->blocks->wrap(WrapperLevel::gather,
                        std::make_shared<detail::GatherWrapper>(gathers, 0, groups.size()));
    for (size_t i = 0; i < groups.size(); ++i) order.push_back(i);
  }
  ~Gathered() { stack->blocks->unwrap(WrapperLevel::gather); }

  // Forward, backward, and a step of gradient descent.
  Tensor step(const Tensor& x, bool recomputes = false) {
    gathers->begin_forward(order);
    const Tensor y = recomputes ? recompute(
                                      *stack, [this](const Tensor& h) { return stack->forward(h); }, x)
                                : stack->forward(x);
    const Tensor loss = y.to(at::kFloat).square().mean();
    shards->begin_backward();
    gathers->begin_backward();
    loss.backward();
    shards->end_backward();
    shards->wait();
    const torch::NoGradGuard no_grad;
    for (const auto& part : shards->parts()) const_cast<Tensor&>(part.values).sub_(part.gradient, 0.1);
    shards->gather_parameters();
    return loss.detach();
  }

  Stack stack;
  std::shared_ptr<ParameterShards> shards;
  std::shared_ptr<detail::BlockGathers> gathers;
  std::vector<size_t> order;
};

Tensor plain_step(Stack& stack, const Tensor& x) {
  const Tensor loss = stack->forward(x).to(at::kFloat).square().mean();
  loss.backward();
  const torch::NoGradGuard no_grad;
  for (Tensor& parameter : stack->parameters()) parameter.sub_(parameter.grad(), 0.1);
  stack->zero_grad();
  return loss.detach();
}

}  // namespace

TEST_CASE("on a GPU, blocks whose parameters come and go train as whole ones, to the bit", "[gpu][shards]") {
  PACER_NEEDS_GPU();
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    for (const int64_t prefetch : {0, 1, 2}) {
      for (const bool recomputes : {false, true}) {
        CAPTURE(dtype, prefetch, recomputes);
        Stack plain = make_stack(dtype, 5, 64);
        Gathered gathered(dtype, 5, 64, prefetch);
        for (int step = 0; step < 4; ++step) {
          torch::manual_seed(static_cast<uint64_t>(step));
          const Tensor x = torch::randn({30, 64}, kGpu).to(dtype);
          const Tensor wanted = plain_step(plain, x);
          REQUIRE(same_bits(gathered.step(x, recomputes), wanted));
        }
        gathered.shards->gather_all();
        REQUIRE(same_bits(gathered.stack->parameters(), plain->parameters()));
        gathered.shards->release_all();
      }
    }
  }
}

TEST_CASE("on a GPU, a parameter that is not there says so", "[gpu][shards]") {
  PACER_NEEDS_GPU();
  Gathered gathered(at::kFloat, 2, 64);
  const torch::NoGradGuard no_grad;
  for (Tensor& parameter : gathered.stack->parameters()) {
    CHECK_THROWS_WITH(parameter + 1, Catch::Matchers::ContainsSubstring("is shared out"));
    CHECK_THROWS_WITH(parameter.clone(), Catch::Matchers::ContainsSubstring("is shared out"));
    CHECK_THROWS_WITH(parameter.cpu(), Catch::Matchers::ContainsSubstring("is shared out"));
    CHECK_THROWS_WITH(parameter.zero_(), Catch::Matchers::ContainsSubstring("is shared out"));
    CHECK_THROWS_WITH(parameter.sum(), Catch::Matchers::ContainsSubstring("is shared out"));
  }
}

TEST_CASE("on a GPU, values and gradients of two blocks exist at a time, and nothing waits",
          "[gpu][shards]") {
  PACER_NEEDS_GPU();
  constexpr int64_t kDepth = 12, kWide = 1024;
  c10::cuda::CUDACachingAllocator::emptyCache();
  const auto allocated = [](bool peak) {
    const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(0);
    const auto& bytes =
        stats.allocated_bytes[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
    return peak ? bytes.peak : bytes.current;
  };
  const Tensor x = torch::randn({8, kWide}, kGpu).to(at::kBFloat16);
  {
    Stack other = make_stack(at::kBFloat16, 1, kWide);
    plain_step(other, x);  // what the libraries keep
  }
  const int64_t libraries = allocated(false);
  Gathered gathered(at::kBFloat16, kDepth, kWide);
  gathered.step(x);
  c10::cuda::CUDACachingAllocator::resetPeakStats(0);
  const int64_t before = allocated(false);
  {
    const NoWaiting no_waiting;
    for (int i = 0; i < 3; ++i) CHECK_NOTHROW(gathered.step(x));
  }
  const int64_t block = 2 * (8 * kWide * kWide + 7 * kWide);
  const int64_t grown = allocated(true) - before;
  CAPTURE(libraries, before, grown, block);
  // In a step: parts of gradients, which are all of them here, two blocks of them on their way, and activations.
  CHECK(grown < (kDepth + 2) * block + (2 << 20));
  // At rest: parts of values, which are all of them here, and two blocks; of gradients nothing.
  CHECK(before - libraries < (kDepth + 2) * block + (4 << 20));
}

}  // namespace pacer::testing::shards_blocks_gpu
