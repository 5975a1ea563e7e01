// pacer-pipeline-bench: whole training steps of a GPT cut over ranks, in the orders that a Pipeline knows.
//
//   torchrun --no-python --nproc-per-node 2 pacer-pipeline-bench                 two GPUs, all schedules
//   ... pacer-pipeline-bench --schedule 1f1b,zero-bubble --rows 2 --cut 0,13,24 --rounds 3
//   ... pacer-pipeline-bench --layers 4 --width 128 --length 16 --vocabulary 100 --rows 1    two CPUs
//   torchrun --no-python --nproc-per-node 4 pacer-pipeline-bench --stages 2      two pipelines of two GPUs
//
// --cut gives the bounds of each rank's blocks: the head takes as long as some blocks, and ranks idle less
// where all need the same time for their own passes. The interleaved schedule has two chunks a rank. With
// --stages there are as many pipelines beside each other as ranks allow, which add up their gradients; each
// gets the same whole batch, so that losses are those of one pipeline. The model has 1.4 G parameters, bf16,
// and FusedAdamW keeps its default 16-bit remainders. Schedules take turns in each round, in which the model
// is made anew; three steps of each do not count.
//
// Rank 0 prints a table and the same as JSON lines, one for each schedule and rank: the median step, and of
// it all passes, on the slowest rank; the rank's own passes alone, without messages, and the share of the
// time of all passes that it is idle therefore; the idle share in closed form, for ranks and passes that
// take the same time; the time of its optimizer; the peaks of its memory once it has its stage; tokens a
// second, of all ranks together; the loss of the last step. Schedules must come to the same losses: to the
// bit on CPUs, nearly on GPUs, whose attention adds up in any order in its backward pass.
#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include <pacer/files/json_lines.h>
#include <pacer/pacer.h>

#include "bench/statistics.h"
#include "bench/table.h"
#include "training.h"

namespace {

using pacer::PipelineSchedule, pacer::PipelineShape;
using pipeline_bench::Measured;

constexpr int64_t kUncountedSteps = 3, kChunks = 2;

struct Arguments {
  pipeline_bench::Shape shape;
  pipeline_bench::Cut cut;
  int64_t steps = 5, rounds = 2;
  int64_t stages = 0;  // 0: as many as there are ranks
  std::vector<PipelineSchedule> schedules = {PipelineSchedule::gpipe, PipelineSchedule::one_f_one_b,
                                             PipelineSchedule::interleaved, PipelineSchedule::zero_bubble};
};

int64_t whole_number(const std::string& option, const std::string& text, int64_t from) {
  int64_t value = 0;
  const char* const end = text.data() + text.size();
  const auto [stopped, error] = std::from_chars(text.data(), end, value);
  pacer::require(error == std::errc() && stopped == end && value >= from, option,
                 " wants a whole number from ", from, " on, not '", text, "'");
  return value;
}

std::vector<std::string> parts_of(const std::string& text) {
  std::vector<std::string> parts;
  std::istringstream list(text);
  for (std::string part; std::getline(list, part, ',');) parts.push_back(part);
  return parts;
}

PipelineSchedule schedule_named(const std::string& name) {
  std::string known;
  for (const PipelineSchedule schedule : Arguments().schedules) {
    if (name == pacer::schedule_name(schedule)) return schedule;
    known += (known.empty() ? "" : ", ") + std::string(pacer::schedule_name(schedule));
  }
  pacer::require(false, "there is no schedule '", name, "'; there are ", known);
  return {};
}

Arguments parse_arguments(const std::vector<std::string>& words) {
  Arguments arguments;
  const std::vector<std::pair<std::string, int64_t*>> numbers = {
      {"--layers", &arguments.shape.layers},
      {"--width", &arguments.shape.width},
      {"--length", &arguments.shape.length},
      {"--vocabulary", &arguments.shape.vocabulary},
      {"--micro-batches", &arguments.shape.micro_batches},
      {"--rows", &arguments.shape.rows},
      {"--stages", &arguments.stages},
      {"--steps", &arguments.steps},
      {"--rounds", &arguments.rounds}};
  for (size_t i = 0; i < words.size(); i += 2) {
    const std::string& option = words[i];
    const auto number = std::find_if(numbers.begin(), numbers.end(),
                                     [&](const auto& known) { return known.first == option; });
    std::string known = "--schedule, --cut";
    for (const auto& [name, value] : numbers) known += ", " + name;
    pacer::require(number != numbers.end() || option == "--schedule" || option == "--cut", "unknown option '",
                   option, "'; there are ", known);
    pacer::require(i + 1 < words.size(), option, " wants a value");
    const std::string& value = words[i + 1];
    if (number != numbers.end()) {
      *number->second = whole_number(option, value, 1);
    } else if (option == "--schedule") {
      arguments.schedules.clear();
      for (const std::string& name : parts_of(value)) arguments.schedules.push_back(schedule_named(name));
    } else {
      for (const std::string& bound : parts_of(value))
        arguments.cut.ranks.push_back(whole_number(option, bound, 0));
    }
  }
  pacer::require(arguments.shape.width % sharding_bench::kHeadSize == 0,
                 "--width must be a multiple of 128, the size of a head");
  return arguments;
}

// The value of each rank.
std::vector<double> over_ranks(pacer::Communicator& world, double value) {
  std::vector<double> values;
  for (const std::string& text : world.exchange(std::to_string(value))) {
    values.push_back(std::atof(text.c_str()));
  }
  return values;
}

double largest(const std::vector<double>& values) { return *std::max_element(values.begin(), values.end()); }

double rounded(double value, int digits) {
  const double scale = std::pow(10.0, digits);
  return std::round(value * scale) / scale;
}

struct Report {
  std::vector<std::vector<std::string>> table = {{"schedule", "rank", "blocks", "M params", "step ms",
                                                  "passes ms", "own ms", "idle", "by plan", "optimizer ms",
                                                  "peak GB", "reserved GB", "tokens/s", "loss"}};
  std::vector<std::string> lines;
};

// All ranks together; only rank 0 needs the result.
void add_rows(const Arguments& arguments, const PipelineShape& plan, const Measured& measured,
              pacer::Communicator& world, Report& report) {
  const auto medians = [&](const std::vector<double>& times) {
    return over_ranks(world, bench::spread_of(times).median);
  };
  const double step = largest(medians(measured.steps)), passes = largest(medians(measured.passes));
  const auto own = medians(measured.own), optimizer = medians(measured.optimizer);
  const auto allocated = over_ranks(world, measured.allocated_GB);
  const auto reserved = over_ranks(world, measured.reserved_GB);
  const auto blocks = over_ranks(world, static_cast<double>(measured.blocks));
  const auto parameters = over_ranks(world, static_cast<double>(measured.parameters) * 1e-6);
  const double by_plan = pacer::pipeline_idle(plan);
  const int64_t pipelines = world.world_size() / plan.ranks;
  const int64_t tokens = std::llround(static_cast<double>(arguments.shape.tokens() * pipelines) / step * 1e3);
  const std::string name = pacer::schedule_name(plan.schedule);
  for (size_t rank = 0; rank < own.size(); ++rank) {
    const double idle = 1 - own[rank] / passes;
    report.table.push_back({name, std::to_string(rank), bench::format("%.0f", blocks[rank]),
                            bench::format("%.1f", parameters[rank]), bench::milliseconds_text(step),
                            bench::milliseconds_text(passes), bench::milliseconds_text(own[rank]),
                            bench::format("%.3f", idle), bench::format("%.3f", by_plan),
                            bench::milliseconds_text(optimizer[rank]), bench::format("%.2f", allocated[rank]),
                            bench::format("%.2f", reserved[rank]), std::to_string(tokens),
                            bench::format("%.4f", measured.last_losses.back())});
    pacer::JsonLine line;
    line.add("schedule", name)
        .add("rank", rank)
        .add("world", world.world_size())
        .add("stages", plan.ranks)
        .add("micro_batches", plan.micro_batches)
        .add("rows", arguments.shape.rows)
        .add("blocks", std::llround(blocks[rank]))
        .add("params_M", rounded(parameters[rank], 1))
        .add("ms", rounded(step, 2))
        .add("passes_ms", rounded(passes, 2))
        .add("own_ms", rounded(own[rank], 2))
        .add("idle", rounded(idle, 4))
        .add("idle_by_plan", rounded(by_plan, 4))
        .add("optimizer_ms", rounded(optimizer[rank], 2))
        .add("peak_GB", rounded(allocated[rank], 2))
        .add("reserved_GB", rounded(reserved[rank], 2))
        .add("tokens_s", tokens)
        .add("first_loss", measured.first_losses.back())
        .add("loss", measured.last_losses.back());
    report.lines.push_back(line.str());
  }
}

// All ranks have the same losses, so that all of them throw or none.
void require_same_losses(const char* which, const PipelineShape& plan, const std::vector<double>& losses,
                         double expected, bool is_exact) {
  constexpr double kNearly = 0.01;
  for (const double loss : losses) {
    const bool is_same = is_exact ? loss == expected : std::abs(loss - expected) <= kNearly * expected;
    pacer::require<pacer::Error>(is_same, "the loss of the ", which, " step with ",
                                 pacer::schedule_name(plan.schedule), " is ", loss,
                                 ", but that of the first schedule was ", expected,
                                 "; schedules must not differ in what they compute");
  }
}

void run(const Arguments& arguments) {
  const auto world = pacer::Communicator::from_environment();
  const auto stages = static_cast<int>(arguments.stages == 0 ? world->world_size() : arguments.stages);
  const pacer::Grid grid(world, stages);
  std::vector<PipelineShape> plans;
  for (const PipelineSchedule schedule : arguments.schedules) {
    plans.push_back({schedule, grid.stages(), arguments.shape.micro_batches,
                     schedule == PipelineSchedule::interleaved ? kChunks : 1});
    plans.back().validate();
  }
  std::vector<Measured> measured(plans.size());
  for (int64_t round = 0; round < arguments.rounds; ++round) {
    for (size_t i = 0; i < plans.size(); ++i) {
      pipeline_bench::measure(arguments.shape, plans[i], arguments.cut, grid, kUncountedSteps,
                              arguments.steps, measured[i]);
    }
  }
  Report report;
  for (size_t i = 0; i < plans.size(); ++i) add_rows(arguments, plans[i], measured[i], *world, report);
  if (world->rank() == 0) {
    std::printf("%s\n", bench::aligned(report.table).c_str());
    for (const std::string& line : report.lines) std::printf("%s\n", line.c_str());
    std::fflush(stdout);
  }
  world->barrier();
  const bool is_exact = world->device().is_cpu();
  for (size_t i = 0; i < plans.size(); ++i) {
    const Measured &expected = measured.front(), &found = measured[i];
    require_same_losses("first", plans[i], found.first_losses, expected.first_losses.front(), is_exact);
    require_same_losses("last", plans[i], found.last_losses, expected.last_losses.front(), is_exact);
  }
}

std::string sentence_of(const std::exception& error) {
  const auto* of_torch = dynamic_cast<const c10::Error*>(&error);
  return of_torch != nullptr ? of_torch->what_without_backtrace() : error.what();
}

}  // namespace

int main(int argument_count, char** arguments) {
  try {
    run(parse_arguments({arguments + 1, arguments + argument_count}));
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "pacer-pipeline-bench: %s\n", sentence_of(error).c_str());
    return 1;
  }
}
