// 1-bit compression and the 1-bit optimizers on an NVIDIA GPU: the bits of the CPU, which the textbook has
// judged.
#include "support/catch.h"

#include <cmath>
#include <string>
#include <vector>

#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>

#include <pacer/compression/compressed_all_reduce.h>

#include "support/both_devices.h"
#include "support/kernels/onebit_signs.h"
#include "support/samples.h"
#include "support/session/small_run.h"

namespace pacer::testing::onebit_gpu {
namespace {

const at::Device kGpu("cuda:0");

std::string difference_of_devices(int64_t size, const CompressionOptions& options, int64_t shift) {
  CompressedAllReduce on_cpu(Communicator::alone(at::kCPU), size, options);
  CompressedAllReduce on_gpu(Communicator::alone(kGpu), size, options);
  for (int call = 0; call < 4; ++call) {
    const Tensor numbers = at::randn({size}, at::kFloat) * (call == 2 ? 1e-30 : 1.0);
    Tensor a = numbers.clone();
    // `shift` elements into its memory, so that accesses are not aligned.
    const Tensor memory = at::full({size + shift}, 7.0, at::TensorOptions(at::kFloat).device(kGpu));
    const Tensor b = memory.narrow(0, shift, size);
    b.copy_(numbers);
    on_cpu.reduce(a);
    on_gpu.reduce(b);
    if (!same_bits(a, b.cpu())) return "the mean of call " + std::to_string(call);
    if (shift > 0 && memory[shift - 1].item<float>() != 7.0f) return "what lies before the buffer";
    if (!same_bits(on_cpu.worker_error(), on_gpu.worker_error().cpu())) return "the worker's error";
    if (!same_bits(on_cpu.server_error(), on_gpu.server_error().cpu())) return "the server's error";
  }
  return "";
}

}  // namespace

TEST_CASE("a compressed mean has the bits of the CPU", "[onebit][gpu]") {
  PACER_NEEDS_GPU();
  torch::manual_seed(5);
  std::vector<int64_t> sizes = {0,   1,    2,    3,    4,    5,     31,    127,  128,
                                129, 2047, 2048, 2049, 4097, 32767, 32768, 32769};
  if (!wants_small_tests()) sizes.insert(sizes.end(), {100'001, 1'000'003});
  for (const int64_t size : sizes) {
    for (const auto norm : {ScaleNorm::rms, ScaleNorm::l1}) {
      for (const bool blocks : {false, true}) {
        const auto options = CompressionOptions().scale(norm).block_scales(blocks).compress_alone(true);
        CAPTURE(size, static_cast<int>(norm), blocks);
        REQUIRE(difference_of_devices(size, options, 0) == "");
        REQUIRE(difference_of_devices(size, options, 1) == "");
      }
    }
  }
}

TEST_CASE("errors of a compressed mean go on where they are set", "[onebit][gpu]") {
  PACER_NEEDS_GPU();
  const auto options = CompressionOptions().compress_alone(true);
  CompressedAllReduce first(Communicator::alone(kGpu), 5000, options),
      second(Communicator::alone(kGpu), 5000, options);
  Tensor a = at::randn({5000}, at::TensorOptions(at::kFloat).device(kGpu)), b = a.clone();
  first.reduce(a);
  second.set_errors(first.worker_error().cpu(), first.server_error());
  b = at::randn({5000}, b.options());
  a = b.clone();
  first.reduce(a);
  second.reduce(b);
  CHECK(same_bits(a.cpu(), b.cpu()));
}

TEST_CASE("a mean that is not finite is an error of a later call", "[onebit][gpu]") {
  PACER_NEEDS_GPU();
  constexpr int64_t kSize = 200000;  // several units, and a row that is not full
  for (const bool blocks : {false, true}) {
    for (const int64_t place : {int64_t{17}, int64_t{100000}, kSize - 1}) {
      CompressedAllReduce mean(Communicator::alone(kGpu), kSize,
                               CompressionOptions().block_scales(blocks).compress_alone(true));
      const Tensor buffer = at::full({kSize}, 1.0, at::TensorOptions(at::kFloat).device(kGpu));
      buffer[place] = INFINITY;
      const Tensor before = buffer.clone();
      mean.reduce(buffer);
      CHECK(same_bits(buffer.cpu(), before.cpu()));
      torch::cuda::synchronize();
      CHECK_THROWS_WITH(mean.reduce(buffer), Catch::Matchers::ContainsSubstring("not finite"));
      mean.set_errors(at::zeros({kSize}), at::zeros({kSize}));
      buffer.fill_(1.0);
      mean.reduce(buffer);
      CHECK(buffer[0].item<float>() == 1.0f);
    }
  }
}

TEST_CASE("the 1-bit optimizers have the bits of the CPU", "[onebit][gpu]") {
  PACER_NEEDS_GPU();
  for (const SignsCase& c : signs_cases()) {
    INFO(c.name);
    SignsRun on_cpu(c, Communicator::alone(at::kCPU), signs_sizes(), /*alone=*/true);
    SignsRun on_gpu(c, Communicator::alone(kGpu), signs_sizes(), /*alone=*/true);
    for (int64_t step = 0; step < (wants_small_tests() ? 15 : 40); ++step) {
      on_cpu.step(0, step);
      on_gpu.step(0, step);
      if (step % 3 == 0 || step < 8) {
        CAPTURE(step);
        REQUIRE(first_difference(on_cpu.state(), on_gpu.state()) == "");
      }
    }
    CHECK(on_cpu.optimizer->skipped_steps() == on_gpu.optimizer->skipped_steps());
    CHECK(on_gpu.optimizer->skipped_steps() > 0);
    CHECK(on_cpu.optimizer->compression_error() ==
          Catch::Approx(on_gpu.optimizer->compression_error()).epsilon(1e-9));
    CHECK(on_cpu.optimizer->frozen_at() == on_gpu.optimizer->frozen_at());
  }
}

TEST_CASE("the freeze rule decides alike on both devices", "[onebit][gpu]") {
  PACER_NEEDS_GPU();
  const SignsCase c{
      "automatic",
      making_signs<OneBitAdam>(
          OneBitAdamOptions(0.01).betas({0.9, 0.8}).freeze_automatically(60).allow_early_freeze(true)),
      {at::kFloat}};
  SignsRun on_cpu(c, Communicator::alone(at::kCPU), signs_sizes(), /*alone=*/true);
  SignsRun on_gpu(c, Communicator::alone(kGpu), signs_sizes(), /*alone=*/true);
  for (int64_t step = 0; step < 25; ++step) {
    on_cpu.step(0, step);
    on_gpu.step(0, step);
    REQUIRE(first_difference(on_cpu.state(), on_gpu.state()) == "");
  }
  CHECK(on_gpu.optimizer->frozen_at().has_value());
}

TEST_CASE("momentum that overflows is an error of a later step, and nothing is saved", "[onebit][gpu]") {
  PACER_NEEDS_GPU();
  SignsCase c = signs_cases().front();
  SignsRun run(c, Communicator::alone(kGpu), {5000, 300}, /*alone=*/true);
  for (int64_t step = 0; step < 7; ++step) run.step(0, step);
  const auto parameter = run.parameters[0].detach().clone();
  run.parameters[0].mutable_grad().fill_(
      3e38);  // finite, as is its norm in double; the sum of squares is not
  run.parameters[0].mutable_grad()[3] = 0;
  run.optimizer->step();
  CHECK(run.optimizer->skipped_steps() == 1);
  CHECK(same_bits(parameter.cpu(), run.parameters[0].detach().cpu()));
}

}  // namespace pacer::testing::onebit_gpu
