// pacer-paging-bench: what paging costs. AdamW over 610 fp32 tensors of 4096 x 64, 160 million parameters,
// whose state is 1.28 GB, on one GPU: plain, paged with nothing resident and with all, at::_fused_adamw_, and
// the pinned copy of the same bytes both ways at once, which no paged step can beat.
//
//   pacer-paging-bench [--tensors N] [--resident BYTES] [--page BYTES]
//
// Contenders run in turn, 15 rounds after 3 that do not count; steps that copy nothing are timed ten at a
// time. Prints a JSON line for each with the median, the least and the largest time of a step in ms, then one
// with the ratios. --resident adds a row.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_fused_adamw.h>
#include <torch/cuda.h>
#include <torch/types.h>

#include <pacer/core/error.h>
#include <pacer/optimizers/fused_adam.h>

#include "../bench/timing.h"
#include "pinned_copies.h"

namespace {

using torch::Tensor;

constexpr int kUncountedRounds = 3, kRounds = 15, kStepsAtOnce = 10;

struct Arguments {
  int64_t tensors = 610;
  int64_t resident = 0;
  int64_t page = pacer::Paging().page_bytes();
};

Arguments read_arguments(int count, char** values) {
  Arguments arguments;
  for (int i = 1; i < count; i += 2) {
    const std::string name = values[i];
    int64_t* const number = name == "--tensors"    ? &arguments.tensors
                            : name == "--resident" ? &arguments.resident
                            : name == "--page"     ? &arguments.page
                                                   : nullptr;
    pacer::require(number != nullptr && i + 1 < count, "pacer-paging-bench does not know ", name,
                   " or its value is missing; see the head of its source");
    *number = std::atoll(values[i + 1]);
    pacer::require(*number > 0, name, " must be a number > 0, not ", values[i + 1]);
  }
  return arguments;
}

std::vector<Tensor> random_tensors(int64_t count) {
  std::vector<Tensor> tensors;
  for (int64_t i = 0; i < count; ++i) {
    tensors.push_back(torch::randn({4096, 64}, at::TensorOptions(at::kFloat).device(at::kCUDA)));
  }
  return tensors;
}

// at::_fused_adamw_ with what Python's fused=True does around it.
struct TorchFused {
  explicit TorchFused(const std::vector<Tensor>& of, const std::vector<Tensor>& given)
      : parameters(of), gradients(given) {
    for (const Tensor& parameter : parameters) {
      exp_avgs.push_back(torch::zeros_like(parameter));
      exp_avg_sqs.push_back(torch::zeros_like(parameter));
      steps.push_back(torch::zeros({}, parameter.options()));
    }
  }
  void step() {
    const torch::NoGradGuard no_grad;
    at::_foreach_add_(steps, 1);
    at::_fused_adamw_(parameters, gradients, exp_avgs, exp_avg_sqs, {}, steps, 1e-3, 0.9, 0.999, 1e-2, 1e-8,
                      /*amsgrad=*/false, /*maximize=*/false);
  }
  std::vector<Tensor> parameters, gradients, exp_avgs, exp_avg_sqs, steps;
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
    const bench::Stopwatch watch;
    for (int i = 0; i < contender.steps; ++i) contender.step();
    contender.finish();
    torch::cuda::synchronize();
    if (counts) contender.milliseconds.push_back(watch.milliseconds() / contender.steps);
  }
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

void print(const Contender& contender, double bytes) {
  const auto [least, most] =
      std::minmax_element(contender.milliseconds.begin(), contender.milliseconds.end());
  std::printf("{\"contender\":\"%s\",\"ms\":%.3f,\"least\":%.3f,\"most\":%.3f,\"state_GB\":%.3f}\n",
              contender.name.c_str(), median(contender.milliseconds), *least, *most, bytes * 1e-9);
}

void run(const Arguments& arguments) {
  using pacer::FusedAdamW, pacer::FusedAdamWOptions, pacer::Paging;
  pacer::require<pacer::Unavailable>(torch::cuda::is_available(), "pacer-paging-bench needs an NVIDIA GPU");
  torch::manual_seed(1);
  const std::vector<Tensor> gradients = random_tensors(arguments.tensors);
  const int64_t state_bytes = arguments.tensors * 4096 * 64 * 8;
  std::vector<std::unique_ptr<FusedAdamW>> optimizers;
  std::vector<Contender> contenders;
  const auto add = [&](const std::string& name, int steps, const FusedAdamWOptions& options) {
    std::vector<Tensor> parameters = random_tensors(arguments.tensors);
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
  const Paging paging = Paging().page_bytes(arguments.page);
  add("plain", kStepsAtOnce, FusedAdamWOptions(1e-3));
  add("all resident", kStepsAtOnce,
      FusedAdamWOptions(1e-3).paged(Paging(paging).resident_bytes(state_bytes * 2)));
  add("nothing resident", 1, FusedAdamWOptions(1e-3).paged(paging));
  if (arguments.resident > 0) {
    add("some resident", 1, FusedAdamWOptions(1e-3).paged(Paging(paging).resident_bytes(arguments.resident)));
  }
  TorchFused fused(random_tensors(arguments.tensors), gradients);
  contenders.push_back({"at::_fused_adamw_", kStepsAtOnce, [&fused] { fused.step(); }, [] {}, {}});
  const auto copies = paging_bench::make_pinned_copies(state_bytes);
  contenders.push_back({"pinned copy", 1, [&copies] { copies->run(); }, [] {}, {}});
  for (int round = 0; round < kUncountedRounds + kRounds; ++round) {
    run_round(contenders, round >= kUncountedRounds);
  }
  for (const Contender& contender : contenders) print(contender, static_cast<double>(state_bytes));
  const auto of = [&](const std::string& name) {
    const auto found = std::find_if(contenders.begin(), contenders.end(),
                                    [&](const Contender& contender) { return contender.name == name; });
    return median(found->milliseconds);
  };
  std::printf(
      "{\"nothing resident / pinned copy\":%.3f,\"all resident / plain\":%.3f,\"plain / "
      "at::_fused_adamw_\":%.3f}\n",
      of("nothing resident") / of("pinned copy"), of("all resident") / of("plain"),
      of("plain") / of("at::_fused_adamw_"));
}

}  // namespace

int main(int count, char** values) {
  try {
    run(read_arguments(count, values));
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
