// A GAN: two networks, two optimizers, two Sessions. A generator learns to draw discs by what a discriminator makes
// of them, which takes two steps for each of the generator's. Kill it at any moment and start it again: both go on
// from the same moment, and every step has the bits it would have had, as the printed hash of both networks shows.
// What to look at: how bright the drawn pictures are, and how much of each is light or dark rather than grey, beside
// those of real discs.
//
//   16_gan [FOLDER]     the run's folder; run/16_gan unless given
#include <cstdio>
#include <string>

#include <torch/nn.h>
#include <torch/utils.h>

#include <pacer/files/checksum.h>
#include <pacer/pacer.h>

#include "support/command_line.h"
#include "support/program.h"

namespace {

constexpr int64_t kSide = 16, kNoise = 16, kBatch = 32, kSteps = 240, kCriticSteps = 2;

// Pictures [count, 1, kSide, kSide] between -1 and 1: a disc each, light on dark, that lies anywhere.
torch::Tensor draw_discs(int64_t count) {
  const auto random = [&] { return torch::rand({count, 1, 1, 1}); };
  const auto radius = 3 + 2 * random();
  const auto x = radius + (kSide - 1 - 2 * radius) * random(),
             y = radius + (kSide - 1 - 2 * radius) * random();
  const auto columns = torch::arange(kSide, torch::kFloat).view({1, 1, 1, kSide});
  const auto rows = columns.view({1, 1, kSide, 1});
  return torch::tanh(2 * (radius - torch::sqrt((columns - x).square() + (rows - y).square())));
}

torch::Tensor noise() { return torch::randn({kBatch, kNoise, 1, 1}); }

// [N, kNoise, 1, 1] to [N, 1, kSide, kSide].
torch::nn::Sequential make_generator() {
  using torch::nn::BatchNorm2d;
  using torch::nn::ConvTranspose2d;
  using torch::nn::ConvTranspose2dOptions;
  using torch::nn::ReLU;
  const auto twice = [](int64_t in, int64_t out) {
    return ConvTranspose2d(ConvTranspose2dOptions(in, out, 4).stride(2).padding(1).bias(false));
  };
  return torch::nn::Sequential(ConvTranspose2d(ConvTranspose2dOptions(kNoise, 32, 4).bias(false)),
                               BatchNorm2d(32), ReLU(), twice(32, 16), BatchNorm2d(16), ReLU(), twice(16, 1),
                               torch::nn::Tanh());
}

// [N, 1, kSide, kSide] to [N, 1].
torch::nn::Sequential make_discriminator() {
  using torch::nn::Conv2d;
  using torch::nn::Conv2dOptions;
  const auto slope = torch::nn::LeakyReLUOptions().negative_slope(0.2);
  return torch::nn::Sequential(Conv2d(Conv2dOptions(1, 16, 4).stride(2).padding(1)),
                               torch::nn::LeakyReLU(slope),
                               Conv2d(Conv2dOptions(16, 32, 4).stride(2).padding(1).bias(false)),
                               torch::nn::BatchNorm2d(32), torch::nn::LeakyReLU(slope), torch::nn::Flatten(),
                               torch::nn::Linear(32 * (kSide / 4) * (kSide / 4), 1));
}

// Of parameters and running statistics.
std::string hash_of(const torch::nn::Sequential& generator, const torch::nn::Sequential& discriminator) {
  pacer::Checksum checksum;
  const auto add = [&](const torch::Tensor& tensor) {
    const auto values = tensor.detach().cpu().contiguous();
    checksum.add(values.data_ptr(), values.nbytes());
  };
  for (const auto& network : {generator, discriminator}) {
    for (const auto& parameter : network->parameters()) add(parameter);
    for (const auto& buffer : network->buffers()) add(buffer);
  }
  return checksum.hex();
}

void describe(const char* what, const torch::Tensor& pictures) {
  std::printf("%s: brightness %.2f, light or dark %.0f %%\n", what,
              pictures.add(1).div(2).mean().item<double>(),
              100 * pictures.abs().gt(0.8).to(torch::kFloat).mean().item<double>());
}

void run(const std::string& folder) {
  torch::set_num_threads(1);
  torch::manual_seed(1);
  auto generator = make_generator(), discriminator = make_discriminator();
  const auto adam = pacer::FusedAdamOptions(1e-3).betas({0.5, 0.99});
  pacer::FusedAdam of_generator(generator->named_parameters(), adam);
  pacer::FusedAdam of_discriminator(discriminator->named_parameters(), adam);

  pacer::Session discriminates(discriminator, of_discriminator), generates(generator, of_generator);
  discriminates.use(
      pacer::Checkpoints(pacer::CheckpointsOptions(folder + "/discriminator").every(3 * kCriticSteps)));
  generates.use(pacer::Checkpoints(pacer::CheckpointsOptions(folder + "/generator").every(3)))
      .use(pacer::Metrics(pacer::MetricsOptions(folder + "/curves").progress(false)));
  pacer::resume_together({&discriminates, &generates});  // in the order in which the loop steps them

  while (generates.progress().step < kSteps) {
    for (int64_t i = 0; i < kCriticSteps; ++i) {
      of_discriminator.zero_grad();  // the generator's loss has left gradients there
      auto [real, z] = discriminates.begin(draw_discs(kBatch), noise());
      const auto fake = generator->forward(z).detach();
      const auto loss = torch::softplus(-discriminator->forward(real)).mean() +
                        torch::softplus(discriminator->forward(fake)).mean();
      discriminates.backward(loss);
      discriminates.step();
      generates.record("discriminator", loss);
    }
    auto [z] = generates.begin(noise());
    generates.backward(torch::softplus(-discriminator->forward(generator->forward(z))).mean());
    generates.step();
    std::printf("step %lld, weights %s\n", static_cast<long long>(generates.progress().step),
                hash_of(generator, discriminator).c_str());
    std::fflush(stdout);
  }
  discriminates.finish();
  generates.finish();
  std::printf("done after step %lld, weights %s\n", static_cast<long long>(generates.progress().step),
              hash_of(generator, discriminator).c_str());
  describe("real discs", draw_discs(kBatch));
  describe("drawn ones", generates.evaluate([&] { return generator->forward(noise()); }));
}

}  // namespace

int main(int argument_count, char** arguments) {
  return examples::run_guarded(examples::program_name(arguments), [&] {
    auto known = examples::make_options();
    known.add_options()("folder", boost::program_options::value<std::string>()->default_value("run/16_gan"),
                        "the run's folder; may be given without its name");
    const auto given = examples::read_command_line(
        argument_count, arguments,
        "Trains a generator of pictures and a discriminator, with a Session for each. Kill it at any moment\n"
        "and start it again: both go on from the same moment.\n",
        known, "folder");
    if (given) run((*given)["folder"].as<std::string>());
    return 0;
  });
}
