// Images instead of text: a small convolutional network with batch norm learns to tell drawn shapes (discs,
// squares, crosses, rings) that lie anywhere in a noisy picture. The loop is that of 02_session, with a
// validation of its own. What to look at: the share of held-out pictures that it names right.
#include <cstdio>

#include <torch/nn.h>
#include <torch/utils.h>

#include <pacer/pacer.h>

#include "support/drawn_shapes.h"
#include "support/program.h"

namespace {

using examples::draw_shapes;

constexpr int64_t kSide = examples::kShapeSide, kKinds = examples::kShapeKinds;
constexpr int64_t kBatch = 64;
constexpr int64_t kSteps = 300;
constexpr int64_t kHeldOut = 1000;

torch::nn::Sequential make_model() {
  torch::nn::Sequential model;
  int64_t channels = 1;
  for (const int64_t next : {16, 32, 64}) {
    model->push_back(torch::nn::Conv2d(torch::nn::Conv2dOptions(channels, next, 3).padding(1).bias(false)));
    model->push_back(torch::nn::BatchNorm2d(next));
    model->push_back(torch::nn::ReLU());
    model->push_back(torch::nn::MaxPool2d(2));
    channels = next;
  }
  model->push_back(torch::nn::Flatten());
  model->push_back(torch::nn::Linear(channels * (kSide / 8) * (kSide / 8), kKinds));
  return model;
}

void run() {
  torch::manual_seed(1);
  torch::set_num_threads(1);  // so small a model gains nothing from a second one
  auto model = make_model();
  const auto held_out = draw_shapes(kHeldOut);

  pacer::FusedAdamW optimizer(model->named_parameters(), pacer::FusedAdamWOptions(2e-3).weight_decay(0.05));
  pacer::Session session(*model, optimizer);
  session.use(pacer::GradientClipping(1.0))
      .use(pacer::LearningRate(pacer::warmup_cosine({kSteps / 10, kSteps})))
      .use(pacer::Metrics(pacer::MetricsOptions("run/13_images").every(50).total_steps(kSteps)));

  // In eval(), so that batch norm uses its running statistics and keeps them.
  const auto share_right = [&] {
    return session.evaluate([&] {
      const auto named = model->forward(held_out.pixels.unsqueeze(1)).argmax(1);
      return named.eq(held_out.kinds).to(torch::kFloat).mean().item<double>();
    });
  };
  const double before = share_right();
  for (int64_t step = 0; step < kSteps; ++step) {
    const auto pictures = draw_shapes(kBatch);
    auto [x, y] = session.begin(pictures.pixels.unsqueeze(1), pictures.kinds);
    session.count_tokens(y.numel());  // pictures
    session.backward(torch::cross_entropy_loss(model->forward(x), y));
    session.step();
  }
  session.finish();
  std::printf(
      "held-out pictures named right: %.1f %% before, %.1f %% after %lld steps; curves in run/13_images\n",
      100 * before, 100 * share_right(), static_cast<long long>(session.progress().step));
}

}  // namespace

int main(int argument_count, char** arguments) {
  constexpr const char* kAbout =
      "Trains a small convolutional network with batch norm to tell drawn shapes. Writes curves to\n"
      "run/13_images.\n";
  return examples::run_program(argument_count, arguments, kAbout, run);
}
