// The gradient norm of optimizers that are not pacer's, on a CPU: as exact for millions of elements as for a
// few, whatever dtype and memory they have.
#include <cmath>

#include <torch/nn/module.h>
#include <torch/optim/sgd.h>

#include <pacer/pacer.h>

#include "support/catch.h"
#include "support/optimizers/optimizers.h"

namespace pacer::testing {
namespace {

struct SeveralTensorsImpl : torch::nn::Module {
  explicit SeveralTensorsImpl(const std::vector<Tensor>& values) {
    for (size_t i = 0; i < values.size(); ++i) {
      register_parameter("p" + std::to_string(i), values[i]);
    }
  }
};
TORCH_MODULE(SeveralTensors);

// The norm of a step in which parameter i has the gradient gradients[i], and the factor that it was clipped
// with, as the first element of the first one has it.
std::pair<double, double> norm_and_factor(const std::vector<Tensor>& gradients, double max_norm) {
  std::vector<Tensor> values;
  for (const Tensor& gradient : gradients) values.push_back(torch::zeros_like(gradient));
  SeveralTensors model(values);
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(1.0));
  Session session(*model, optimizer);
  session.use(GradientClipping(max_norm));
  auto [x] = session.begin(torch::ones({1}));
  Tensor loss = torch::zeros({});
  const auto parameters = model->parameters();
  for (const Tensor& parameter : parameters) {
    if (parameter.numel() > 0) loss = loss + parameter.flatten()[0].to(at::kFloat) * 0;
  }
  session.backward(loss);
  for (size_t i = 0; i < gradients.size(); ++i) parameters[i].mutable_grad() = gradients[i].clone();
  session.step();
  const double moved = -parameters[0].flatten()[0].item<double>();
  session.finish();
  return {session.gradient_norm(), moved / gradients[0].flatten()[0].item<double>()};
}

}  // namespace

TEST_CASE("the norm of 38 million elements on a CPU is right to 1e-7, and so is the clipped step",
          "[session][clipping]") {
  const int64_t count = 38'600'000;
  const std::pair<double, double> of_one = norm_and_factor({torch::full({count}, 0.1f)}, 1.0);
  const double expected = static_cast<double>(0.1f) * std::sqrt(static_cast<double>(count));
  CHECK(std::abs(of_one.first / expected - 1) < 1e-7);
  CHECK(std::abs(of_one.second * expected - 1) < 2e-7);  // fp32 parameters
}

TEST_CASE("the norm of gradients of all dtypes and memory orders is the one in fp64", "[session][clipping]") {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(7);
  const Tensor base = torch::randn({300, 500}, generator);
  const std::vector<Tensor> gradients = {
      base,
      base.to(at::kDouble) * 3,
      base.to(at::kBFloat16),
      base.to(at::kHalf),
      base.t(),
      base.narrow(1, 3, 200),
      torch::randn({0}),
      torch::randn({2, 3, 4, 5}, generator).contiguous(at::MemoryFormat::ChannelsLast)};
  double sum = 0;
  for (const Tensor& gradient : gradients) sum += gradient.to(at::kDouble).square().sum().item<double>();
  const auto [norm, factor] = norm_and_factor(gradients, 2.0);
  CHECK(std::abs(norm / std::sqrt(sum) - 1) < 1e-7);
  CHECK(std::abs(factor * std::sqrt(sum) / 2 - 1) < 3e-7);
}

}  // namespace pacer::testing
