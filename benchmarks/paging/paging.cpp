// What paging of optimizer state costs.
#include <functional>
#include <map>
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
#include "support/table.h"
#include "support/timing.h"

namespace bench::paging {
namespace {

constexpr const char* kAbout =
    R"(Measures what paging costs. AdamW over 610 fp32 tensors of 4096 x 64, 160 million parameters, whose
state is 1.28 GB, on one GPU: plain, paged with nothing resident and with all, at::_fused_adamw_,
and the pinned copy of the same bytes both ways at once, which no paged step can beat. With
--state-bits 8 pacer's state is 0.34 GB, and so is what is copied.

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
  int steps;                  // at once
  std::function<void()> run;  // these steps, until the GPU has done them
};

int run(const examples::OptionValues& given) {
  using pacer::FusedAdamW, pacer::FusedAdamWOptions, pacer::Paging;
  const int64_t tensors = number_in(given, "tensors"), resident = number_in(given, "resident", 0);
  const Paging paging = Paging().page_bytes(number_in(given, "page"));
  pacer::require<pacer::Unavailable>(torch::cuda::is_available(), "it needs an NVIDIA GPU");
  torch::manual_seed(1);
  const std::vector<Tensor> gradients = random_tensors(tensors);
  const int64_t bits = number_in(given, "state-bits");
  const auto of_state = FusedAdamWOptions(1e-3).state_bits(bits);
  const int64_t elements = tensors * 4096 * 64;
  const int64_t state_bytes = bits == 8 ? elements * 2 + elements / 32 * 4 : elements * 8;
  std::vector<std::unique_ptr<FusedAdamW>> optimizers;
  std::vector<Contender> contenders;
  const auto add = [&](const std::string& name, int steps, const std::function<void()>& step) {
    contenders.push_back({name, steps, [=] {
                            for (int i = 0; i < steps; ++i) step();
                            torch::cuda::synchronize();
                          }});
  };
  const auto add_pacer = [&](const std::string& name, int steps, const FusedAdamWOptions& options) {
    std::vector<Tensor> parameters = random_tensors(tensors);
    for (size_t i = 0; i < parameters.size(); ++i)
      parameters[i].requires_grad_().mutable_grad() = gradients[i];
    optimizers.push_back(std::make_unique<FusedAdamW>(parameters, options));
    add(name, steps, [optimizer = optimizers.back().get(), copies = steps == 1] {
      optimizer->step();
      if (copies) optimizer->sync_state();
    });
  };
  add_pacer("plain", kStepsAtOnce, of_state);
  add_pacer("all resident", kStepsAtOnce,
            FusedAdamWOptions(of_state).paged(Paging(paging).resident_bytes(state_bytes * 2)));
  add_pacer("nothing resident", 1, FusedAdamWOptions(of_state).paged(paging));
  if (resident > 0) {
    add_pacer("some resident", 1, FusedAdamWOptions(of_state).paged(Paging(paging).resident_bytes(resident)));
  }
  FusedAdamWState fused(random_tensors(tensors));
  add("at::_fused_adamw_", kStepsAtOnce, [&] {
    const torch::NoGradGuard no_grad;
    fused.step(gradients);
  });
  PinnedCopies copies(state_bytes);
  add("pinned copy", 1, [&copies] { copies.run(); });
  std::vector<std::function<void()>> works;
  for (const Contender& contender : contenders) works.push_back(contender.run);
  interleave(works, {kUncountedRounds, kUncountedRounds, 0});
  const auto times = interleave(works, {kRounds, kRounds, 0});
  std::map<std::string, double> medians;
  for (size_t i = 0; i < contenders.size(); ++i) {
    const auto of_a_step = [&](double milliseconds) {
      return rounded(milliseconds / contenders[i].steps, 3);
    };
    medians[contenders[i].name] = times[i].wall.median / contenders[i].steps;
    print(pacer::JsonLine()
              .add("contender", contenders[i].name)
              .add("ms", of_a_step(times[i].wall.median))
              .add("least", of_a_step(times[i].wall.min))
              .add("most", of_a_step(times[i].wall.max))
              .add("state_GB", rounded(static_cast<double>(state_bytes) * 1e-9, 3)));
  }
  pacer::JsonLine ratios;
  const auto add_ratio = [&](const std::string& of, const std::string& to) {
    ratios.add(of + " / " + to, rounded(medians[of] / medians[to], 3));
  };
  add_ratio("nothing resident", "pinned copy");
  add_ratio("all resident", "plain");
  add_ratio("plain", "at::_fused_adamw_");
  print(ratios);
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
      ("page", whole_number(pacer::Paging().page_bytes()), "bytes of a page")                               //
      ("state-bits", whole_number(32), "of pacer's moments, 32 or 8");
  return paging;
}

}  // namespace bench::paging
