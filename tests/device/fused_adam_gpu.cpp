// FusedAdam and FusedAdamW on an NVIDIA GPU: the bits of the CPU, on the current stream, without waiting for
// anything.
#include "support/catch.h"

#include <cstdlib>

#include <ATen/cuda/CUDAEvent.h>
#include <ATen/cuda/Sleep.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/cuda.h>

#include "support/both_devices.h"
#include "support/checkpoints/archives.h"
#include "support/no_waiting.h"
#include "support/optimizers/twins.h"

namespace pacer::testing {
namespace {

constexpr int64_t kLongSleep = 500'000'000;  // clock cycles, more than 0.2 s

TEMPLATE_TEST_CASE("CPU and GPU agree to the bit in every mode", "[fused_adam][gpu]", FusedAdam, FusedAdamW) {
  PACER_NEEDS_GPU();
  for (const Mode& mode : all_modes()) {
    for (const bool amsgrad : {false, true}) {
      for (const bool check : {false, true}) {
        CAPTURE(mode.name, amsgrad, check);
        torch::manual_seed(81);
        const auto options =
            OptionsOf<TestType>(0.01).weight_decay(0.1).amsgrad(amsgrad).finite_check(check).seed(3);
        BothDevices<TestType> both(odd_parameters(mode.dtype), with_mode(options, mode));
        for (int step = 0; step < 20; ++step) {
          both.set_gradients();
          both.set_lr(0.01 / (1 + step));
          if (step % 4 == 1) both.clear_gradient(static_cast<size_t>(step) % both.cpu.size());
          if (check && step % 6 == 4) {
            both.cpu[3].grad()[step * 1000].fill_(HUGE_VAL);
            both.gpu[3].grad()[step * 1000].fill_(HUGE_VAL);
          }
          both.step();
        }
        CHECK(both.differs() == "");
        CHECK(both.on_gpu.skipped_steps() == (check ? 3 : 0));
        CHECK(both.on_cpu.skipped_steps() == (check ? 3 : 0));
        CHECK(state_of(both.on_gpu, both.gpu[3]).step() == (check ? 16 : 19));
      }
    }
  }
}

TEST_CASE("lists of any length agree with the CPU to the bit", "[fused_adam][gpu]") {
  PACER_NEEDS_GPU();
  torch::manual_seed(82);
  for (const size_t count : {1, 2, 33, 400, 3000}) {
    CAPTURE(count);
    std::vector<std::vector<int64_t>> shapes;
    for (size_t i = 0; i < count; ++i) shapes.push_back({static_cast<int64_t>(i * 7 % 130)});
    BothDevices<FusedAdamW> both(random_parameters(shapes, at::kFloat),
                                 FusedAdamWOptions(0.01).finite_check(true));
    for (int step = 0; step < 3; ++step) {
      both.set_gradients();
      both.step();
    }
    CHECK(same_bits(both.cpu, both.gpu));
  }
}

TEST_CASE("a GPU follows torch's AdamW and takes over its state", "[fused_adam][gpu]") {
  PACER_NEEDS_GPU();
  torch::manual_seed(83);
  const auto parameters = moved_to(random_parameters({{40, 30}, {7}, {}}, at::kDouble));
  Twins<FusedAdamW> twins(parameters, torch::optim::AdamWOptions(0.01).weight_decay(0.1).amsgrad(true));
  for (int step = 0; step < 10; ++step) twins.step_with_random_gradients();
  CHECK(twins.apart() <= 1e-13);
  FusedAdamW after(twins.theirs);
  after.take_over(twins.peer);
  for (int step = 0; step < 3; ++step) {
    set_random_gradients(twins.ours, twins.theirs);
    twins.optimizer.step();
    after.step();
  }
  CHECK(twins.apart() <= 1e-13);
}

TEST_CASE("a step returns before the device begins it, and queued steps keep their own settings",
          "[fused_adam][gpu]") {
  PACER_NEEDS_GPU();
  for (const bool check : {false, true}) {
    CAPTURE(check);
    torch::manual_seed(84);
    BothDevices<FusedAdamW> both(random_parameters({{1000}, {64, 64}, {0}, {7}}, at::kBFloat16),
                                 FusedAdamWOptions(0.01).finite_check(check));
    both.set_gradients();
    both.step();
    std::vector<std::vector<Tensor>> cpu_gradients(50), gpu_gradients(50);
    for (size_t step = 0; step < 50; ++step) {
      both.set_gradients();
      for (size_t i = 0; i < both.cpu.size(); ++i) {
        cpu_gradients[step].push_back(both.cpu[i].grad());
        gpu_gradients[step].push_back(both.gpu[i].grad());
      }
      if (check && step % 10 == 5) {
        cpu_gradients[step][1][3][4] = NAN;
        gpu_gradients[step][1][3][4] = NAN;
      }
    }
    const auto use = [&](std::vector<Tensor>& parameters, std::vector<Tensor>& gradients,
                         FusedAdamW& optimizer, size_t step) {
      for (size_t i = 0; i < parameters.size(); ++i) {
        parameters[i].mutable_grad() = step % 7 == 3 && i == 3 ? Tensor() : gradients[i];
      }
      options_of(optimizer)
          .lr(0.01 + 0.001 * static_cast<double>(step))
          .weight_decay(0.01 * static_cast<double>(step));
      optimizer.step();
    };
    torch::cuda::synchronize();
    at::cuda::CUDAEvent slept;
    at::cuda::sleep(kLongSleep);
    slept.record();
    {
      const NoWaiting no_waiting;
      for (size_t step = 0; step < 50; ++step) use(both.gpu, gpu_gradients[step], both.on_gpu, step);
    }
    // A checking tool runs launches one by one, so there the host waits whatever the optimizer does.
    if (std::getenv("PACER_TEST_SMALL") == nullptr) CHECK_FALSE(slept.query());
    for (size_t step = 0; step < 50; ++step) use(both.cpu, cpu_gradients[step], both.on_cpu, step);
    CHECK(both.differs() == "");
    CHECK(both.on_gpu.skipped_steps() == (check ? 5 : 0));
  }
}

TEST_CASE("a step is enqueued on the current stream", "[fused_adam][gpu]") {
  PACER_NEEDS_GPU();
  for (const bool check : {false, true}) {
    torch::manual_seed(85);
    BothDevices<FusedAdamW> both(odd_parameters(at::kFloat), FusedAdamWOptions(0.01).finite_check(check));
    for (int step = 0; step < 4; ++step) {
      both.set_gradients();
      std::vector<Tensor> late;
      for (Tensor& p : both.gpu) {
        late.push_back(p.grad());
        p.mutable_grad() = torch::zeros_like(p.grad());
      }
      torch::cuda::synchronize();
      const auto stream = c10::cuda::getStreamFromPool();
      {
        const c10::cuda::CUDAStreamGuard guard(stream);
        // The gradients arrive late on this stream: any other would read zeros.
        at::cuda::sleep(kLongSleep / 10);
        for (size_t i = 0; i < late.size(); ++i) both.gpu[i].grad().copy_(late[i]);
        both.on_gpu.step();
      }
      stream.synchronize();
      both.on_cpu.step();
      CHECK(both.differs() == "");
    }
  }
}

TEST_CASE("a tensor of another device is refused by name, however it comes in", "[fused_adam][gpu]") {
  PACER_NEEDS_GPU();
  const auto on_cpu = random_parameters({{3}}, at::kFloat),
             on_gpu = moved_to(random_parameters({{4}, {5}}, at::kFloat));
  CHECK(contains(refusal([&] { FusedAdamW({on_gpu[0], on_cpu[0]}); }), "parameter 1 of group 0 (shape ["));
  CHECK(contains(refusal([&] { FusedAdamW({on_cpu[0], on_gpu[0]}); }), "parameter 1 of group 0 (shape ["));
  FusedAdamW optimizer(on_gpu, FusedAdamWOptions(0.1));
  set_random_gradients(on_gpu);
  optimizer.step();
  CHECK(unless_refused(optimizer, {"parameter 0 of group 1", "cpu", "cuda"},
                       [&] { optimizer.add_param_group(torch::optim::OptimizerParamGroup(on_cpu)); }) == "");
  set_random_gradients(on_cpu);
  optimizer.param_groups()[0].params().push_back(on_cpu[0]);
  CHECK(unless_refused(optimizer, {"parameter 2 of group 0", "cpu", "cuda"}, [&] { optimizer.step(); }) ==
        "");
  optimizer.param_groups()[0].params().pop_back();
  on_gpu[1].mutable_grad() = torch::ones({5});
  CHECK(unless_refused(optimizer, {"parameter 1 of group 0", "cpu", "cuda"}, [&] { optimizer.step(); }) ==
        "");
  set_random_gradients(on_gpu);
  optimizer.step();
  CHECK(state_of(optimizer, on_gpu[1]).step() == 2);
}

TEST_CASE("state travels between devices through an archive and through Module::to", "[fused_adam][gpu]") {
  PACER_NEEDS_GPU();
  for (const Mode& mode : all_modes()) {
    for (const bool check : {false, true}) {
      CAPTURE(mode.name, check);
      torch::manual_seed(88);
      const auto options = with_mode(FusedAdamWOptions(0.01).amsgrad(true).finite_check(check).seed(6), mode);
      BothDevices<FusedAdamW> both(odd_parameters(mode.dtype), options);
      for (int step = 0; step < 3; ++step) {
        both.set_gradients();
        both.step();
      }
      // Crosswise: the GPU's archive continues on the CPU and the other way round.
      auto cpu = clones(both.cpu), gpu = moved_to(both.gpu);
      FusedAdamW to_cpu(cpu), to_gpu(gpu);
      load_from(to_cpu, saved(both.on_gpu));
      load_from(to_gpu, saved(both.on_cpu));
      for (int step = 0; step < 3; ++step) {
        both.set_gradients();
        for (size_t i = 0; i < cpu.size(); ++i) {
          cpu[i].mutable_grad() = both.cpu[i].grad();
          gpu[i].mutable_grad() = both.gpu[i].grad();
        }
        both.step();
        to_cpu.step();
        to_gpu.step();
      }
      CHECK(both.differs() == "");
      CHECK(difference(snapshot(both.on_cpu), snapshot(to_cpu)) == "");
      CHECK(difference(snapshot(both.on_cpu), snapshot(to_gpu)) == "");
      // A model moved under its optimizer, there and back.
      for (const at::Device device : {at::Device(at::kCPU), at::Device(at::kCUDA, 0)}) {
        for (Tensor& p : gpu) {
          p.set_data(p.detach().to(device));
          p.mutable_grad() = Tensor();
        }
        set_random_gradients(both.cpu, gpu);
        both.on_cpu.step();
        to_gpu.step();
        CHECK(difference(snapshot(both.on_cpu), snapshot(to_gpu)) == "");
      }
    }
  }
}

TEST_CASE("a tensor of more than 2^31 elements is updated to its very end", "[fused_adam][gpu][large]") {
  PACER_NEEDS_GPU();
  size_t free = 0, total = 0;
  C10_CUDA_CHECK(cudaMemGetInfo(&free, &total));
  if (free < (size_t{40} << 30)) PACER_SKIP("less than 40 GiB of free GPU memory");
  torch::manual_seed(89);
  const int64_t count = (int64_t{1} << 31) + 4099;
  const Tensor large =
      torch::randn({count}, at::TensorOptions(at::kBFloat16).device(at::kCUDA)).requires_grad_();
  large.mutable_grad() = torch::randn({count}, at::TensorOptions(at::kBFloat16).device(at::kCUDA));
  std::vector<Tensor> pieces;
  std::vector<int64_t> begins = {0, (int64_t{1} << 30) - 500, (int64_t{1} << 31) - 500, count - 1000};
  for (const int64_t begin : begins) {
    pieces.push_back(large.detach().slice(0, begin, begin + 1000).cpu().requires_grad_());
    pieces.back().mutable_grad() = large.grad().slice(0, begin, begin + 1000).cpu();
  }
  const auto options = with_mode(FusedAdamWOptions(0.01).finite_check(true), all_modes()[4]);
  FusedAdamW on_gpu({large}, options), on_cpu(pieces, options);
  for (int step = 0; step < 2; ++step) {
    on_gpu.step();
    on_cpu.step();
  }
  for (size_t i = 0; i < begins.size(); ++i) {
    CHECK(same_bits(large.slice(0, begins[i], begins[i] + 1000), pieces[i]));
  }
  large.grad()[count - 1].fill_(NAN);
  on_gpu.step();
  CHECK(on_gpu.skipped_steps() == 1);
}

TEST_CASE("two GPUs: parameters may not be spread, an optimizer may be on either", "[fused_adam][gpu]") {
  PACER_NEEDS_GPU();
  if (torch::cuda::device_count() < 2) PACER_SKIP("fewer than two GPUs");
  torch::manual_seed(90);
  const auto cpu = odd_parameters(at::kFloat);
  const auto first = moved_to(cpu, at::Device(at::kCUDA, 0)),
             second = moved_to(cpu, at::Device(at::kCUDA, 1));
  CHECK(contains(refusal([&] { FusedAdamW({first[0], second[1]}); }), "parameter 1 of group 0 (shape ["));
  const c10::cuda::CUDAGuard current(0);
  FusedAdamW on_cpu(cpu, FusedAdamWOptions(0.01).finite_check(true));
  FusedAdamW on_second(second, FusedAdamWOptions(0.01).finite_check(true));
  for (int step = 0; step < 3; ++step) {
    set_random_gradients(cpu, second);
    on_cpu.step();
    on_second.step();
    CHECK(c10::cuda::current_device() == 0);
  }
  CHECK(difference(snapshot(on_cpu), snapshot(on_second)) == "");
}

}  // namespace
}  // namespace pacer::testing
