// pacer-collectives: six ways to add gradients over ranks, checked against each other and measured, and the
// bubble of a pipeline, simulated. Here: the ranks are started or joined, and the experiments follow each
// other; exit codes 0 for success, 1 for a failure, 2 for input that cannot work, 3 where another rank
// failed.
#include <cstdio>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include <ATen/Parallel.h>
#include <torch/utils.h>

#include <pacer/core/error.h>

#include "experiments.h"
#include "options.h"
#include "report.h"
#include "support/processes.h"
#include "support/program.h"
#include "support/whole_file.h"

namespace {

constexpr const char* kProgram = "pacer-collectives";
constexpr int kUsualRanks = 4;
constexpr std::chrono::minutes kDeadline(5);  // slow links carry the largest size for a minute

using World = std::shared_ptr<pacer::Communicator>;

// All that one rank does; rank 0 also talks and writes.
void run_rank(const World& world, const collectives::Options& options) {
  const bool talks = world->rank() == 0;
  const collectives::Setting setting{world->world_size(), world->backend_name(), options.rate};
  const std::filesystem::path folder(options.output);
  if (talks) {  // before minutes are spent
    std::error_code error;
    std::filesystem::create_directories(folder, error);
    pacer::require(std::filesystem::is_directory(folder, error), "--output ", options.output,
                   " is no folder and cannot be made one");
  }
  const auto say = [&](const std::string& text) {
    if (!talks) return;
    std::fputs(text.c_str(), stdout);
    std::fflush(stdout);
  };
  say(collectives::describe(setting) + ", " + std::to_string(at::get_num_threads()) +
      " threads for each rank's own work\n");

  collectives::check_schemes(world, options.sizes.front());
  say("all schemes leave the same bits on all ranks, and sums within the bound of another order of "
      "additions\n");

  std::vector<collectives::ExchangeResults> exchanges;
  if (options.exchange) {
    for (const collectives::ExchangeSize& size : options.sizes) {
      exchanges.push_back({size, collectives::measure_exchange(world, size, options.exchange_patience)});
      say(collectives::exchange_table(setting, exchanges.back()));
    }
  }
  collectives::StepResults step;
  if (options.step) {
    step = collectives::measure_step(
        world, {options.layers, options.width, options.layer_seconds, options.rows}, options.step_patience);
    say(collectives::step_table(step));
  }
  std::vector<collectives::Bubble> bubbles;
  if (options.bubble) {
    bubbles = collectives::simulate_bubbles(options.pipeline);
    say(collectives::bubble_table(options.pipeline, bubbles));
  }

  if (talks) {
    std::string written;
    const auto write = [&](const std::string& name, const std::string& content) {
      examples::write_whole_file(folder / name, content);
      written += (written.empty() ? "" : ", ") + name;
    };
    if (options.exchange || options.step) {
      write("measurements.csv", collectives::as_csv(setting, exchanges, step));
    }
    if (options.exchange) write("exchange.svg", collectives::exchange_chart(setting, exchanges));
    if (options.step) write("step.svg", collectives::step_chart(setting, step));
    if (options.bubble) {
      write("bubble.csv", collectives::bubble_csv(options.pipeline, bubbles));
      write("bubble.svg", collectives::idle_chart(options.pipeline, bubbles));
      write("bubble-alive.svg", collectives::alive_chart(options.pipeline, bubbles));
    }
    say("\nwritten to " + options.output + ": " + written + "\n");
  }
  world->barrier();
}

// Tells the other ranks where this one fails.
int run_and_tell(const World& world, const collectives::Options& options) {
  return examples::run_guarded(
      kProgram,
      [&] {
        run_rank(world, options);
        return 0;
      },
      [&](const std::string& sentence) { world->leave(sentence); });
}

int run_threads(const collectives::Options& options, const pacer::CommunicatorOptions& connection) {
  at::set_num_threads(1);
  const auto ranks =
      pacer::Communicator::in_process(options.processes > 0 ? options.processes : kUsualRanks, connection);
  std::vector<int> exit_codes(ranks.size());
  std::vector<std::thread> threads;
  for (size_t r = 0; r < ranks.size(); ++r) {
    threads.emplace_back([&, r] { exit_codes[r] = run_and_tell(ranks[r], options); });
  }
  for (std::thread& thread : threads) thread.join();
  for (const int exit_code : exit_codes) {
    if (exit_code != 0) return exit_code;
  }
  return 0;
}

}  // namespace

int main(int argument_count, char** arguments) {
  return examples::run_guarded(kProgram, [&] {
    const auto options = collectives::read_options(argument_count, arguments);
    if (!options) return 0;
    const auto connection =
        pacer::CommunicatorOptions()
            .backend(options->cuda ? pacer::CommunicatorBackend::nccl : pacer::CommunicatorBackend::gloo)
            .timeout(kDeadline);
    if (options->threads) return run_threads(*options, connection);
    const int started = examples::started_processes().value_or(kUsualRanks);
    const int count = options->processes > 0 ? options->processes : started;
    if (const auto exit_code = examples::run_processes(count, arguments)) return *exit_code;
    return run_and_tell(examples::join_processes(connection), *options);
  });
}
