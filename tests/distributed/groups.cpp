// Groups and lanes of ranks: random programs beside one process, messages that cross, and what becomes of the
// others where a rank is killed.
#include <csignal>
#include <random>

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include "scenario.h"
#include "support/collectives/random_program.h"

namespace pacer::testing {
namespace {

std::shared_ptr<Communicator> connect(const Player& player) {
  CommunicatorOptions options = player.options();
  options.ordered_sum(true);
  return std::make_shared<Communicator>(detail::connect(player.settings(), options), options);
}

// programs=N, of which every `fresh` make groups of their own; the rank `culprit`, if there is one, is killed
// before operation `at` of the last.
const AddScenario random_programs("random_programs", [](const Player& player) {
  const auto world = connect(player);
  const int programs = player.number("programs"), fresh = player.number("fresh", 1);
  const bool is_culprit = player.number("culprit", -1) == player.rank;
  const int first = player.number("first", 0);
  std::unique_ptr<RandomPrograms> player_of_programs;
  for (int program = 0; program < programs; ++program) {
    if (program % fresh == 0) player_of_programs = std::make_unique<RandomPrograms>(world);
    player_of_programs->play(static_cast<uint64_t>(first + program), 25, [&](int operation) {
      if (is_culprit && program + 1 == programs && operation == player.number("at")) raise(SIGKILL);
    });
  }
  say(detail::concatenate("played ", programs));
});

// Neighbours of a pipeline: activations go up while gradients come down, of 0 bytes to 64 MiB. With lanes=1
// each direction has a lane, and each message is a call of its own.
const AddScenario crossing("crossing", [](const Player& player) {
  const auto world = connect(player);
  const auto up = world->lane("up"), down = world->lane("down");
  std::mt19937_64 random(7);
  const at::TensorOptions bytes = at::TensorOptions(at::kByte).device(world->device());
  int64_t sent = 0;
  for (int round = 0; round < player.number("rounds"); ++round) {
    // Every size between the powers of two as often; 0 now and then.
    const auto power = static_cast<int>(random() % 27);
    const auto size =
        round % 10 == 0 ? 0 : static_cast<int64_t>((1ULL << power) + random() % (1ULL << power)) / 2;
    const auto value = [&](int rank, int to) { return (rank * 31 + to * 7 + round) % 251; };
    std::vector<Message> messages;
    std::vector<std::pair<at::Tensor, int>> received;
    std::vector<Work> works;
    for (const int peer : {player.rank + 1, player.rank - 1}) {
      if (peer < 0 || peer == player.world_size) continue;
      const Message send = Message::send(at::full({size}, value(player.rank, peer), bytes), peer);
      received.emplace_back(at::zeros({size}, bytes), peer);
      const Message receive = Message::receive(received.back().first, peer);
      sent += size;
      if (player.has("lanes")) {
        const bool is_up = peer > player.rank;
        works.push_back((is_up ? up : down)->send_receive({send}));
        works.push_back((is_up ? down : up)->send_receive({receive}));
      } else {
        messages.insert(messages.end(), {send, receive});
      }
    }
    if (!messages.empty()) works.push_back(world->send_receive(messages));
    for (Work& work : works) work.wait();
    for (const auto& [tensor, peer] : received) {
      expect(tensor.eq(value(peer, player.rank)).all().item<bool>(), "round ", round, " from rank ", peer);
    }
  }
  say(detail::concatenate("sent ", sent >> 20, " MiB"));
});

// Pairs of ranks. The last rank is killed: its partner fails, the others go on and end in the normal way.
const AddScenario pairs("pairs", [](const Player& player) {
  const auto world = connect(player);
  const auto pair = world->split(player.rank / 2, 0, "pair");
  const at::Tensor x = at::zeros({1000}, at::TensorOptions(at::kFloat).device(world->device()));
  world->barrier();
  for (int round = 0; round < 200; ++round) {
    if (round == 20 && player.rank + 1 == player.world_size) raise(SIGKILL);
    x.fill_(1);
    pair->all_reduce(x).wait();
    expect(x.eq(2).all().item<bool>(), "the sum of a pair");
  }
  say("went on");
});

}  // namespace
}  // namespace pacer::testing
