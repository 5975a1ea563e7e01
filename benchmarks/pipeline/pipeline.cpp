// Whole training steps of a GPT cut over ranks, in the orders that a Pipeline knows.
#include <charconv>
#include <cmath>
#include <cstdio>
#include <optional>
#include <string>
#include <vector>

#include <pacer/pacer.h>

#include "subcommands.h"
#include "support/ranks.h"
#include "support/table.h"
#include "training.h"

namespace bench::pipeline {
namespace {

constexpr const char* kAbout =
    R"(Measures whole training steps of a GPT cut over ranks, in the orders that a Pipeline knows.

  torchrun --no-python --nproc-per-node 2 pacer-bench pipeline                 two GPUs, all schedules
  ... pacer-bench pipeline --schedule 1f1b,zero-bubble --rows 2 --cut 0,13,24 --rounds 3
  ... pacer-bench pipeline --layers 4 --width 128 --length 16 --vocabulary 100 --rows 1    two CPUs
  torchrun --no-python --nproc-per-node 4 pacer-bench pipeline --stages 2      two pipelines of two GPUs

The head takes as long as some blocks, and ranks idle less where all need the same time for their
own passes, which --cut is for. The interleaved schedule has two chunks a rank. With --stages there
are as many pipelines beside each other as ranks allow, which add up their gradients; each gets the
same whole batch, so that losses are those of one pipeline. The model has 1.4 G parameters, bf16,
and FusedAdamW keeps its default 16-bit remainders. Schedules take turns in each round, in which the
model is made anew; three steps of each do not count.

Rank 0 prints a table and the same as JSON lines, one for each schedule and rank: the median step,
and of it all passes, on the slowest rank; the rank's own passes alone, without messages, and the
share of the time of all passes that it is idle therefore; the idle share in closed form, for ranks
and passes that take the same time; the time of its optimizer; the peaks of its memory once it has
its stage; tokens a second, of all ranks together; the loss of the last step. Schedules must come to
the same losses: to the bit on CPUs, nearly on GPUs, whose attention adds up in any order in its
backward pass.
)";

using pacer::PipelineOrder, pacer::PipelineSchedule;

constexpr int64_t kUncountedSteps = 3, kChunks = 2;

struct Arguments {
  Shape shape;
  Cut cut;
  int64_t steps, rounds;
  std::optional<int64_t> stages;  // none: as many as there are ranks
  std::vector<PipelineOrder> orders;
};

Arguments arguments_of(const examples::OptionValues& given) {
  const auto number = [&](const char* name) { return number_in(given, name); };
  Arguments arguments;
  arguments.shape = {{number("layers"), number("width"), number("length"), number("vocabulary")},
                     number("micro-batches"),
                     number("rows")};
  require_whole_heads(arguments.shape.gpt);
  arguments.steps = number("steps");
  arguments.rounds = number("rounds");
  if (given.count("stages") != 0) arguments.stages = number("stages");
  for (const std::string& bound : examples::split(given["cut"].as<std::string>())) {
    int64_t& value = arguments.cut.ranks.emplace_back();
    const char* const end = bound.data() + bound.size();
    const auto [stopped, error] = std::from_chars(bound.data(), end, value);
    pacer::require(error == std::errc() && stopped == end && value >= 0, "--cut wants whole numbers, not '",
                   examples::shown(bound), "'");
  }
  std::vector<std::pair<std::string, PipelineOrder>> known;
  for (const auto order : {PipelineOrder::gpipe, PipelineOrder::one_f_one_b, PipelineOrder::interleaved,
                           PipelineOrder::zero_bubble}) {
    known.emplace_back(pacer::schedule_name(order), order);
  }
  arguments.orders = examples::choices_of<PipelineOrder>(given, "schedule", known);
  return arguments;
}

struct Report {
  std::vector<std::vector<std::string>> table = {{"schedule", "rank", "blocks", "M params", "step ms",
                                                  "passes ms", "own ms", "idle", "by plan", "optimizer ms",
                                                  "peak GB", "reserved GB", "tokens/s", "loss"}};
  std::vector<pacer::JsonLine> lines;
};

// All ranks together; only rank 0 needs the result.
void add_rows(const Arguments& arguments, const PipelineSchedule& schedule, const Measured& measured,
              pacer::Communicator& world, Report& report) {
  const auto medians = [&](const std::vector<double>& times) {
    return over_ranks(world, spread_of(times).median);
  };
  const double step = largest(medians(measured.steps)), passes = largest(medians(measured.passes));
  const auto own = medians(measured.own), optimizer = medians(measured.optimizer);
  const auto allocated = over_ranks(world, measured.allocated_GB);
  const auto reserved = over_ranks(world, measured.reserved_GB);
  const auto blocks = over_ranks(world, static_cast<double>(measured.blocks));
  const auto parameters = over_ranks(world, static_cast<double>(measured.parameters) * 1e-6);
  const double by_plan = pacer::pipeline_idle(schedule);
  const int64_t pipelines = world.world_size() / schedule.ranks;
  const int64_t tokens = std::llround(static_cast<double>(arguments.shape.tokens() * pipelines) / step * 1e3);
  const std::string name = pacer::schedule_name(schedule.order);
  for (size_t rank = 0; rank < own.size(); ++rank) {
    const double idle = 1 - own[rank] / passes;
    report.table.push_back({name, std::to_string(rank), format("%.0f", blocks[rank]),
                            format("%.1f", parameters[rank]), milliseconds_text(step),
                            milliseconds_text(passes), milliseconds_text(own[rank]), format("%.3f", idle),
                            format("%.3f", by_plan), milliseconds_text(optimizer[rank]),
                            format("%.2f", allocated[rank]), format("%.2f", reserved[rank]),
                            std::to_string(tokens), format("%.4f", measured.last_losses.back())});
    pacer::JsonLine line;
    line.add("schedule", name).add("rank", rank).add("world", world.world_size());
    line.add("stages", schedule.ranks)
        .add("micro_batches", schedule.micro_batches)
        .add("rows", arguments.shape.rows);
    line.add("blocks", std::llround(blocks[rank])).add("params_M", rounded(parameters[rank], 1));
    line.add("ms", rounded(step, 2))
        .add("passes_ms", rounded(passes, 2))
        .add("own_ms", rounded(own[rank], 2));
    line.add("idle", rounded(idle, 4)).add("idle_by_plan", rounded(by_plan, 4));
    line.add("optimizer_ms", rounded(optimizer[rank], 2)).add("peak_GB", rounded(allocated[rank], 2));
    line.add("reserved_GB", rounded(reserved[rank], 2)).add("tokens_s", tokens);
    line.add("first_loss", measured.first_losses.back()).add("loss", measured.last_losses.back());
    report.lines.push_back(line);
  }
}

// All ranks have the same losses, so that all of them throw or none.
void require_same_losses(const char* which, const PipelineSchedule& schedule,
                         const std::vector<double>& losses, double expected, bool is_exact) {
  constexpr double kNearly = 0.01;
  for (const double loss : losses) {
    const bool is_same = is_exact ? loss == expected : std::abs(loss - expected) <= kNearly * expected;
    pacer::require<pacer::Error>(is_same, "the loss of the ", which, " step with ",
                                 pacer::schedule_name(schedule.order), " is ", loss,
                                 ", but that of the first schedule was ", expected,
                                 "; schedules must not differ in what they compute");
  }
}

int run(const examples::OptionValues& given) {
  const Arguments arguments = arguments_of(given);
  const auto world = pacer::Communicator::from_environment();
  const auto stages = static_cast<int>(arguments.stages.value_or(world->world_size()));
  const pacer::Grid grid(world, stages);
  std::vector<PipelineSchedule> schedules;
  for (const PipelineOrder order : arguments.orders) {
    schedules.push_back({order, grid.stages(), arguments.shape.micro_batches,
                         order == PipelineOrder::interleaved ? kChunks : 1});
    schedules.back().validate();
  }
  std::vector<Measured> measured(schedules.size());
  for (int64_t round = 0; round < arguments.rounds; ++round) {
    for (size_t i = 0; i < schedules.size(); ++i) {
      measure(arguments.shape, schedules[i], arguments.cut, grid, kUncountedSteps, arguments.steps,
              measured[i]);
    }
  }
  Report report;
  for (size_t i = 0; i < schedules.size(); ++i)
    add_rows(arguments, schedules[i], measured[i], *world, report);
  if (world->rank() == 0) {
    std::printf("%s\n", aligned(report.table).c_str());
    for (const pacer::JsonLine& line : report.lines) print(line);
  }
  world->barrier();
  const bool is_exact = world->device().is_cpu();
  for (size_t i = 0; i < schedules.size(); ++i) {
    const Measured &expected = measured.front(), &found = measured[i];
    require_same_losses("first", schedules[i], found.first_losses, expected.first_losses.front(), is_exact);
    require_same_losses("last", schedules[i], found.last_losses, expected.last_losses.front(), is_exact);
  }
  return 0;
}

}  // namespace

Subcommand subcommand() {
  Subcommand pipeline{"pipeline", "whole training steps of a GPT cut over ranks, by schedule", kAbout, run};
  const Shape shape;
  pipeline.options.add_options()                                                    //
      ("layers", whole_number(shape.gpt.layers), "of the GPT")                      //
      ("width", whole_number(shape.gpt.width), "of its layers, a multiple of 128")  //
      ("length", whole_number(shape.gpt.length), "tokens of a row")                 //
      ("vocabulary", whole_number(shape.gpt.vocabulary), "kinds of tokens")         //
      ("micro-batches", whole_number(shape.micro_batches), "of a step")             //
      ("rows", whole_number(shape.rows), "of a micro-batch")                        //
      ("stages", whole_number(), "ranks of a pipeline (all)")                       //
      ("schedule", word("NAME,...")->default_value("gpipe,1f1b,interleaved,zero-bubble"),
       "which, in this order")  //
      ("cut", word("B0,B1,...")->default_value("", "even"),
       "bounds of each rank's blocks")                     //
      ("steps", whole_number(5), "that count in a round")  //
      ("rounds", whole_number(2), "in which each schedule takes its turn");
  return pipeline;
}

}  // namespace bench::pipeline
