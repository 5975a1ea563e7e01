// A GAN in two Sessions beside the loop that is written by hand with torch's Adam.
#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <torch/optim/adam.h>

#include "support/catch.h"
#include "support/collectives/ranks.h"
#include "support/session/small_gan.h"

namespace pacer::testing::session_gan {
namespace {

using torch::optim::Adam;
using torch::optim::AdamOptions;
using GanOfTorch = SmallGanOf<Adam, AdamOptions>;

SmallGanOptions unsaved(int critic_steps, at::ScalarType dtype = at::kFloat) {
  SmallGanOptions options;
  options.critic_steps = critic_steps;
  options.dtype = dtype;
  options.is_saved = false;
  return options;
}

// The loop without a Session. Of several ranks it adds up the gradients and takes the mean, as an all-reduce does.
class ByHand {
 public:
  explicit ByHand(SmallGanOptions options, int64_t ranks = 1) : options_(options), ranks_(ranks) {
    generator->to(options.dtype);
    discriminator->to(options.dtype);
  }

  void round() {
    for (int step = 0; step < options_.critic_steps; ++step) {
      update(of_discriminator, discriminator, [&](int64_t rank) {
        const int64_t number = critic_steps_ * ranks_ + rank;
        const torch::Tensor noise = noise_of(number);
        const torch::Tensor fake = generator->forward(noise).detach();
        const torch::Tensor real = small_pictures(number).to(options_.dtype);
        return torch::softplus(-discriminator->forward(real)).mean() +
               torch::softplus(discriminator->forward(fake)).mean();
      });
      ++critic_steps_;
    }
    update(of_generator, generator, [&](int64_t rank) {
      const torch::Tensor noise = noise_of(1000 + steps_ * ranks_ + rank);
      return torch::softplus(-discriminator->forward(generator->forward(noise))).mean();
    });
    ++steps_;
  }

  torch::nn::Sequential generator = small_generator(), discriminator = small_discriminator();
  Adam of_generator{generator->parameters(), AdamOptions(0.01)};
  Adam of_discriminator{discriminator->parameters(), AdamOptions(0.02)};
  std::vector<double> losses;  // of rank 0

 private:
  torch::Tensor noise_of(int64_t number) const {
    return (ranks_ == 1 ? torch::randn({kGanBatch, 4, 1, 1}) : small_noise(number)).to(options_.dtype);
  }
  void update(Adam& optimizer, torch::nn::Sequential& model,
              const std::function<torch::Tensor(int64_t)>& loss_of) {
    optimizer.zero_grad();
    for (int64_t rank = 0; rank < ranks_; ++rank) {
      const torch::Tensor loss = loss_of(rank);
      loss.backward();
      if (rank == 0) losses.push_back(loss.item<double>());
    }
    for (torch::Tensor& parameter : model->parameters()) {
      parameter.mutable_grad().div_(static_cast<double>(ranks_));
    }
    optimizer.step();
  }

  SmallGanOptions options_;
  int64_t ranks_, steps_ = 0, critic_steps_ = 0;
};

std::vector<torch::Tensor> values_of(const torch::nn::Sequential& model, bool with_buffers = true) {
  std::vector<torch::Tensor> values;
  for (const torch::Tensor& parameter : model->parameters()) values.push_back(parameter.detach());
  if (!with_buffers) return values;
  for (const torch::Tensor& buffer : model->buffers()) values.push_back(buffer);
  return values;
}

}  // namespace

TEST_CASE("a GAN in two Sessions takes the steps of the loop written by hand, to the bit", "[session][gan]") {
  for (const int critic_steps : {1, 3}) {
    CAPTURE(critic_steps);
    GanOfTorch gan("", unsaved(critic_steps));
    torch::manual_seed(3);
    for (int i = 0; i < 4; ++i) gan.round();
    gan.finish();
    ByHand by_hand(unsaved(critic_steps));
    torch::manual_seed(3);
    for (int i = 0; i < 4; ++i) by_hand.round();
    CHECK(gan.losses == by_hand.losses);
    CHECK(same_bits(values_of(gan.generator), values_of(by_hand.generator)));
    CHECK(same_bits(values_of(gan.discriminator), values_of(by_hand.discriminator)));
  }
}

TEST_CASE("a GAN with FusedAdam has the losses of torch's Adam but for rounding", "[session][gan]") {
  constexpr double kBound = 1e-12;  // fp64; a step rounds to 1e-16, and the losses of the game amplify that
  SmallGan gan("", unsaved(2, at::kDouble));
  torch::manual_seed(3);
  for (int i = 0; i < 8; ++i) gan.round();
  gan.finish();
  ByHand by_hand(unsaved(2, at::kDouble));
  torch::manual_seed(3);
  for (int i = 0; i < 8; ++i) by_hand.round();
  REQUIRE(gan.losses.size() == by_hand.losses.size());
  for (size_t i = 0; i < gan.losses.size(); ++i) {
    CAPTURE(i, gan.losses[i]);
    CHECK(std::abs(gan.losses[i] - by_hand.losses[i]) <= kBound * by_hand.losses[i]);
  }
}

TEST_CASE("a GAN on two ranks takes the steps of an all-reduce written by hand, to the bit",
          "[session][gan][ranks]") {
  const auto worlds = Communicator::in_process(2);
  std::vector<std::unique_ptr<GanOfTorch>> gans;
  for (const auto& world : worlds) gans.push_back(std::make_unique<GanOfTorch>("", unsaved(2), world));
  REQUIRE(first_of(run_ranks(2, [&](int rank) {
            for (int i = 0; i < 4; ++i) gans[static_cast<size_t>(rank)]->round();
            gans[static_cast<size_t>(rank)]->finish();
          })) == "");
  ByHand by_hand(unsaved(2), /*ranks=*/2);
  for (int i = 0; i < 4; ++i) by_hand.round();
  CHECK(gans[0]->losses == by_hand.losses);
  for (const auto& gan : gans) {
    CHECK(same_bits(values_of(gan->generator, false), values_of(by_hand.generator, false)));
    CHECK(same_bits(values_of(gan->discriminator, false), values_of(by_hand.discriminator, false)));
  }
}

}  // namespace pacer::testing::session_gan
