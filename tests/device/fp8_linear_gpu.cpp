// pacer::modules::Linear in 8-bit floats on a GPU: the products of the CPU's codes within what tensor cores
// lose, the CPU's scales to the bit, and nothing that waits for the device.
#include "support/catch.h"

#include <limits>

#include <c10/cuda/CUDACachingAllocator.h>
#include <torch/nn/init.h>
#include <torch/nn/modules/container/sequential.h>

#include <pacer/modules/fp8_scaling.h>
#include <pacer/modules/linear.h>
#include <pacer/modules/nf4.h>

#include "support/both_devices.h"
#include "support/no_waiting.h"

namespace pacer::testing::fp8_linear_gpu {
namespace {

const at::Device kGpu(at::kCUDA, 0);
constexpr int64_t kRows = 96, kIn = 128, kOut = 64;  // small, because the CPU takes its time

double relative_error(const Tensor& found, const Tensor& wanted) {
  const Tensor a = found.detach().cpu().to(at::kDouble), b = wanted.detach().cpu().to(at::kDouble);
  return ((a - b).norm() / b.norm()).item<double>();
}

// One layer on its device, with the same numbers on each.
struct Trained {
  modules::Linear layer = nullptr;
  std::shared_ptr<Fp8Scaling> scaling;
  Tensor x, y;

  Trained(at::Device device, at::ScalarType dtype, const Fp8Options& options, double spread,
          bool has_adapter = false) {
    torch::manual_seed(11);
    layer = modules::Linear(kIn, kOut);
    torch::nn::init::normal_(layer->weight);
    layer->to(dtype);
    if (options.quantized_weights()) layer->set_nf4(modules::Nf4Weight(layer->weight, true));
    if (has_adapter) {
      layer->add_adapter(modules::LoraOptions(4));
      torch::nn::init::normal_(layer->adapter("default")->B);
    }
    layer->to(device);
    scaling = std::make_shared<Fp8Scaling>(*layer, options);
    x = (torch::randn({kRows, kIn}) * spread).to(device, at::kBFloat16).requires_grad_();
  }
  void pass(double factor) {
    const Fp8Scope scope(scaling);
    y = layer(x * factor);
    torch::manual_seed(12);
    const Tensor dy = torch::randn({kRows, kOut}).to(at::kBFloat16) * (1e-3 * factor);
    y.backward(dy.to(y.device()));
  }
};

}  // namespace

TEST_CASE("on a GPU a layer computes what it computes on the CPU", "[gpu][fp8]") {
  PACER_NEEDS_GPU();
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    for (const Fp8Recipe recipe : {Fp8Recipe::delayed, Fp8Recipe::current}) {
      for (const at::ScalarType gradients : {at::kFloat8_e5m2, at::kFloat8_e4m3fn}) {
        CAPTURE(dtype, gradients, recipe == Fp8Recipe::delayed);
        const auto options = Fp8Options().recipe(recipe).gradients(gradients).amax_history(3);
        Trained cpu(at::kCPU, dtype, options, 2), gpu(kGpu, dtype, options, 2);
        for (const double factor : {1.0, 3.0, 0.5, 0.1}) {
          for (Trained* side : {&cpu, &gpu}) {
            side->layer->zero_grad();
            side->x.mutable_grad() = Tensor();
            side->pass(factor);
          }
          // Both round their results to 16 bits; tensor cores add with fewer bits in forward.
          CHECK(relative_error(gpu.y, cpu.y) <= 0.004);
          CHECK(relative_error(gpu.x.grad(), cpu.x.grad()) <= 0.004);
          CHECK(relative_error(gpu.layer->weight.grad(), cpu.layer->weight.grad()) <=
                (dtype == at::kFloat ? 0.001 : 0.004));
          CHECK(relative_error(gpu.layer->bias.grad(), cpu.layer->bias.grad()) <=
                (dtype == at::kFloat ? 1e-5 : 0.004));
          for (Trained* side : {&cpu, &gpu}) side->scaling->update();
          for (const auto& [name, tensor] : cpu.scaling->state()) {
            CAPTURE(name);
            CHECK(gpu.scaling->state().at(name).equal(tensor));
          }
        }
        CHECK(gpu.scaling->other_calls() == 0);
      }
    }
  }
}

TEST_CASE("on a GPU what is not finite shows in all products, and in no scale", "[gpu][fp8]") {
  PACER_NEEDS_GPU();
  for (const Fp8Recipe recipe : {Fp8Recipe::delayed, Fp8Recipe::current}) {
    Trained run(kGpu, at::kFloat, Fp8Options().recipe(recipe), 1);
    run.pass(1);
    run.scaling->update();
    const auto before = run.scaling->state();
    {
      const at::NoGradGuard no_grad;
      run.x[3][5] = std::numeric_limits<float>::infinity();
    }
    run.layer->zero_grad();
    run.pass(1);
    CHECK(run.y.isnan().all().item<bool>());
    CHECK(run.layer->weight.grad().isnan().all().item<bool>());
    run.scaling->update();
    for (const auto& [name, tensor] : before) {
      if (name.rfind("input", 0) == 0) CHECK(run.scaling->state().at(name).equal(tensor));
    }
  }
}

TEST_CASE("on a GPU a layer in 8 bits over 4 computes what it computes on the CPU and over 16",
          "[gpu][fp8][nf4]") {
  PACER_NEEDS_GPU();
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    for (const Fp8Recipe recipe : {Fp8Recipe::delayed, Fp8Recipe::current}) {
      for (const bool has_adapter : {false, true}) {
        CAPTURE(dtype, recipe == Fp8Recipe::delayed, has_adapter);
        const auto options = Fp8Options().recipe(recipe).quantized_weights(true).amax_history(3);
        Trained cpu(at::kCPU, dtype, options, 2, has_adapter), gpu(kGpu, dtype, options, 2, has_adapter),
            dequantized(kGpu, dtype, options, 2, has_adapter);
        REQUIRE_FALSE(gpu.layer->nf4().is_empty());
        dequantized.layer->dequantize();
        for (const double factor : {1.0, 3.0, 0.1}) {
          for (Trained* side : {&cpu, &gpu, &dequantized}) {
            side->layer->zero_grad();
            side->x.mutable_grad() = Tensor();
            side->pass(factor);
          }
          CHECK(gpu.y.equal(dequantized.y));
          CHECK(gpu.x.grad().equal(dequantized.x.grad()));
          CHECK(gpu.layer->bias.grad().equal(dequantized.layer->bias.grad()));
          CHECK(relative_error(gpu.y, cpu.y) <= 0.006);
          CHECK(relative_error(gpu.x.grad(), cpu.x.grad()) <= 0.006);
          if (has_adapter) {
            const Tensor db = gpu.layer->adapter("default")->B.grad();
            CHECK(db.equal(dequantized.layer->adapter("default")->B.grad()));
            CHECK(relative_error(db, cpu.layer->adapter("default")->B.grad()) <= 0.01);
          }
          for (Trained* side : {&cpu, &gpu, &dequantized}) side->scaling->update();
          for (const auto& [name, tensor] : cpu.scaling->state()) {
            CAPTURE(name);
            CHECK(gpu.scaling->state().at(name).equal(tensor));
          }
        }
        CHECK(gpu.scaling->other_calls() == 0);
      }
    }
  }
}

TEST_CASE("on a GPU nothing of a decoded weight's size outlives its product", "[gpu][fp8][nf4]") {
  PACER_NEEDS_GPU();
  constexpr int64_t kSize = 2048;
  modules::Linear layer(kSize, kSize);
  layer->set_nf4(modules::Nf4Weight(layer->weight, true));
  layer->bias.requires_grad_(false);
  layer->to(kGpu);
  const auto scaling = std::make_shared<Fp8Scaling>(*layer, Fp8Options().quantized_weights(true));
  const Tensor x = torch::randn({16, kSize}, kGpu).requires_grad_();
  const auto in_use = [] {
    const auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    return c10::cuda::CUDACachingAllocator::getDeviceStats(0).allocated_bytes[all].current;
  };
  for (int pass = 0; pass < 3; ++pass) {
    const auto before = in_use();
    const Fp8Scope scope(scaling);
    const Tensor y = layer(x);
    // Of the library of products there is a workspace from the first pass on.
    if (pass > 0) CHECK(in_use() - before < kSize * kSize / 4);
    y.sum().backward();
    if (pass > 0) CHECK(in_use() - before < kSize * kSize / 4);
    scaling->update();
  }
}

TEST_CASE("a pass in 8-bit floats and its update never wait for the GPU", "[gpu][fp8]") {
  PACER_NEEDS_GPU();
  for (const Fp8Recipe recipe : {Fp8Recipe::delayed, Fp8Recipe::current}) {
    for (const bool over_4_bits : {false, true}) {
      Trained run(kGpu, at::kFloat, Fp8Options().recipe(recipe).quantized_weights(over_4_bits), 1);
      const auto step = [&] {
        const Fp8Scope scope(run.scaling);
        run.layer(run.x).sum().backward();
        run.scaling->update();
      };
      step();
      const NoWaiting no_waiting;
      for (int i = 0; i < 600; ++i) step();
    }
  }
}

}  // namespace pacer::testing::fp8_linear_gpu
