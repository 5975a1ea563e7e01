// 1-bit optimizers on an NVIDIA GPU whose buckets are taken up while backward runs: the bits of those that
// wait for the step, and how late an error shows.
#include "support/catch.h"

#include <cmath>
#include <string>

#include "support/both_devices.h"
#include "support/no_waiting.h"
#include "support/session/small_run.h"

namespace pacer::testing::onebit_overlap_gpu {
namespace {

const at::Device kGpu("cuda:0");

template <class Optimizer, class Options>
RegisteredOptimizer in_buckets(Options options, bool overlap, at::ScalarType dtype = at::kFloat) {
  options.compress_alone(true).weight_decay(0.1).bucket_bytes(1000).overlap_backward(overlap);
  return {"in buckets", true, making_onebit<Optimizer>(options), dtype, true};
}

template <class Optimizer, class Options>
void check_equal(const Options& options, at::ScalarType dtype, bool clips = false) {
  std::vector<RegisteredHook> hooks;
  for (const RegisteredHook& hook : all_hooks()) {
    if (hook.name == "accumulation" || hook.name == "layer drop") hooks.push_back(hook);
    if (clips && hook.name == "clipping by the norm before") hooks.push_back(hook);
  }
  SmallRun ahead(in_buckets<Optimizer>(options, true, dtype), hooks, 0, kGpu);
  SmallRun behind(in_buckets<Optimizer>(options, false, dtype), hooks, 0, kGpu);
  for (int step = 0; step < 16; ++step) {
    CAPTURE(step);
    ahead.step();
    behind.step();
    REQUIRE(first_difference(ahead.state(), behind.state()) == "");
  }
}

}  // namespace

TEST_CASE("buckets that are taken up while backward runs have the bits of those that wait",
          "[onebit][overlap][gpu]") {
  PACER_NEEDS_GPU();
  check_equal<OneBitAdam>(OneBitAdamOptions(0.01).refresh_variance_every(5), at::kFloat);
  check_equal<OneBitAdam>(OneBitAdamOptions(0.01).block_scales(false), at::kBFloat16);
  check_equal<OneBitLamb>(OneBitLambOptions(0.01), at::kFloat);
}

TEST_CASE("so they have on a GPU where they are clipped by the norm of the step before",
          "[onebit][overlap][clipping][gpu]") {
  PACER_NEEDS_GPU();
  check_equal<OneBitAdam>(OneBitAdamOptions(0.01).refresh_variance_every(5), at::kFloat, true);
  check_equal<OneBitLamb>(OneBitLambOptions(0.01), at::kBFloat16, true);
}

TEST_CASE("a gradient that is not finite is an error of a later step where momentum had left",
          "[onebit][overlap][gpu]") {
  PACER_NEEDS_GPU();
  for (const bool compressed : {true, false}) {  // whose gradient it is
    CAPTURE(compressed);
    SmallRun run(in_buckets<OneBitAdam>(OneBitAdamOptions(0.01), true), {}, 0, kGpu);
    bool spoils = false;
    const Tensor& parameter = compressed ? run.model->head->weight : run.model->head->bias;
    parameter.register_hook(
        [&spoils](const Tensor& gradient) -> Tensor { return spoils ? gradient * std::nan("") : gradient; });
    for (int step = 0; step < 5; ++step) run.step();
    std::string message;
    try {
      spoils = true;
      run.step();
      spoils = false;
      for (int step = 0; step < 3; ++step) run.step();
    } catch (const Error& error) {
      message = error.what();
    }
    CHECK(contains(message, "not finite"));
    CHECK_THROWS_AS(dynamic_cast<SessionOptimizer&>(*run.optimizer).export_state(), Error);
  }
}

}  // namespace pacer::testing::onebit_overlap_gpu
