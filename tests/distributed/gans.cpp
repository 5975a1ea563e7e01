// A GAN in two Sessions on processes that somebody kills.
#include <string>

#include <pacer/files/checksum.h>

#include "scenario.h"
#include "support/session/small_gan.h"

namespace pacer::testing::gans {
namespace {

void add(Checksum& sum, const std::string& name, const Tensor& tensor) {
  const Tensor host = tensor.detach().cpu().contiguous();
  sum.add(name.data(), name.size());
  sum.add(host.const_data_ptr(), host.nbytes());
}

// Of rank 0 all that a checkpoint has of models and optimizers. Other ranks go on with its running statistics, so theirs
// are left out.
std::string hash_of(SmallGan& gan, bool is_first_rank) {
  Checksum sum;
  if (is_first_rank) {
    for (const detail::TrainingState& state : gan.state()) {
      for (const auto& [name, tensor] : state.model) add(sum, name, tensor);
      for (const auto& [name, tensor] : state.optimizer) add(sum, name, tensor);
    }
  } else {
    for (const auto& network : {gan.generator, gan.discriminator}) {
      for (const auto& item : network->named_parameters()) add(sum, item.key(), item.value());
    }
  }
  return sum.hex();
}

// Says where it goes on, and what it is after each round, of which each has three steps of the discriminator.
void train_until_killed(const Player& player) {
  const auto world =
      std::make_shared<Communicator>(detail::connect(player.settings(), player.options()), player.options());
  SmallGanOptions options;
  options.critic_steps = 3;
  options.every = 4;  // each Session of its own steps: the saves come at rounds 2, 3 and 4, and so on
  options.synchronous = false;
  SmallGan gan(player.text("folder"), options, world);
  say("resumed " + std::to_string(gan.resume().value_or(0)));
  while (gan.generates.progress().step < player.number("rounds")) {
    gan.round();
    expect(gan.discriminates.progress().step == 3 * gan.generates.progress().step, "three steps for each");
    say("round " + std::to_string(gan.generates.progress().step) + " " + hash_of(gan, world->rank() == 0));
  }
  gan.finish();
  say("ended");
}

const AddScenario kTrain("train_gan", train_until_killed);

}  // namespace
}  // namespace pacer::testing::gans
