// A Session and its hooks beside the bare loop.
#include <algorithm>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <torch/cuda.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <pacer/pacer.h>

#include "average.h"
#include "subcommands.h"
#include "support/device.h"
#include "support/table.h"
#include "support/timing.h"

namespace bench::session {
namespace {

constexpr const char* kAbout =
    R"(Measures what a Session costs beside the bare loop, what its hooks cost, and what a dropped layer
saves, and what an average of weights costs. Every figure is measured beside its peer in the same run, interleaved.
)";

using pacer::FusedAdamW;
using pacer::FusedAdamWOptions;
using pacer::Session;
using torch::Tensor;

constexpr int kSteps = 400, kRounds = 15;

struct StackImpl : torch::nn::Module {
  StackImpl(int64_t layers, int64_t width, pacer::LayerDrop gates) : gates(gates) {
    if (gates) register_module("gates", gates);
    for (int64_t i = 0; i < layers; ++i) {
      blocks.push_back(register_module("block" + std::to_string(i), torch::nn::Linear(width, width)));
      if (gates) gates->add(*blocks.back());
    }
  }
  Tensor forward(Tensor x) {
    for (size_t i = 0; i < blocks.size(); ++i) {
      const auto block = [&](const Tensor& h) { return h + torch::tanh(blocks[i](h)); };
      x = gates ? gates->gate(static_cast<int64_t>(i), x, block) : block(x);
    }
    return x.square().mean();
  }
  pacer::LayerDrop gates;
  std::vector<torch::nn::Linear> blocks;
};
TORCH_MODULE(Stack);

// One way to train: a step on one batch.
struct Way {
  std::string name;
  Stack model = nullptr;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  std::unique_ptr<Session> session;
  std::function<void(const Tensor&)> step;
};

std::unique_ptr<Way> bare(const std::string& name, at::Device device, double max_norm, bool checked) {
  auto way = std::make_unique<Way>();
  way->name = name;
  way->model = Stack(3, 32, pacer::LayerDrop(nullptr));
  way->model->to(device);
  way->optimizer =
      std::make_unique<FusedAdamW>(way->model->parameters(), FusedAdamWOptions(1e-3).finite_check(checked));
  way->step = [w = way.get(), max_norm](const Tensor& x) {
    w->model->forward(x).backward();
    if (max_norm > 0) torch::nn::utils::clip_grad_norm_(w->model->parameters(), max_norm);
    w->optimizer->step();
    w->optimizer->zero_grad();
  };
  return way;
}

std::unique_ptr<Way> hosted(const std::string& name, at::Device device,
                            const std::function<void(Session&)>& use) {
  auto way = bare(name, device, 0, false);
  way->session = std::make_unique<Session>(*way->model, *way->optimizer);
  use(*way->session);
  way->step = [w = way.get()](const Tensor& data) {
    auto [x] = w->session->begin(data);
    w->session->backward(w->model->forward(x));
    w->session->step();
  };
  return way;
}

void compare_loops(at::Device device) {
  std::vector<std::unique_ptr<Way>> ways;
  ways.push_back(bare("bare loop", device, 0, false));
  ways.push_back(hosted("Session", device, [](Session&) {}));
  ways.push_back(bare("bare loop, finite check", device, 0, true));
  ways.push_back(bare("bare loop, torch clip_grad_norm_", device, 1.0, false));
  ways.push_back(
      hosted("Session, clipping", device, [](Session& s) { s.use(pacer::GradientClipping(1.0)); }));
  ways.push_back(hosted("Session, clipping, schedule, bf16", device, [](Session& s) {
    s.use(pacer::GradientClipping(1.0))
        .use(pacer::LearningRate(pacer::warmup_cosine({100, 100'000'000})))
        .use(pacer::Precision::bf16());
  }));
  if (device.is_cuda()) {
    ways.push_back(hosted("Session, clipping, schedule, CUDA graph", device, [](Session& s) {
      s.use(pacer::GradientClipping(1.0))
          .use(pacer::LearningRate(pacer::warmup_cosine({100, 100'000'000})))
          .use(pacer::CudaGraph());
    }));
  }
  const Tensor x = torch::randn({4, 32}, device);
  std::vector<std::function<void()>> works;
  for (auto& way : ways) {
    works.emplace_back([&, w = way.get()] {
      for (int i = 0; i < kSteps; ++i) w->step(x);
      synchronize(device);
    });
    for (int i = 0; i < 50; ++i) way->step(x);
  }
  synchronize(device);
  const auto times = interleave(works, {kRounds, kRounds, 600});
  std::printf("\n%s: microseconds per step, %d steps x %d rounds, 3 layers of 32 x 32\n",
              device.str().c_str(), kSteps, kRounds);
  print_head({"way", "median:", "over the bare loop:", "least:"});
  const double base = times[0].wall.median;
  for (size_t i = 0; i < ways.size(); ++i) {
    const double scale = 1e3 / kSteps;
    print_row({ways[i]->name, format("%.1f", times[i].wall.median * scale),
               format("%+.1f", (times[i].wall.median - base) * scale),
               format("%.1f", times[i].wall.min * scale)});
  }
}

void time_layer_drop(at::Device device) {
  const int64_t layers = 12, width = device.is_cuda() ? 2048 : 256, rows = device.is_cuda() ? 8192 : 128;
  const Tensor x = torch::randn({rows, width}, device);
  const int steps = 40;
  std::printf("\n%s: milliseconds per step with layer dropping, %lld layers of %lld x %lld, %lld rows\n",
              device.str().c_str(), (long long)layers, (long long)width, (long long)width, (long long)rows);
  print_head({"theta:", "kept layers, mean:", "ms per step:", "of all layers:"});
  double whole = 0;
  for (const double theta : {1.0, 0.75, 0.5, 0.25}) {
    pacer::LayerDrop gates(pacer::LayerDropOptions().theta_bar(theta).gamma(1e3));
    Stack model(layers, width, gates);
    model->to(device);
    FusedAdamW optimizer(model->parameters(), FusedAdamWOptions(1e-4));
    Session session(*model, optimizer);
    session.use(gates);
    double kept = 0;
    const auto step = [&] {
      auto [batch] = session.begin(x);
      for (int64_t l = 0; l < layers; ++l) kept += gates->keeps(l);
      session.backward(model->forward(batch));
      session.step();
    };
    for (int i = 0; i < 5; ++i) step();
    synchronize(device);
    kept = 0;
    const Stopwatch watch;
    for (int i = 0; i < steps; ++i) step();
    synchronize(device);
    const double milliseconds = watch.milliseconds() / steps;
    if (theta == 1.0) whole = milliseconds;
    print_row({format("%.2f", theta), format("%.2f", kept / steps), format("%.3f", milliseconds),
               format("%.0f %%", 100 * milliseconds / whole)});
  }
}

int run(const examples::OptionValues&) {
  torch::manual_seed(1);
  torch::set_num_threads(1);
  std::vector<at::Device> devices;
  if (torch::cuda::is_available()) devices.emplace_back(at::kCUDA, 0);
  devices.emplace_back(at::kCPU);
  for (const at::Device device : devices) {
    time_average(device);
    compare_loops(device);
    time_layer_drop(device);
  }
  return 0;
}

}  // namespace

Subcommand subcommand() {
  return {"session", "a Session beside the bare loop, its hooks, and what a dropped layer saves", kAbout,
          run};
}

}  // namespace bench::session
