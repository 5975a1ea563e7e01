// Sessions with Recompute on a GPU: weights, moments, losses and random state of plain training to the bit,
// beside other hooks, and the memory that is saved.
#include "support/catch.h"

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <c10/cuda/CUDACachingAllocator.h>
#include <torch/nn/functional/loss.h>

#include <pacer/hooks/gradient_accumulation.h>
#include <pacer/hooks/gradient_clipping.h>
#include <pacer/hooks/precision.h>
#include <pacer/hooks/recompute.h>
#include <pacer/schedulers/layer_drop.h>
#include <pacer/session/session.h>

#include "support/both_devices.h"
#include "support/modules/gpu_blocks.h"
#include "support/no_waiting.h"

namespace pacer::testing::gpu_blocks {
namespace {

constexpr int64_t kMicroSteps = 8;

// A stack with gates of its own, and a region behind each of them.
struct GatedStackImpl : StackImpl {
  explicit GatedStackImpl(LayerDrop of_blocks) : gates(std::move(of_blocks)) {
    register_module("gates", gates);
    for (const auto& block : *blocks) gates->add(*block);
  }
  Tensor forward(Tensor x) {
    for (size_t i = 0; i < blocks->size(); ++i) {
      auto& block = blocks->at<MlpImpl>(i);
      x = gates->gate(static_cast<int64_t>(i), x,
                      [&](const Tensor& h) { return recompute(block, &MlpImpl::forward, h); });
    }
    return x;
  }
  LayerDrop gates;
};
TORCH_MODULE(GatedStack);

struct Training {
  Snapshot<FusedAdamW> optimizer;  // weights and moments
  std::vector<Tensor> losses;
  Tensor random;
};

std::string difference_of(const Training& a, const Training& b) {
  if (!same_bits(a.losses, b.losses)) return "a loss";
  if (!same_bits(a.random, b.random)) return "the random state of the GPU";
  return difference(a.optimizer, b.optimizer);
}

using Use = std::function<void(Session&)>;

// Inputs are drawn between the passes, so that a random state that was not put back shows in all that
// follows.
template <class Model>
Training train(Model& model, const Use& use, at::ScalarType dtype = at::kFloat) {
  model->to(kGpu, dtype);
  FusedAdamW optimizer(model->named_parameters(), FusedAdamWOptions(1e-2));
  Training training;
  Session session(*model, optimizer);
  use(session);
  torch::manual_seed(6);
  for (int64_t i = 0; i < kMicroSteps; ++i) {
    const auto options = at::TensorOptions().device(kGpu).dtype(dtype);
    auto [x] = session.begin(torch::randn({4, 40, kSize}, options));
    const Tensor y = model->forward(x).to(at::kFloat);
    const Tensor loss = torch::mse_loss(y, x.roll(1, -1).to(at::kFloat));
    session.backward(loss);
    session.step();
    training.losses.push_back(loss.detach());
  }
  session.finish();
  training.optimizer = snapshot(optimizer);
  training.random = gpu_random_state();
  return training;
}

LayerDropOptions many_drops() { return LayerDropOptions().theta_bar(0.3).gamma(1).seed(3); }

// Bytes that a step allocates at its peak, beyond what there is before it.
int64_t peak_of_step(bool again) {
  constexpr int64_t kBlocks = 12, kWide = 256, kRows = 16384;
  c10::cuda::CUDACachingAllocator::emptyCache();
  const auto allocated = [] {
    const auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    return c10::cuda::CUDACachingAllocator::getDeviceStats(0).allocated_bytes[all];
  };
  Stack model(kBlocks, kWide);
  model->to(kGpu);
  FusedAdamW optimizer(model->named_parameters(), FusedAdamWOptions(1e-3));
  Session session(*model, optimizer);
  if (again) session.use(Recompute(model->blocks));
  const Tensor data = torch::randn({kRows, kWide}, kGpu);
  int64_t peak = 0;
  for (int step = 0; step < 3; ++step) {  // state and the libraries' memory exist after the first
    const int64_t before = allocated().current;
    c10::cuda::CUDACachingAllocator::resetPeakStats(0);
    auto [x] = session.begin(data);
    session.backward(model->forward(x).square().mean());
    session.step();
    peak = allocated().peak - before;
  }
  session.finish();
  return peak;
}

}  // namespace

TEST_CASE("on a GPU, a Session with Recompute trains as one without, to the bit", "[gpu][recompute]") {
  PACER_NEEDS_GPU();
  struct Case {
    std::string name;
    at::ScalarType dtype;
    Use use;
  };
  const std::vector<Case> cases = {
      {"fp32", at::kFloat, [](Session&) {}},
      {"bf16 parameters", at::kBFloat16, [](Session&) {}},
      {"autocast to bf16", at::kFloat, [](Session& s) { s.use(Precision::bf16()); }},
      {"autocast to fp16", at::kFloat, [](Session& s) { s.use(Precision::fp16()); }},
      {"accumulation", at::kFloat, [](Session& s) { s.use(GradientAccumulation(2)); }},
      {"accumulation in bf16, clipping", at::kBFloat16,
       [](Session& s) { s.use(GradientAccumulation(4)).use(GradientClipping(0.5)); }},
      {"autocast, accumulation, clipping", at::kFloat,
       [](Session& s) { s.use(Precision::bf16()).use(GradientAccumulation(2)).use(GradientClipping(0.5)); }}};
  for (const Case& c : cases) {
    INFO(c.name);
    Stack plain, same, all, half, nested(kDepth, kSize, /*has_regions=*/true);
    const Training wanted = train(plain, c.use, c.dtype);
    REQUIRE(difference_of(wanted, train(same, c.use, c.dtype)) == "");  // or nothing could be compared
    const auto with_recompute = [&](Stack& model, int64_t every) {
      const Use use = [&](Session& session) {
        c.use(session);
        session.use(Recompute(model->blocks, RecomputeOptions().every(every)));
      };
      return difference_of(wanted, train(model, use, c.dtype));
    };
    CHECK(with_recompute(all, 1) == "");
    CHECK(with_recompute(half, 2) == "");
    CHECK(with_recompute(nested, 1) == "");
    CHECK(all->runs(1) == 2 * plain->runs(1));
    CHECK(half->runs(1) == plain->runs(1));
  }
}

// A gate reads its argument, too, so that gradients add up in another order than without regions. What is
// compared with are regions behind gates.
TEST_CASE("on a GPU, what LayerDrop drops is not recomputed, and the rest is, to the bit",
          "[gpu][recompute]") {
  PACER_NEEDS_GPU();
  const LayerDrop gates(many_drops());
  GatedStack gated(gates);
  const Training wanted = train(gated, [&](Session& session) { session.use(gates); });
  Stack plain;
  const Training dropped =
      train(plain, [&](Session& session) { session.use(LayerDrop(plain->blocks, many_drops())); });
  CHECK(plain->runs(kDepth - 1) < kMicroSteps);
  for (const bool drop_first : {false, true}) {
    Stack model;
    const Training found = train(model, [&](Session& session) {
      if (drop_first) session.use(LayerDrop(model->blocks, many_drops()));
      session.use(Recompute(model->blocks));
      if (!drop_first) session.use(LayerDrop(model->blocks, many_drops()));
    });
    CHECK(difference_of(wanted, found) == "");
    CHECK(model->runs(kDepth - 1) == 2 * plain->runs(kDepth - 1));
    CHECK(same_bits(found.random, dropped.random));
    CHECK(found.losses.back().allclose(dropped.losses.back(), 1e-3, 1e-4));
  }
}

TEST_CASE("a step with Recompute never waits for the GPU", "[gpu][recompute]") {
  PACER_NEEDS_GPU();
  Stack model;
  model->to(kGpu);
  FusedAdamW optimizer(model->named_parameters(), FusedAdamWOptions(1e-3));
  Session session(*model, optimizer);
  session.use(Recompute(model->blocks)).use(Precision::bf16());
  const Tensor data = torch::randn({8, kSize}, kGpu);
  const auto step = [&] {
    auto [x] = session.begin(data);
    session.backward(model->forward(x).to(at::kFloat).square().mean());
    session.step();
  };
  for (int i = 0; i < 3; ++i) step();  // state, tables, libraries
  {
    const NoWaiting no_waiting;
    for (int i = 0; i < 5; ++i) CHECK_NOTHROW(step());
    CHECK_THROWS(torch::ones({1}, kGpu).item<float>());  // the check itself works
  }
  session.finish();
}

// 12 blocks whose activations are ten times their input: alive at the peak are 12 inputs and one block. What
// the libraries allocate for a product is little beside 2 GB of activations.
TEST_CASE("on a GPU, a step with Recompute takes less than a third of the activations' memory",
          "[gpu][recompute]") {
  PACER_NEEDS_GPU();
  const int64_t plain = peak_of_step(false), recomputed = peak_of_step(true);
  CAPTURE(plain, recomputed);
  CHECK(static_cast<double>(recomputed) <= 0.30 * static_cast<double>(plain));
}

}  // namespace pacer::testing::gpu_blocks
