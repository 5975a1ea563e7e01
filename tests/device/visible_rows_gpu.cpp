// Steps over some of the rows on a GPU: the bits of the CPU, for every rule and dtype set that has such steps.
#include "support/catch.h"

#include <memory>
#include <string>
#include <vector>

#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAGuard.h>

#include <pacer/pacer.h>

#include "support/both_devices.h"
#include "support/session/registry.h"

namespace pacer::testing::visible_rows_gpu {
namespace {

constexpr int64_t kRows = 4099;
// Packets of four and of eight numbers lie in one row, in two and in many; the last tensor is worked on by warps.
const std::vector<std::vector<int64_t>> kShapes{{kRows, 48}, {kRows, 3}, {kRows}, {kRows, 1, 5}, {5, 3}};

struct Run {
  Run(const RegisteredOptimizer& form, at::Device device) {
    torch::manual_seed(3);
    for (size_t i = 0; i < kShapes.size(); ++i) {
      parameters.push_back(torch::randn(kShapes[i]).to(form.dtype).to(device).requires_grad_());
      names.insert("p" + std::to_string(i), parameters.back());
    }
    optimizer = form.make(names, nullptr);
  }
  void step(int number) {
    torch::manual_seed(100 + static_cast<uint64_t>(number));
    const double share = number % 3 == 0 ? 0.1 : number % 3 == 1 ? 0.9 : 0.5;
    for (const Tensor& parameter : parameters) {
      parameter.mutable_grad() = torch::randn(parameter.sizes()).to(parameter.options().requires_grad(false));
      const Tensor visible = (torch::rand({parameter.size(0)}) < share).to(parameter.device());
      masks.push_back(visible);
      if (number > 0) dynamic_cast<FusedOptimizer&>(*optimizer).set_visible_rows({parameter}, visible);
    }
    optimizer->step();
  }
  std::vector<Tensor> parameters, masks;
  NamedParameters names;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
};

bool has(const RegisteredOptimizer& form, const char* word) {
  return form.name.find(word) != std::string::npos;
}

}  // namespace

TEST_CASE("steps over visible rows on a GPU have the bits of the CPU", "[rows][gpu]") {
  PACER_NEEDS_GPU();
  int compared = 0;
  for (const RegisteredOptimizer& form : all_optimizers()) {
    if (!form.is_own || form.has_ranks || form.averages || has(form, "Lamb") || has(form, "Muon") ||
        has(form, "8 bits") || has(form, "paged"))
      continue;
    CAPTURE(form.name);
    Run cpu(form, at::kCPU), gpu(form, at::kCUDA);
    for (int number = 0; number < 7; ++number) {
      cpu.step(number), gpu.step(number);
      for (size_t i = 0; i < kShapes.size(); ++i) {
        CAPTURE(number, i);
        REQUIRE(same_bits(gpu.parameters[i], cpu.parameters[i]));
      }
    }
    ++compared;
  }
  CHECK(compared >= 12);
}

// Large enough that a block has many tiles; rows of tiles and rows of less than a packet.
TEST_CASE("steps over visible rows of large tables have the bits of the CPU", "[rows][gpu]") {
  PACER_NEEDS_GPU();
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    CAPTURE(dtype);
    torch::manual_seed(6);
    std::vector<Tensor> cpu, gpu, masks, of_gpu;
    for (const std::vector<int64_t>& shape :
         std::vector<std::vector<int64_t>>{{200'003, 59}, {1'000'003, 3}, {2, 3'000'001}, {70'001}}) {
      cpu.push_back(torch::randn(shape).to(dtype).requires_grad_());
      gpu.push_back(moved_to(cpu.back(), at::kCUDA));
      masks.push_back(torch::zeros({shape[0]}, torch::kBool));
      of_gpu.push_back(masks.back().cuda());
    }
    FusedAdamW on_cpu(cpu, FusedAdamWOptions(0.1)), on_gpu(gpu, FusedAdamWOptions(0.1));
    for (const double share : {0.5, 0.1, 0.0, 0.001, 0.95, 1.0}) {
      for (size_t i = 0; i < cpu.size(); ++i) {
        masks[i] = torch::rand({cpu[i].size(0)}) < share;
        of_gpu[i] = masks[i].cuda();
        on_cpu.set_visible_rows({cpu[i]}, masks[i]), on_gpu.set_visible_rows({gpu[i]}, of_gpu[i]);
      }
      set_random_gradients(cpu, gpu);
      on_cpu.step(), on_gpu.step();
      for (size_t i = 0; i < cpu.size(); ++i) {
        CAPTURE(share, i);
        REQUIRE(same_bits(gpu[i], cpu[i]));
      }
    }
  }
}

TEST_CASE("a captured step follows a mask that is written to between replays", "[rows][graph][gpu]") {
  PACER_NEEDS_GPU();
  torch::manual_seed(4);
  const Tensor initial = torch::randn({1000, 12});
  const auto make = [&](at::Device device) { return initial.clone().to(device).requires_grad_(); };
  const Tensor on_gpu = make(at::kCUDA), on_cpu = make(at::kCPU);
  on_gpu.mutable_grad() = torch::zeros_like(on_gpu.detach());
  on_cpu.mutable_grad() = torch::zeros_like(on_cpu.detach());
  FusedAdamW gpu({on_gpu}, FusedAdamWOptions(0.1)), cpu({on_cpu}, FusedAdamWOptions(0.1));
  const Tensor visible = torch::ones({1000}, at::TensorOptions(at::kCUDA).dtype(at::kBool));
  const Tensor of_cpu = torch::ones({1000}, torch::kBool);
  gpu.set_visible_rows({on_gpu}, visible), cpu.set_visible_rows({on_cpu}, of_cpu);
  const auto next = [&](int number) {
    torch::manual_seed(static_cast<uint64_t>(number));
    on_cpu.grad().copy_(torch::randn({1000, 12}));
    of_cpu.copy_(torch::rand({1000}) < 0.3);
    on_gpu.grad().copy_(on_cpu.grad()), visible.copy_(of_cpu);
  };
  auto& contract = static_cast<SessionOptimizer&>(gpu);
  StepInputs inputs;
  inputs.replayable = true;
  next(0);
  contract.prepare(inputs);
  contract.conclude(contract.enqueue());
  cpu.step();
  next(1);
  contract.prepare(inputs);
  at::cuda::CUDAGraph graph;
  {
    const c10::cuda::CUDAStream stream = c10::cuda::getStreamFromPool();
    stream.synchronize();
    const c10::cuda::CUDAStreamGuard guard(stream);
    c10::cuda::device_synchronize();
    graph.capture_begin();
    contract.enqueue();
    graph.capture_end();
  }
  for (int number = 1; number < 5; ++number) {
    if (number > 1) {
      next(number);
      contract.prepare(inputs);
    }
    c10::cuda::device_synchronize();
    graph.replay();
    contract.conclude(true);
    cpu.step();
    CAPTURE(number);
    CHECK(same_bits(on_gpu, on_cpu));
  }
}

// As a loop without a Session captures it: the table of masks was sent by the step before.
TEST_CASE("step() is captured with a mask set, and its replays have the bits of the CPU",
          "[rows][graph][gpu]") {
  PACER_NEEDS_GPU();
  torch::manual_seed(8);
  const c10::cuda::CUDAStream stream = c10::cuda::getStreamFromPool();
  const c10::cuda::CUDAStreamGuard guard(stream);
  const Tensor initial = torch::randn({1000, 12});
  const Tensor on_cpu = initial.clone().requires_grad_(), on_gpu = initial.clone().cuda().requires_grad_();
  on_cpu.mutable_grad() = torch::zeros({1000, 12});
  on_gpu.mutable_grad() = torch::zeros_like(on_gpu.detach());
  FusedAdamW cpu({on_cpu}, FusedAdamWOptions(0.1)), gpu({on_gpu}, FusedAdamWOptions(0.1));
  const Tensor of_cpu = torch::ones({1000}, torch::kBool), of_gpu = of_cpu.cuda();
  const auto next = [&] {
    on_cpu.grad().copy_(torch::randn({1000, 12}));
    of_cpu.copy_(torch::rand({1000}) < 0.3);
    on_gpu.grad().copy_(on_cpu.grad()), of_gpu.copy_(of_cpu);
    torch::cuda::synchronize();
  };
  cpu.set_visible_rows({on_cpu}, of_cpu), gpu.set_visible_rows({on_gpu}, of_gpu);
  next();
  cpu.step(), gpu.step();
  at::cuda::CUDAGraph graph;
  torch::cuda::synchronize();
  graph.capture_begin();
  gpu.step();
  graph.capture_end();
  for (int replay = 0; replay < 4; ++replay) {
    next();
    graph.replay();
    cpu.step();
    CAPTURE(replay);
    CHECK(same_bits(on_gpu, on_cpu));
  }
  // Steps behind the graph follow another mask.
  const Tensor other = torch::zeros({1000}, torch::kBool);
  cpu.set_visible_rows({on_cpu}, other), gpu.set_visible_rows({on_gpu}, other.cuda());
  next();
  cpu.step(), gpu.step();
  CHECK(same_bits(on_gpu, on_cpu));
}

}  // namespace pacer::testing::visible_rows_gpu
