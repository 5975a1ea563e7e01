// worker SCENARIO RANK WORLD_SIZE [NAME=VALUE...]: plays one rank. Ends with 0, or with 3 after a line
// "error: ..." where the scenario threw; anything else (a signal, terminate) is never right.
#include <chrono>
#include <cstdio>
#include <exception>
#include <stdexcept>
#include <string>
#include <thread>

#include "scenario.h"

namespace pacer::testing {
namespace {

std::map<std::string, Scenario>& table() {
  static std::map<std::string, Scenario> scenarios;
  return scenarios;
}

}  // namespace

AddScenario::AddScenario(const char* name, Scenario scenario) {
  if (!table().emplace(name, std::move(scenario)).second) throw std::logic_error(name);
}

const std::map<std::string, Scenario>& scenarios() { return table(); }

std::string Player::text(const std::string& name) const {
  const auto found = arguments.find(name);
  require<Error>(found != arguments.end(), "this scenario needs the argument ", name);
  return found->second;
}

detail::RendezvousSettings Player::settings() const {
  detail::RendezvousSettings settings;
  settings.rank = settings.local_rank = rank;
  settings.world_size = settings.local_size = world_size;
  if (has("file")) {
    settings.file = text("file");
  } else {
    settings.host = text("host");
    settings.port = number("port");
  }
  return settings;
}

CommunicatorOptions Player::options() const {
  CommunicatorOptions options;
  options.backend(has("nccl") ? CommunicatorBackend::nccl : CommunicatorBackend::gloo)
      .timeout(std::chrono::milliseconds(number("timeout", 20000)));
  if (has("ranks_per_node")) options.ranks_per_node(number("ranks_per_node", 0));
  if (has("listen")) options.listen_address(text("listen"));
  return options;
}

void say(const std::string& line) {
  std::printf("%s\n", line.c_str());
  std::fflush(stdout);
}

void sleep_for_ever() {
  while (true) std::this_thread::sleep_for(std::chrono::hours(1));
}

}  // namespace pacer::testing

// What the program does, for run_ranks.py, too, which forks ranks off itself.
extern "C" int pacer_play_rank(int count, char** words) {
  using namespace pacer::testing;
  if (count < 4) {
    std::fprintf(stderr, "worker SCENARIO RANK WORLD_SIZE [NAME=VALUE...]\n");
    return 2;
  }
  Player player;
  player.rank = std::stoi(words[2]);
  player.world_size = std::stoi(words[3]);
  for (int i = 4; i < count; ++i) {
    const std::string word = words[i];
    const size_t equals = word.find('=');
    player.arguments[word.substr(0, equals)] = equals == std::string::npos ? "" : word.substr(equals + 1);
  }
  const auto found = scenarios().find(words[1]);
  if (found == scenarios().end()) {
    std::fprintf(stderr, "no scenario has the name %s\n", words[1]);
    return 2;
  }
  try {
    found->second(player);
  } catch (const std::exception& error) {
    say(std::string("error: ") + error.what());
    return 3;
  }
  return 0;
}
