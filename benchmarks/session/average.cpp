#include "average.h"

#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/ops/_foreach_lerp.h>
#include <torch/nn/module.h>
#include <torch/types.h>

#include <pacer/pacer.h>

#include "support/device.h"
#include "support/shapes.h"
#include "support/table.h"
#include "support/timing.h"

namespace bench::session {
namespace {

using torch::Tensor;

constexpr double kDecay = 0.999;

struct Weights : torch::nn::Module {
  Weights(const std::vector<std::vector<int64_t>>& shapes, const at::TensorOptions& options) {
    for (size_t i = 0; i < shapes.size(); ++i) {
      Tensor& weight = register_parameter("weight" + std::to_string(i), torch::randn(shapes[i], options));
      weight.mutable_grad() = torch::randn_like(weight) * 1e-3;
    }
  }
};

void time_average_of(at::Device device, at::ScalarType dtype) {
  const int calls = device.is_cuda() ? 20 : 1;
  Weights model(gpt2().shapes, at::TensorOptions(device).dtype(dtype));
  pacer::FusedAdamW optimizer(model.parameters(), pacer::FusedAdamWOptions(1e-4));
  pacer::SessionParts parts(model, optimizer);
  pacer::WeightAverage average(pacer::ema(kDecay));
  average.attach(parts);
  std::vector<Tensor> weights, averages;
  for (const Tensor& weight : model.parameters()) {
    weights.push_back(weight.detach());
    averages.push_back(weight.detach().clone());
  }
  const auto repeated = [&](const std::function<void()>& f) {
    return [&, f] {
      for (int i = 0; i < calls; ++i) f();
      synchronize(device);
    };
  };
  const std::vector<std::pair<std::string, std::function<void()>>> ways = {
      {"FusedAdamW, a step", [&] { optimizer.step(); }},
      {"WeightAverage, an update",
       [&] {
         pacer::StepReport report{pacer::Progress()};
         average.after_step(report);
       }},
      {"torch::_foreach_lerp_ in the weights' dtype",
       [&] { at::_foreach_lerp_(averages, weights, 1 - kDecay); }}};
  std::vector<std::function<void()>> works;
  for (const auto& way : ways) {
    way.second();
    works.emplace_back(repeated(way.second));
  }
  synchronize(device);
  const auto times = interleave(works, {15, 5, 60});
  std::printf("\n%s: milliseconds, %s, %.0f M parameters in %zu tensors\n", device.str().c_str(),
              c10::toString(dtype), static_cast<double>(gpt2().parameters()) * 1e-6, weights.size());
  print_head({"way", "median:", "of FusedAdamW's:", "least:"});
  for (size_t i = 0; i < ways.size(); ++i) {
    print_row({ways[i].first, format("%.3f", times[i].wall.median / calls),
               format("%.2f", times[i].wall.median / times[0].wall.median),
               format("%.3f", times[i].wall.min / calls)});
  }
}

}  // namespace

void time_average(at::Device device) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) time_average_of(device, dtype);
}

}  // namespace bench::session
