#include "schedule_binding.h"

#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <torch/custom_class.h>

#include <pacer/core/error.h>
#include <pacer/schedulers/layer_drop_rule.h>
#include <pacer/schedulers/sequence_length.h>

namespace pacer::python {
namespace {

using Table = std::vector<std::tuple<int64_t, int64_t>>;
using Dimensions = std::vector<std::vector<int64_t>>;

// The hook of a Session, asked for one micro-batch at a time.
class PythonSequenceLength : public torch::CustomClassHolder {
 public:
  PythonSequenceLength(int64_t first, int64_t last, std::optional<int64_t> ramp_steps,
                       std::optional<int64_t> ramp_tokens, std::optional<double> root,
                       std::optional<int64_t> difficulty_step, const Table& table, bool by_tokens,
                       bool reshapes, Dimensions dimensions, bool allow_shorter)
      : schedule_(first, last),
        hook_(make_options(ramp_steps, ramp_tokens, root, difficulty_step, table, by_tokens)
                  .mode(reshapes ? LengthMode::reshape : LengthMode::truncate)
                  .dimensions(std::move(dimensions))
                  .allow_shorter(allow_shorter)) {}

  // The tensors, cut, and how many tokens they hold.
  std::tuple<std::vector<at::Tensor>, int64_t> begin(std::vector<at::Tensor> tensors, int64_t step,
                                                     int64_t tokens) {
    MicroBatch batch;
    batch.tensors = std::move(tensors);
    hook_.begin(at(step, tokens), batch);
    return {std::move(batch.tensors), batch.tokens};
  }
  int64_t length(int64_t step, int64_t tokens) const { return schedule_.length(at(step, tokens)); }
  bool settled(int64_t step, int64_t tokens) const { return schedule_.settled(at(step, tokens)); }

 private:
  SequenceLengthOptions make_options(std::optional<int64_t> ramp_steps, std::optional<int64_t> ramp_tokens,
                                     std::optional<double> root, std::optional<int64_t> difficulty_step,
                                     const Table& table, bool by_tokens) {
    if (ramp_steps) schedule_.ramp_steps(*ramp_steps);
    if (ramp_tokens) schedule_.ramp_tokens(*ramp_tokens);
    if (root) schedule_.root(*root);
    if (difficulty_step) schedule_.difficulty_step(*difficulty_step);
    if (!table.empty()) {
      LengthSchedule::Table pairs;
      for (const auto& [boundary, length] : table) pairs.emplace_back(boundary, length);
      schedule_.table(std::move(pairs));
    }
    if (by_tokens) schedule_.by_tokens();
    return schedule_;
  }
  static Progress at(int64_t step, int64_t tokens) {
    Progress progress;
    progress.step = step;
    progress.tokens = tokens;
    return progress;
  }

  LengthSchedule schedule_;
  SequenceLength hook_;
};

// Whether the layer runs in this micro-step, and with which probability it does.
std::tuple<bool, double> layer_drop_gate(double theta_bar, double gamma, int64_t seed, int64_t layer,
                                         int64_t layers, int64_t step, int64_t micro_step) {
  const LayerDropOptions options =
      LayerDropOptions().theta_bar(theta_bar).gamma(gamma).seed(static_cast<uint64_t>(seed));
  Progress progress;
  progress.step = step;
  progress.micro_step = micro_step;
  return {keeps_layer(options, layer, layers, progress), keep_probability(options, layer, layers, progress)};
}

}  // namespace

void register_schedules(torch::Library& library) {
  library.class_<PythonSequenceLength>("SequenceLength")
      .def(
          torch::init<int64_t, int64_t, std::optional<int64_t>, std::optional<int64_t>, std::optional<double>,
                      std::optional<int64_t>, const Table&, bool, bool, Dimensions, bool>())
      .def("begin", &PythonSequenceLength::begin)
      .def("length", &PythonSequenceLength::length)
      .def("settled", &PythonSequenceLength::settled);
  library.def(
      "layer_drop_gate(float theta_bar, float gamma, int seed, int layer, int layers, int step, int "
      "micro_step) "
      "-> (bool, float)",
      layer_drop_gate);
}

}  // namespace pacer::python
