// GradientRelease on a GPU: the bits of the plain step, also where the device has led the step counts before, and the
// memory of gradients as LibTorch's allocator counts it.
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <pacer/parallel/training_memory.h>

#include "support/both_devices.h"
#include "support/message_of.h"
#include "support/session/releasing.h"
#include "support/session/small_run.h"

namespace pacer::testing {
namespace {
namespace release_gpu {

const at::Device kDevice(at::kCUDA, 0);

RegisteredHook hook() {
  return {"gradient release", "release", false,
          [](Session& s, SmallModel&, EpochSampler&) { s.use(GradientRelease()); }};
}

// kLayers matrices of [kWide, kWide], and steps over them.
struct Deep {
  static constexpr int64_t kWide = 1024, kLayers = 24, kLayer = kWide * kWide;
  explicit Deep(bool releases) {
    torch::manual_seed(1);
    for (int64_t i = 0; i < kLayers; ++i) {
      model->push_back(torch::nn::Linear(torch::nn::LinearOptions(kWide, kWide).bias(false)));
    }
    model->to(kDevice);
    optimizer = std::make_unique<FusedAdamW>(model->named_parameters(), FusedAdamWOptions(0.001));
    session = std::make_unique<Session>(*model, *optimizer);
    if (releases) session->use(GradientRelease());
  }
  void step() {
    auto [x] = session->begin(torch::ones({1, kWide}));
    session->backward(model->forward(x).square().mean());
    session->step();
  }

  torch::nn::Sequential model;
  std::unique_ptr<FusedAdamW> optimizer;
  std::unique_ptr<Session> session;
};

int64_t allocated(bool peak) {
  using c10::CachingAllocator::StatType;
  const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(0);
  const auto& stat = stats.allocated_bytes[static_cast<size_t>(StatType::AGGREGATE)];
  return peak ? stat.peak : stat.current;
}

// Bytes above those between steps, at the peak of the third step.
int64_t peak_of_step(bool releases) {
  Deep run(releases);
  for (int step = 0; step < 2; ++step) run.step();
  torch::cuda::synchronize();
  const int64_t between = allocated(false);
  c10::cuda::CUDACachingAllocator::resetPeakStats(0);
  run.step();
  torch::cuda::synchronize();
  return allocated(true) - between;
}

}  // namespace release_gpu
}  // namespace

TEST_CASE("on a GPU with released gradients every optimizer takes the plain step to the bit",
          "[release][session][gpu]") {
  PACER_NEEDS_GPU();
  for (const RegisteredOptimizer& optimizer : releasing_optimizers()) {
    INFO(optimizer.name);
    SmallRun plain(optimizer, {}, 0.1, release_gpu::kDevice);
    SmallRun released(optimizer, {release_gpu::hook()}, 0.1, release_gpu::kDevice);
    for (int step = 0; step < 5; ++step) {
      plain.step();
      released.step();
      REQUIRE(first_difference(plain.state(), released.state()) == "");
    }
  }
}

TEST_CASE("on a GPU released gradients go with each hook that neither adds gradients up nor looks at them",
          "[release][session][gpu]") {
  PACER_NEEDS_GPU();
  const RegisteredOptimizer optimizer = releasing_optimizers().front();
  for (const RegisteredHook& with : all_hooks()) {
    if (!goes_with_release(with)) continue;
    INFO(with.name);
    SmallRun plain(optimizer, {with}, 0.1, release_gpu::kDevice);
    SmallRun released(optimizer, {with, release_gpu::hook()}, 0.1, release_gpu::kDevice);
    for (int step = 0; step < 4; ++step) {
      plain.step();
      released.step();
      REQUIRE(first_difference(plain.state(), released.state()) == "");
    }
  }
}

TEST_CASE(
    "on a GPU released gradients follow step counts that the device has led, and parameters that sit out",
    "[release][session][gpu]") {
  PACER_NEEDS_GPU();
  const auto trained = [](bool releases) {
    torch::manual_seed(4);
    torch::nn::Linear used(8, 8), other(8, 8);
    torch::nn::Sequential model(used, other);
    model->to(release_gpu::kDevice);
    FusedAdamW optimizer(model->named_parameters(), FusedAdamWOptions(0.01));
    const auto loss = [&](const Tensor& x, bool both) {
      const Tensor y = used(x);
      return (both ? other(y) : y).square().mean();
    };
    const Tensor x = torch::linspace(-1, 1, 16, at::TensorOptions(release_gpu::kDevice)).view({2, 8});
    {
      Session clipped(*model, optimizer);
      clipped.use(GradientClipping(0.5));  // the device leads the counts
      for (const bool both : {true, false, true}) {
        auto [input] = clipped.begin(x);
        clipped.backward(loss(input, both));
        clipped.step();
      }
    }
    Session session(*model, optimizer);
    if (releases) session.use(GradientRelease());
    for (const bool both : {true, false, false, true, true}) {
      auto [input] = session.begin(x);
      session.backward(loss(input, both));
      session.step();
    }
    NamedTensors state = optimizer.export_state();
    for (const auto& item : model->named_parameters()) state["model/" + item.key()] = item.value().detach();
    return state;
  };
  const NamedTensors plain = trained(false), released = trained(true);
  CHECK(first_difference(plain, released) == "");
}

TEST_CASE("on a GPU released gradients have the right bits on a stream of the user's",
          "[release][session][gpu]") {
  PACER_NEEDS_GPU();
  release_gpu::Deep plain(false), released(true);
  for (int step = 0; step < 3; ++step) plain.step();
  released.step();  // the gradients' nodes were made on the default stream
  torch::cuda::synchronize();
  {
    const c10::cuda::CUDAStreamGuard other(c10::cuda::getStreamFromPool());
    for (int step = 0; step < 2; ++step) released.step();
  }
  torch::cuda::synchronize();
  const auto wanted = plain.model->parameters(), found = released.model->parameters();
  for (size_t i = 0; i < wanted.size(); ++i) REQUIRE(wanted[i].equal(found[i]));
}

TEST_CASE("on a GPU released gradients take the memory of a few", "[release][session][memory][gpu]") {
  PACER_NEEDS_GPU();
  const int64_t one = release_gpu::Deep::kLayer * 4;
  // In the plain step all gradients are there; else the one that is used and the one that is being made.
  const int64_t plain = release_gpu::peak_of_step(false), released = release_gpu::peak_of_step(true);
  CAPTURE(plain / one, released / one);
  CHECK(plain >= release_gpu::Deep::kLayers * one);
  CHECK(released < 4 * one);
}

TEST_CASE("GradientRelease is refused beside CudaGraph", "[release][session][gpu]") {
  PACER_NEEDS_GPU();
  release_gpu::Deep run(true);
  const std::string message = message_of<InvalidArgument>([&] { run.session->use(CudaGraph()); });
  CHECK(contains(message, "cuda_graph"));
  CHECK(contains(message, "use one of them"));
}

}  // namespace pacer::testing
