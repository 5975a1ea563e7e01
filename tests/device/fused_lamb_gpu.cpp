// FusedLamb on an NVIDIA GPU: the bits of the CPU, without waiting for anything, in CUDA graphs, and for
// tensors beyond 2^31 elements.
#include "support/catch.h"

#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/cuda.h>

#include "support/both_devices.h"
#include "support/checkpoints/archives.h"
#include "support/kernels/lamb.h"
#include "support/no_waiting.h"
#include "support/optimizers/contract.h"

namespace pacer::testing::lamb {
namespace {

std::string ratios_differ(BothDevices<FusedLamb>& both) {
  for (size_t i = 0; i < both.cpu.size(); ++i) {
    if (both.on_cpu.trust_ratio(both.cpu[i]) != both.on_gpu.trust_ratio(both.gpu[i]))
      return std::to_string(i);
  }
  return "";
}

// Gradients that keep their addresses, for graphs.
void copy_random_gradients(BothDevices<FusedLamb>& both) {
  std::vector<Tensor> fixed;
  for (const Tensor& p : both.gpu) fixed.push_back(p.grad());
  both.set_gradients();
  for (size_t i = 0; i < fixed.size(); ++i) {
    fixed[i].copy_(both.cpu[i].grad());
    both.gpu[i].mutable_grad() = fixed[i];
  }
}

}  // namespace

TEST_CASE("FusedLamb agrees on CPU and GPU to the bit in every mode", "[fused_lamb][gpu]") {
  PACER_NEEDS_GPU();
  for (const Mode& mode : all_modes()) {
    for (const bool adapt : {true, false}) {
      for (const bool check : {false, true}) {
        CAPTURE(mode.name, adapt, check);
        torch::manual_seed(81);
        const auto options =
            FusedLambOptions(0.01).weight_decay(0.1).adapt(adapt).max_coeff(2).finite_check(check).seed(3);
        BothDevices<FusedLamb> both(odd_parameters(mode.dtype), with_mode(options, mode));
        for (int step = 0; step < 12; ++step) {
          both.set_gradients();
          both.set_lr(0.01 / (1 + step));
          if (step % 4 == 1) both.clear_gradient(static_cast<size_t>(step) % both.cpu.size());
          if (check && step % 6 == 4) {
            both.cpu[3].grad()[step * 1000].fill_(HUGE_VAL);
            both.gpu[3].grad()[step * 1000].fill_(HUGE_VAL);
          }
          both.step();
          CHECK(ratios_differ(both) == "");
        }
        CHECK(both.differs() == "");
        CHECK(both.on_gpu.skipped_steps() == (check ? 2 : 0));
      }
    }
  }
}

TEST_CASE("lists of any length take LAMB steps to the bits of the CPU", "[fused_lamb][gpu]") {
  PACER_NEEDS_GPU();
  torch::manual_seed(82);
  for (const size_t count : {1, 2, 33, 400, 3000}) {
    CAPTURE(count);
    std::vector<std::vector<int64_t>> shapes;
    for (size_t i = 0; i < count; ++i) shapes.push_back({static_cast<int64_t>(i * 7 % 260)});
    BothDevices<FusedLamb> both(random_parameters(shapes, at::kFloat),
                                FusedLambOptions(0.01).finite_check(true));
    for (int step = 0; step < 3; ++step) {
      both.set_gradients();
      both.step();
    }
    CHECK(same_bits(both.cpu, both.gpu));
  }
}

TEST_CASE("a LAMB step does not wait for the device", "[fused_lamb][gpu]") {
  PACER_NEEDS_GPU();
  torch::manual_seed(83);
  BothDevices<FusedLamb> both(random_parameters({{1000}, {64, 640}, {0}, {7}}, at::kBFloat16),
                              FusedLambOptions(0.01).finite_check(true));
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

TEST_CASE("a captured LAMB step replays to the bits of eager steps, ratios included", "[fused_lamb][gpu]") {
  PACER_NEEDS_GPU();
  for (const Mode& mode : all_modes()) {
    CAPTURE(mode.name);
    torch::manual_seed(86);
    const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromPool());
    const auto options = FusedLambOptions(0.01).finite_check(true).seed(4);
    BothDevices<FusedLamb> both(odd_parameters(mode.dtype), with_mode(options, mode));
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
    for (int replay = 0; replay < 4; ++replay) {
      if (replay > 0) copy_random_gradients(both);
      graph.replay();
      both.on_cpu.step();
      CHECK(ratios_differ(both) == "");
    }
    CHECK(both.differs() == "");
    both.gpu[3].grad()[69999].fill_(NAN);
    const auto before = snapshot(both.on_gpu);
    graph.replay();
    CHECK(both.on_gpu.skipped_steps() == 1);
    CHECK(difference(before, snapshot(both.on_gpu)) == "");
    // A new learning rate reaches the device with the next prepare; the graph goes on with it.
    for (FusedLamb* each : {&both.on_gpu, &both.on_cpu}) options_of(*each).lr(0.5);
    copy_random_gradients(both);
    contract(both.on_gpu).prepare({});
    graph.replay();
    contract(both.on_gpu).conclude(true);
    both.on_cpu.step();
    CHECK(ratios_differ(both) == "");
    CHECK(both.differs() == "");
  }
}

TEST_CASE("FusedLamb's state travels between devices", "[fused_lamb][gpu]") {
  PACER_NEEDS_GPU();
  for (const Mode& mode : all_modes()) {
    CAPTURE(mode.name);
    torch::manual_seed(88);
    BothDevices<FusedLamb> both(odd_parameters(mode.dtype), with_mode(FusedLambOptions(0.01).seed(6), mode));
    for (int step = 0; step < 3; ++step) {
      both.set_gradients();
      both.step();
    }
    auto cpu = clones(both.cpu), gpu = moved_to(both.gpu);
    FusedLamb to_cpu(cpu), to_gpu(gpu);
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

TEST_CASE("N4: a tensor of more than 2^31 elements takes a LAMB step to its very end",
          "[fused_lamb][gpu][large]") {
  PACER_NEEDS_GPU();
  size_t free = 0, total = 0;
  C10_CUDA_CHECK(cudaMemGetInfo(&free, &total));
  if (free < (size_t{60} << 30)) PACER_SKIP("less than 60 GiB of free GPU memory");
  torch::manual_seed(89);
  const int64_t count = (int64_t{1} << 31) + 4099;
  const auto options = at::TensorOptions(at::kBFloat16).device(at::kCUDA);
  // Halves of magnitude 1 and gradients of magnitude 2^-3 make both norms known: |p|^2 = count, and from zero
  // moments every element of u is close to 1.
  const Tensor large =
      torch::where(torch::rand({count}, options) < 0.5, torch::ones({}, options), -torch::ones({}, options))
          .requires_grad_();
  large.mutable_grad() = large.detach().clone().mul_(-0.125);
  FusedLamb optimizer(
      {large},
      FusedLambOptions(0.25).weight_decay(0).eps(0).master_weights(MasterWeights::none).finite_check(true));
  optimizer.step();
  // Moments are rounded to bf16, in each element alike.
  CHECK(optimizer.trust_ratio(large) == Catch::Approx(1).epsilon(0.01));
  const Tensor moved = large.detach().abs();
  CHECK(count_true(moved.ne(1.25)) == 0);
  large.grad()[count - 1].fill_(NAN);
  optimizer.step();
  CHECK(optimizer.skipped_steps() == 1);
}

TEST_CASE("the last element of a tensor beyond 2^31 elements counts in its norm",
          "[fused_lamb][gpu][large]") {
  PACER_NEEDS_GPU();
  size_t free = 0, total = 0;
  C10_CUDA_CHECK(cudaMemGetInfo(&free, &total));
  if (free < (size_t{60} << 30)) PACER_SKIP("less than 60 GiB of free GPU memory");
  const int64_t count = (int64_t{1} << 31) + 1;
  const auto options = at::TensorOptions(at::kBFloat16).device(at::kCUDA);
  const Tensor large = torch::zeros({count}, options).requires_grad_();
  large.mutable_grad() = torch::zeros({count}, options);
  {
    const torch::NoGradGuard no_grad;
    large[count - 1].fill_(3);
    large.grad()[count - 1].fill_(1);
  }
  FusedLamb optimizer(
      {large},
      FusedLambOptions(0.5).weight_decay(0).eps(1e-30).bias_correction(false).betas({0, 0}).master_weights(
          MasterWeights::none));
  optimizer.step();
  CHECK(optimizer.trust_ratio(large) == Catch::Approx(3).epsilon(0.01));
  CHECK(large[count - 1].item<double>() == 1.5);
  CHECK(large[0].item<double>() == 0);
}

}  // namespace pacer::testing::lamb
