// FusedSgd and FusedRmsprop on an NVIDIA GPU: the bits of the CPU, without waiting for anything, and in CUDA graphs.
#include "support/catch.h"

#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/cuda.h>

#include "support/both_devices.h"
#include "support/checkpoints/archives.h"
#include "support/no_waiting.h"
#include "support/optimizers/torch_rules.h"

namespace pacer::testing {
namespace {

// Options that take each of the loops.
template <class Optimizer>
std::vector<OptionsOf<Optimizer>> kinds_on_both() {
  using Rule = TorchRule<Optimizer>;
  return Rule::kinds_of(Rule::rich().lr(0.01).seed(3));
}

}  // namespace

TEMPLATE_TEST_CASE("an optimizer with a rule of torch's agrees on CPU and GPU to the bit in every mode",
                   "[torch_rules][gpu]", FusedSgd, FusedRmsprop) {
  PACER_NEEDS_GPU();
  for (const Mode& mode : all_modes()) {
    for (const auto& options : kinds_on_both<TestType>()) {
      for (const bool check : {false, true}) {
        CAPTURE(mode.name, TorchRule<TestType>::tensors(options), options.momentum(), check);
        torch::manual_seed(81);
        BothDevices<TestType> both(odd_parameters(mode.dtype),
                                   with_mode(OptionsOf<TestType>(options).finite_check(check), mode));
        for (int step = 0; step < 12; ++step) {
          both.set_gradients();
          both.set_lr(0.01 / (1 + step));
          if (step % 4 == 1) both.clear_gradient(static_cast<size_t>(step) % both.cpu.size());
          if (step < 3) both.clear_gradient(4);  // its state begins later
          if (check && step % 6 == 4) {
            both.cpu[3].grad()[step * 1000].fill_(HUGE_VAL);
            both.gpu[3].grad()[step * 1000].fill_(HUGE_VAL);
          }
          both.step();
        }
        CHECK(both.differs() == "");
        CHECK(both.on_gpu.skipped_steps() == (check ? 2 : 0));
      }
    }
  }
}

TEST_CASE("the first SGD step is the first one that is applied, also where the device decides that",
          "[torch_rules][gpu]") {
  PACER_NEEDS_GPU();
  torch::manual_seed(82);
  BothDevices<FusedSgd> both(random_parameters({{1000}, {64, 64}}, at::kFloat),
                             FusedSgdOptions(0.1).momentum(0.9).dampening(0.5).finite_check(true));
  for (int step = 0; step < 4; ++step) {
    both.set_gradients();
    if (step < 2) {
      both.cpu[0].grad()[7].fill_(NAN);
      both.gpu[0].grad()[7].fill_(NAN);
    }
    both.step();
    if (step == 2) CHECK(same_bits(state_of(both.on_gpu, both.gpu[0]).momentum_buffer(), both.cpu[0].grad()));
  }
  CHECK(both.differs() == "");
}

TEMPLATE_TEST_CASE("a step with a rule of torch's does not wait for the device", "[torch_rules][gpu]",
                   FusedSgd, FusedRmsprop) {
  PACER_NEEDS_GPU();
  torch::manual_seed(83);
  BothDevices<TestType> both(random_parameters({{1000}, {64, 640}, {0}, {7}}, at::kBFloat16),
                             TorchRule<TestType>::rich().finite_check(true));
  both.set_gradients();
  both.step();
  {
    const NoWaiting no_waiting;
    for (int step = 0; step < 5; ++step) {
      options_of(both.on_gpu).lr(0.01 * (step + 1));
      CHECK_NOTHROW(both.on_gpu.step());
    }
  }
  for (int step = 0; step < 5; ++step) {
    options_of(both.on_cpu).lr(0.01 * (step + 1));
    both.on_cpu.step();
  }
  CHECK(both.differs() == "");
}

TEMPLATE_TEST_CASE("a captured step with a rule of torch's replays to the bits of eager steps",
                   "[torch_rules][gpu]", FusedSgd, FusedRmsprop) {
  PACER_NEEDS_GPU();
  for (const Mode& mode : all_modes()) {
    for (const auto& options : kinds_on_both<TestType>()) {
      CAPTURE(mode.name, TorchRule<TestType>::tensors(options), options.momentum());
      torch::manual_seed(86);
      const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromPool());
      BothDevices<TestType> both(odd_parameters(mode.dtype),
                                 with_mode(OptionsOf<TestType>(options).finite_check(true), mode));
      both.set_gradients();
      std::vector<Tensor> fixed;  // gradients that keep their addresses
      for (const Tensor& p : both.gpu) fixed.push_back(p.grad());
      const auto renew = [&] {
        both.set_gradients();
        for (size_t i = 0; i < fixed.size(); ++i) {
          fixed[i].copy_(both.cpu[i].grad());
          both.gpu[i].mutable_grad() = fixed[i];
        }
      };
      both.step();
      at::cuda::CUDAGraph graph;
      renew();
      torch::cuda::synchronize();
      graph.capture_begin();
      both.on_gpu.step();
      graph.capture_end();
      for (int replay = 0; replay < 4; ++replay) {
        if (replay > 0) renew();
        graph.replay();
        both.on_cpu.step();
      }
      CHECK(both.differs() == "");
    }
  }
}

TEMPLATE_TEST_CASE("the state of a rule of torch's travels between devices", "[torch_rules][gpu]", FusedSgd,
                   FusedRmsprop) {
  PACER_NEEDS_GPU();
  for (const Mode& mode : all_modes()) {
    CAPTURE(mode.name);
    torch::manual_seed(88);
    BothDevices<TestType> both(odd_parameters(mode.dtype),
                               with_mode(TorchRule<TestType>::rich().seed(6), mode));
    for (int step = 0; step < 3; ++step) {
      both.set_gradients();
      both.step();
    }
    auto cpu = clones(both.cpu), gpu = moved_to(both.gpu);
    TestType to_cpu(cpu), to_gpu(gpu);
    load_from(to_cpu, saved(both.on_gpu));
    to_gpu.import_state(both.on_cpu.export_state());
    for (int step = 0; step < 2; ++step) {
      both.set_gradients();
      for (size_t i = 0; i < cpu.size(); ++i) {
        cpu[i].mutable_grad() = both.cpu[i].grad();
        gpu[i].mutable_grad() = both.gpu[i].grad();
      }
      both.step();
      to_cpu.step();
      to_gpu.step();
    }
    CHECK(difference(snapshot(both.on_cpu), snapshot(to_cpu)) == "");
    CHECK(difference(snapshot(both.on_cpu), snapshot(to_gpu)) == "");
  }
}

}  // namespace pacer::testing
