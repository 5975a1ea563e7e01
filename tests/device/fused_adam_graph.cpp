// FusedAdamW in CUDA graphs: captured once, replayed to the bits of eager steps.
#include "support/catch.h"

#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "support/both_devices.h"
#include "support/checkpoints/archives.h"

namespace pacer::testing {
namespace {

// Gradients that keep their addresses, for graphs.
void copy_random_gradients(BothDevices<FusedAdamW>& both) {
  std::vector<Tensor> fixed;
  for (const Tensor& p : both.gpu) fixed.push_back(p.grad());
  both.set_gradients();
  for (size_t i = 0; i < fixed.size(); ++i) {
    fixed[i].copy_(both.cpu[i].grad());
    both.gpu[i].mutable_grad() = fixed[i];
  }
}

TEST_CASE("a captured step replays to the bits of eager steps, counts included", "[fused_adam][gpu]") {
  PACER_NEEDS_GPU();
  for (const Mode& mode : all_modes()) {
    for (const bool check : {false, true}) {
      CAPTURE(mode.name, check);
      torch::manual_seed(86);
      const auto stream = c10::cuda::getStreamFromPool();
      const c10::cuda::CUDAStreamGuard guard(stream);
      const auto options = FusedAdamWOptions(0.01).finite_check(check).seed(4);
      BothDevices<FusedAdamW> both(odd_parameters(mode.dtype), with_mode(options, mode));
      both.set_gradients();
      both.step();
      copy_random_gradients(both);
      both.step();  // with the gradients of the capture

      at::cuda::CUDAGraph graph;
      copy_random_gradients(both);
      torch::cuda::synchronize();
      graph.capture_begin();
      both.on_gpu.step();
      graph.capture_end();
      // Captured, not done.
      CHECK(state_of(both.on_gpu, both.gpu[1]).step() == 2);
      for (int replay = 0; replay < 5; ++replay) {
        if (replay > 0) copy_random_gradients(both);
        graph.replay();
        both.on_cpu.step();
        CHECK(state_of(both.on_gpu, both.gpu[1]).step() == 3 + replay);
      }
      CHECK(both.differs() == "");
      if (check) {
        both.gpu[3].grad()[69999].fill_(NAN);
        const auto before = snapshot(both.on_gpu);
        graph.replay();
        CHECK(both.on_gpu.skipped_steps() == 1);
        CHECK(difference(before, snapshot(both.on_gpu)) == "");
      }

      // An eager step in between goes on from the graph's count, and the graph from the eager one's. A new
      // learning rate reaches the device with the eager step; replays alone keep the one they find there.
      copy_random_gradients(both);
      options_of(both.on_gpu).lr(0.5);
      graph.replay();
      both.on_cpu.step();  // still with 0.01
      CHECK(same_bits(both.cpu, both.gpu));
      options_of(both.on_cpu).lr(0.5);
      copy_random_gradients(both);
      both.step();
      CHECK(both.differs() == "");
      copy_random_gradients(both);
      graph.replay();
      both.on_cpu.step();
      CHECK(both.differs() == "");
      // Another optimizer may resume from it.
      FusedAdamW resumed(clones(both.cpu));
      load_from(resumed, saved(both.on_gpu));
      CHECK(state_of(resumed, resumed.param_groups()[0].params()[1]).step() == 10);
    }
  }
}

TEST_CASE("a capture without a step before it is refused, and stepping goes on", "[fused_adam][gpu]") {
  PACER_NEEDS_GPU();
  torch::manual_seed(87);
  const auto stream = c10::cuda::getStreamFromPool();
  const c10::cuda::CUDAStreamGuard guard(stream);
  BothDevices<FusedAdamW> both(random_parameters({{40}, {3}}, at::kFloat), FusedAdamWOptions(0.01));
  both.set_gradients();
  torch::cuda::synchronize();
  at::cuda::CUDAGraph graph;
  graph.capture_begin();
  CHECK_THROWS_AS(both.on_gpu.step(), Error);
  try {
    graph.capture_end();
  } catch (const c10::Error&) {  // an empty capture may be refused
  }
  graph.reset();
  for (int step = 0; step < 3; ++step) {
    both.set_gradients();
    both.step();
  }
  CHECK(both.differs() == "");
}

}  // namespace
}  // namespace pacer::testing
