// P6: once Session::prewarm has run a pass at full length, training with a curriculum that grows asks the GPU
// for no more memory.
#include <cmath>

#include <ATen/cuda/CUDAContextLight.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include <pacer/hooks/gradient_accumulation.h>
#include <pacer/hooks/precision.h>
#include <pacer/schedulers/sequence_length.h>
#include <pacer/session/session.h>

#include "support/both_devices.h"

namespace pacer::testing {
namespace {

// Token ids [B, S] to logits [B, S, vocabulary], with attention, whose memory grows with S^2.
struct MemoryModelImpl : torch::nn::Module {
  static constexpr int64_t kTokens = 2000, kFeatures = 128;
  MemoryModelImpl()
      : tokens(register_module("tokens", torch::nn::Embedding(kTokens, kFeatures))),
        queries(register_module("queries", torch::nn::Linear(kFeatures, kFeatures))),
        wide(register_module("wide", torch::nn::Linear(kFeatures, 4 * kFeatures))),
        narrow(register_module("narrow", torch::nn::Linear(4 * kFeatures, kFeatures))),
        head(register_module("head", torch::nn::Linear(kFeatures, kTokens))) {}
  Tensor loss(const Tensor& ids, const Tensor& targets) {
    Tensor x = tokens(ids);
    const Tensor scores = queries(x).matmul(x.transpose(1, 2)) / std::sqrt(double{kFeatures});
    x = x + scores.softmax(-1).matmul(x);
    x = x + narrow(torch::relu(wide(x)));
    return torch::nn::functional::cross_entropy(head(x).flatten(0, 1).to(at::kFloat), targets.flatten());
  }
  torch::nn::Embedding tokens;
  torch::nn::Linear queries, wide, narrow, head;
};
TORCH_MODULE(MemoryModel);

struct MemoryPeaks {
  int64_t reserved, allocated;
};

MemoryPeaks memory_peaks() {
  using c10::CachingAllocator::StatType;
  const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(0);
  const auto aggregate = static_cast<size_t>(StatType::AGGREGATE);
  return {stats.reserved_bytes[aggregate].peak, stats.allocated_bytes[aggregate].peak};
}

// The peaks up to the first step, the optimizer's state included, and in 1,000 steps from length 32 to 256.
struct MemoryRun {
  MemoryPeaks first, trained;
};

MemoryRun run_growing_curriculum(bool prewarm, bool bf16, LengthMode mode) {
  constexpr int64_t kFull = 256, kRows = 16, kSteps = 1000;
  // What tests before this one have left: one for each stream, each in the middle of memory that is free else.
  at::cuda::clearCublasWorkspaces();
  c10::cuda::CUDACachingAllocator::emptyCache();
  torch::manual_seed(1);
  MemoryModel model;
  model->to(at::kCUDA);
  FusedAdamW optimizer(model->parameters());
  const Tensor data = torch::randint(MemoryModelImpl::kTokens, {kRows, kFull + 1}, at::kLong);
  const Tensor x = data.narrow(1, 0, kFull).to(at::kCUDA), y = data.narrow(1, 1, kFull).to(at::kCUDA);
  Session session(*model, optimizer);
  session.use(GradientAccumulation(2));
  session.use(SequenceLength(SequenceLengthOptions(32, kFull).ramp_steps(kSteps - 50).mode(mode)));
  if (bf16) session.use(Precision::bf16());
  const auto step = [&] {
    bool stepped = false;
    while (!stepped) {
      auto [ids, targets] = session.begin(x, y);
      session.backward(model->loss(ids, targets));
      stepped = session.step();
    }
  };
  c10::cuda::CUDACachingAllocator::resetPeakStats(0);
  MemoryRun run;
  if (prewarm) session.prewarm([&] { return model->loss(x, y); });
  step();
  run.first = memory_peaks();
  c10::cuda::CUDACachingAllocator::resetPeakStats(0);
  for (int64_t i = session.progress().step; i < kSteps; ++i) step();
  run.trained = memory_peaks();
  return run;
}

}  // namespace

TEST_CASE("P6: after prewarm a growing curriculum reserves no more memory",
          "[session][sequence_length][gpu]") {
  PACER_NEEDS_GPU();
  for (const LengthMode mode : {LengthMode::truncate, LengthMode::reshape}) {
    for (const bool bf16 : {false, true}) {
      const MemoryRun warm = run_growing_curriculum(true, bf16, mode);
      const MemoryRun cold = run_growing_curriculum(false, bf16, mode);
      const bool reshapes = mode == LengthMode::reshape;
      CAPTURE(reshapes, bf16, warm.first.reserved, warm.trained.reserved, warm.first.allocated,
              warm.trained.allocated, cold.first.reserved, cold.trained.reserved);
      CHECK(static_cast<double>(warm.trained.reserved) <= static_cast<double>(warm.first.reserved) * 1.01);
      // Truncated batches do grow: without prewarm the memory is asked for on the way.
      if (!reshapes)
        CHECK(static_cast<double>(cold.trained.reserved) > static_cast<double>(cold.first.reserved) * 1.2);
    }
  }
}

}  // namespace pacer::testing
