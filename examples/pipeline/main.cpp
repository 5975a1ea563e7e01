// pacer-pipeline: the plan of a pipeline as text and as a drawing, how long each rank stands idle and how
// many micro-batches it holds. Exit codes: 0 for success, 1 where the drawing cannot be written, 2 for input
// that cannot work.
#include <algorithm>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include <boost/program_options.hpp>

#include <pacer/parallel/pipeline_simulation.h>

#include "drawing.h"
#include "support/command_line.h"
#include "support/program.h"
#include "support/svg.h"

namespace {

namespace po = boost::program_options;
using pacer::PipelineOrder;

const std::vector<std::pair<std::string, PipelineOrder>> kOrders = {
    {"gpipe", PipelineOrder::gpipe},
    {"1f1b", PipelineOrder::one_f_one_b},
    {"interleaved", PipelineOrder::interleaved},
    {"zero-bubble", PipelineOrder::zero_bubble}};

po::options_description known_options() {
  po::options_description known = examples::make_options();
  known.add_options()  //
      ("stages", po::value<int64_t>()->value_name("P")->default_value(4),
       "ranks in a row; each has one stage of the model, interleaved several")                   //
      ("micro-batches", po::value<int64_t>()->value_name("M")->default_value(8), "of one step")  //
      ("schedule",
       po::value<std::string>()->value_name("gpipe|1f1b|interleaved|zero-bubble")->default_value("1f1b"),
       "the order of the passes")  //
      ("chunks", po::value<int64_t>()->value_name("V"),
       "stages of each rank; 2 where interleaved, else 1")  //
      ("forward", po::value<int64_t>()->value_name("SLOTS")->default_value(1),
       "that a forward pass through one stage takes")  //
      ("backward-input", po::value<int64_t>()->value_name("SLOTS")->default_value(1),
       "that the half of backward takes which makes the gradient of the stage's input")  //
      ("backward-weight", po::value<int64_t>()->value_name("SLOTS")->default_value(1),
       "that the half of backward takes which makes the gradients of the parameters")  //
      ("transfer", po::value<int64_t>()->value_name("SLOTS")->default_value(0),
       "that a message between two ranks takes")  //
      ("svg", po::value<std::string>()->value_name("FILE"), "draw the plan into this file");
  return known;
}

std::string title_of(const pacer::PipelineSchedule& schedule) {
  std::string title = std::string(pacer::schedule_name(schedule.order)) + ": " +
                      std::to_string(schedule.ranks) + " ranks, " + std::to_string(schedule.micro_batches) +
                      " micro-batches";
  if (schedule.chunks > 1) title += ", " + std::to_string(schedule.chunks) + " chunks a rank";
  return title;
}

// Whether pipeline_idle has a closed form for these times.
bool has_formula(const pacer::PipelineSchedule& schedule, const pacer::PipelineCosts& costs) {
  return costs.transfer == 0 && (schedule.order != PipelineOrder::zero_bubble ||
                                 costs.backward_weight <= std::min(costs.forward, costs.backward_input));
}

int run(int argument_count, char** arguments) {
  const auto given = examples::read_command_line(
      argument_count, arguments,
      "Prints who does what when in a pipeline, one line a rank and one column a slot of time, simulated:\n"
      "F forward, B backward, I and W its input and weight halves, each with the micro-batch's number and,\n"
      "among several chunks, a letter for the chunk; a point where a rank stands idle.\n\n"
      "  pacer-pipeline --stages 4 --micro-batches 8 --schedule zero-bubble --svg plan.svg\n",
      known_options());
  if (!given) return 0;
  constexpr int64_t kMostStages = 128, kMostMicroBatches = 512, kMostChunks = 16, kMostSlots = 16;
  pacer::PipelineSchedule schedule;
  schedule.order = examples::choice_of(*given, "schedule", kOrders);
  schedule.ranks = examples::value_in<int64_t>(*given, "stages", 1, kMostStages);
  schedule.micro_batches = examples::value_in<int64_t>(*given, "micro-batches", 1, kMostMicroBatches);
  schedule.chunks = examples::value_in<int64_t>(*given, "chunks", 1, kMostChunks,
                                                schedule.order == PipelineOrder::interleaved ? 2 : 1);
  // A slot is a time of one stage, the library's times are those of all stages of a rank.
  const auto slots = [&](const char* name, int64_t least) {
    return static_cast<double>(examples::value_in<int64_t>(*given, name, least, kMostSlots));
  };
  const auto chunks = static_cast<double>(schedule.chunks);
  const pacer::PipelineCosts costs{slots("forward", 1) * chunks, slots("backward-input", 1) * chunks,
                                   slots("backward-weight", 1) * chunks, slots("transfer", 0)};
  const auto plans = pacer::pipeline_plans(schedule);
  const auto simulated = pacer::simulate_pipeline(plans, schedule.chunks, costs);

  std::printf("%s\n\n%s\n", title_of(schedule).c_str(),
              pipeline::text_drawing(plans, schedule.chunks, simulated).c_str());
  std::printf("%-8s %10s %20s\n", "", "idle", "micro-batches alive");
  for (size_t rank = 0; rank < plans.size(); ++rank) {
    const std::string name = "rank " + std::to_string(rank);
    std::printf("%-8s %8.1f %% %20.4g\n", name.c_str(), 100 * simulated.idle[rank], simulated.alive[rank]);
  }
  std::printf("\n%.0f slots", simulated.total);
  if (has_formula(schedule, costs)) {
    std::printf("; by the formula %.1f %% of them idle", 100 * pacer::pipeline_idle(schedule, costs));
  }
  std::printf("\n");
  if (given->count("svg") != 0) {
    examples::svg::save((*given)["svg"].as<std::string>(),
                        pipeline::svg_drawing(title_of(schedule), plans, schedule.chunks, simulated));
  }
  return 0;
}

}  // namespace

int main(int argument_count, char** arguments) {
  return examples::run_guarded("pacer-pipeline", [&] { return run(argument_count, arguments); });
}
