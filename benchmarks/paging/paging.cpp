// What paging of optimizer state costs.
#include <algorithm>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/ops/zeros.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/cuda.h>
#include <torch/types.h>

#include <pacer/core/error.h>
#include <pacer/optimizers/fused_adam.h>

#include "subcommands.h"
#include "support/fused_adamw.h"
#include "support/timing.h"

namespace bench::paging {
namespace {

constexpr const char* kAbout =
    R"(Measures what paging costs. AdamW over 610 fp32 tensors of 4096 x 64, 160 million parameters, whose
state is 1.28 GB, on one GPU: plain, paged with nothing resident and with all, at::_fused_adamw_,
and the pinned copy of the same bytes both ways at once, which no paged step can beat.

Contenders run in turn, 15 rounds after 3 that do not count; steps that copy nothing are timed ten
at a time. Prints a JSON line for each with the median, the least and the largest time of a step in
ms, then one with the ratios.
)";

using torch::Tensor;

constexpr int kUncountedRounds = 3, kRounds = 15, kStepsAtOnce = 10;

std::vector<Tensor> random_tensors(int64_t count) {
  std::vector<Tensor> tensors;
  for (int64_t i = 0; i < count; ++i) {
    tensors.push_back(torch::randn({4096, 64}, at::TensorOptions(at::kFloat).device(at::kCUDA)));
  }
  return tensors;
}

// What the bus between host and GPU can do: pinned copies of so many bytes each way.
class PinnedCopies {
 public:
  explicit PinnedCopies(int64_t bytes) {
    const auto pinned = at::TensorOptions().dtype(at::kByte).pinned_memory(true);
    const auto on_gpu = at::TensorOptions().dtype(at::kByte).device(at::kCUDA);
    host_from_ = at::zeros({bytes}, pinned), host_to_ = at::zeros({bytes}, pinned);
    gpu_from_ = at::zeros({bytes}, on_gpu), gpu_to_ = at::zeros({bytes}, on_gpu);
  }

  // Both at once, on two streams; returns when both are done.
  void run() {
    {
      const c10::StreamGuard guard(to_gpu_);
      gpu_to_.copy_(host_from_, /*non_blocking=*/true);
    }
    {
      const c10::StreamGuard guard(from_gpu_);
      host_to_.copy_(gpu_from_, /*non_blocking=*/true);
    }
    to_gpu_.synchronize();
    from_gpu_.synchronize();
  }

 private:
  static c10::Stream new_stream() {
    return c10::impl::VirtualGuardImpl(at::kCUDA).getStreamFromGlobalPool(at::Device(at::kCUDA, 0));
  }

  c10::Stream to_gpu_ = new_stream(), from_gpu_ = new_stream();
  Tensor host_from_, host_to_, gpu_from_, gpu_to_;
};

struct Contender {
  std::string name;
  int steps;  // at once
  std::function<void()> step, finish;
  std::vector<double> milliseconds;
};

void run_round(std::vector<Contender>& contenders, bool counts) {
  for (Contender& contender : contenders) {
    torch::cuda::synchronize();
    const Stopwatch watch;
    for (int i = 0; i < contender.steps; ++i) contender.step();
    contender.finish();
    torch::cuda::synchronize();
    if (counts) contender.milliseconds.push_back(watch.milliseconds() / contender.steps);
  }
}

void print(const Contender& contender, double bytes) {
  const Spread time = spread_of(contender.milliseconds);
  std::printf("{\"contender\":\"%s\",\"ms\":%.3f,\"least\":%.3f,\"most\":%.3f,\"state_GB\":%.3f}\n",
              contender.name.c_str(), time.median, time.min, time.max, bytes * 1e-9);
}

int run(const examples::OptionValues& given) {
  using pacer::FusedAdamW, pacer::FusedAdamWOptions, pacer::Paging;
  const int64_t tensors = number_in(given, "tensors"), resident = number_in(given, "resident", 0);
  const Paging paging = Paging().page_bytes(number_in(given, "page"));
  pacer::require<pacer::Unavailable>(torch::cuda::is_available(), "it needs an NVIDIA GPU");
  torch::manual_seed(1);
  const std::vector<Tensor> gradients = random_tensors(tensors);
  const int64_t state_bytes = tensors * 4096 * 64 * 8;
  std::vector<std::unique_ptr<FusedAdamW>> optimizers;
  std::vector<Contender> contenders;
  const auto add = [&](const std::string& name, int steps, const FusedAdamWOptions& options) {
    std::vector<Tensor> parameters = random_tensors(tensors);
    for (size_t i = 0; i < parameters.size(); ++i)
      parameters[i].requires_grad_().mutable_grad() = gradients[i];
    optimizers.push_back(std::make_unique<FusedAdamW>(parameters, options));
    FusedAdamW* const optimizer = optimizers.back().get();
    const bool copies = steps == 1;
    contenders.push_back({name,
                          steps,
                          [optimizer] { optimizer->step(); },
                          [optimizer, copies] {
                            if (copies) optimizer->sync_state();
                          },
                          {}});
  };
  add("plain", kStepsAtOnce, FusedAdamWOptions(1e-3));
  add("all resident", kStepsAtOnce,
      FusedAdamWOptions(1e-3).paged(Paging(paging).resident_bytes(state_bytes * 2)));
  add("nothing resident", 1, FusedAdamWOptions(1e-3).paged(paging));
  if (resident > 0) {
    add("some resident", 1, FusedAdamWOptions(1e-3).paged(Paging(paging).resident_bytes(resident)));
  }
  FusedAdamWState fused(random_tensors(tensors));
  contenders.push_back({"at::_fused_adamw_",
                        kStepsAtOnce,
                        [&] {
                          const torch::NoGradGuard no_grad;
                          fused.step(gradients);
                        },
                        [] {},
                        {}});
  PinnedCopies copies(state_bytes);
  contenders.push_back({"pinned copy", 1, [&copies] { copies.run(); }, [] {}, {}});
  for (int round = 0; round < kUncountedRounds + kRounds; ++round) {
    run_round(contenders, round >= kUncountedRounds);
  }
  for (const Contender& contender : contenders) print(contender, static_cast<double>(state_bytes));
  const auto of = [&](const std::string& name) {
    const auto found = std::find_if(contenders.begin(), contenders.end(),
                                    [&](const Contender& contender) { return contender.name == name; });
    return spread_of(found->milliseconds).median;
  };
  std::printf(
      "{\"nothing resident / pinned copy\":%.3f,\"all resident / plain\":%.3f,\"plain / "
      "at::_fused_adamw_\":%.3f}\n",
      of("nothing resident") / of("pinned copy"), of("all resident") / of("plain"),
      of("plain") / of("at::_fused_adamw_"));
  return 0;
}

}  // namespace

Subcommand subcommand() {
  Subcommand paging{"paging",
                    "steps with paged optimizer state beside plain ones and the copy of as many bytes",
                    kAbout, run};
  paging.options.add_options()                                                                              //
      ("tensors", whole_number(610), "of 4096 x 64 elements")                                               //
      ("resident", whole_number(0), "bytes of state that stay on the GPU in one more row; 0: no such row")  //
      ("page", whole_number(pacer::Paging().page_bytes()), "bytes of a page");
  return paging;
}

}  // namespace bench::paging
