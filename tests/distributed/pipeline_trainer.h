// One rank of a run that trains the small language model of the tests of Pipeline: a stage of it in a
// pipeline, or the whole model with GradientAccumulation. Both take the same examples in the same order.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <pacer/files/checksum.h>

#include "optimizers.h"
#include "scenario.h"
#include "support/parallel/pipeline_model.h"
#include "support/session/small_run.h"

namespace pacer::testing::pipelines {

struct Task {
  int64_t depth = 8, micro_batches = 4, rows = 1;  // rows of a micro-batch
  bool fp8 = false;                                // the layers that can compute in 8-bit floats
  bool is_tied = false;  // embedding and head are one parameter, which the first and the last stage use
  // With two groups, so that stages have options of groups in common.
  RegisteredOptimizer optimizer = optimizer_named("FusedAdamW");
  PipelineSchedule schedule = one_f_one_b(4);
  PipelineOptions options = PipelineOptions().first({"embedding"}).last({"norm", "head"});
  // Before the model is cut.
  std::function<void(LanguageModel&)> change_model = [](LanguageModel&) {};
  // What becomes of a block's output, in forward.
  std::function<Tensor(Tensor)> after_block = [](Tensor x) { return x; };
};

// The world of these ranks, with sums in their order; one rank is alone.
inline std::shared_ptr<Communicator> join_in_order(const Player& player) {
  const CommunicatorOptions options = player.options().ordered_sum(true);
  if (player.world_size == 1)
    return Communicator::alone(player.has("nccl") ? at::Device("cuda:0") : at::kCPU);
  return std::make_shared<Communicator>(detail::connect(player.settings(), options), options);
}

constexpr double kMaxNorm = 0.1;  // less than the norm of any step here

class PipelineTrainer {
 public:
  // As a stage of a pipeline of that grid.
  PipelineTrainer(const Task& task, const Grid& grid)
      : task_(task),
        model_(make_model(task)),
        world_(grid.world()),
        sampler_(kExamples, 3, *grid.replicas()) {
    pipeline_.emplace(
        *model_, model_->blocks,
        [this](size_t i, Tensor x) {
          return task_.after_block(model_->blocks->run(i, &BlockImpl::forward, x));
        },
        grid, task.schedule, options_of(task));
    make_session(pipeline_->named_parameters());
  }
  // As a replica of the whole model.
  PipelineTrainer(const Task& task, std::shared_ptr<Communicator> world)
      : task_(task), model_(make_model(task)), world_(std::move(world)), sampler_(kExamples, 3, *world_) {
    model_->to(world_->device());
    make_session(model_->named_parameters());
  }
  PipelineTrainer(const PipelineTrainer&) = delete;

  Session& session() { return *session_; }

  // One optimizer step; returns the mean loss of this replica's batch. `change` spoils its tokens.
  double step(const std::function<void(Tensor& tokens)>& change = nullptr) {
    const int64_t rows = task_.rows;
    auto [x, y] = next_batch(rows * task_.micro_batches);
    if (change) change(x);
    double loss = 0;
    if (pipeline_) {
      const Tensor mean = pipeline_->step(
          *session_, x, y, [this](Tensor tokens) { return model_->embed(tokens); },
          [this](Tensor h, Tensor targets) { return model_->loss(h, targets); });
      session_->step();
      return mean.item<double>();
    }
    for (int64_t k = 0; k < task_.micro_batches; ++k) {
      auto [tokens, targets] = session_->begin(x.narrow(0, k * rows, rows), y.narrow(0, k * rows, rows));
      const Tensor own = model_->forward(tokens, targets);
      session_->backward(own);
      session_->step();
      loss += own.item<double>() / static_cast<double>(task_.micro_batches);
    }
    return loss;
  }

  // The newest checkpoint's step, or 0.
  int64_t resume() {
    const CapturedStderr quiet;
    const int64_t step = session_->resume().value_or(0);
    if (step > 0) sampler_.reset();
    return step;
  }

  // The tensors of the model that this rank has, by name.
  std::map<std::string, Tensor> weights() const {
    std::map<std::string, Tensor> all;
    for (const auto& [name, tensor] : state().model) all[name] = tensor.cpu();
    return all;
  }
  // This rank's part of what a checkpoint has by name.
  detail::TrainingState state() const { return detail::export_state(*parts_); }
  // Checksums of its tensors.
  std::map<std::string, std::string> checksums() const {
    std::map<std::string, std::string> sums;
    const detail::TrainingState whole = state();
    for (const auto part : {&detail::TrainingState::model, &detail::TrainingState::optimizer}) {
      for (const auto& [name, tensor] : whole.*part) {
        const Tensor host = tensor.cpu().contiguous();
        const std::string kind = part == &detail::TrainingState::model ? "model:" : "optimizer:";
        sums[kind + name] = Checksum().add(host.const_data_ptr(), host.nbytes()).hex();
      }
    }
    return sums;
  }

 private:
  static constexpr size_t kExamples = 24;

  static LanguageModel make_model(const Task& task) {
    torch::manual_seed(4);
    LanguageModel model(task.depth, task.is_tied);
    task.change_model(model);
    return model;
  }

  static PipelineOptions options_of(const Task& task) {
    PipelineOptions options = task.options;
    if (task.is_tied) options.last({"norm", "embedding"});
    return options;
  }

  void make_session(const NamedParameters& parameters) {
    optimizer_ = task_.optimizer.make(parameters, world_);
    session_ = std::make_unique<Session>(*model_, *optimizer_, world_);
    session_->use(PartsProbe(parts_));
    if (pipeline_) {
      session_->use(*pipeline_);
    } else {
      session_->use(GradientAccumulation(task_.micro_batches));
    }
    if (task_.fp8) session_->use(Precision::fp8());
    // Norms of torch's optimizers add up in another order where a parameter is on another rank.
    if (task_.optimizer.is_own) session_->use(GradientClipping(kMaxNorm));
    session_->use(LearningRate(warmup_cosine({3, 20}))).use(sampler_);
  }

  std::pair<Tensor, Tensor> next_batch(int64_t rows) {
    auto examples = sampler_.next(static_cast<size_t>(rows));
    if (!examples) {
      sampler_.reset();
      examples = sampler_.next(static_cast<size_t>(rows));
    }
    std::vector<Tensor> tokens, targets;
    for (const size_t example : *examples) {
      const auto [x, y] = batch_of(1, static_cast<int64_t>(example));
      tokens.push_back(x);
      targets.push_back(y);
    }
    return {torch::cat(tokens), torch::cat(targets)};
  }

  const Task task_;
  LanguageModel model_;
  std::shared_ptr<Communicator> world_;
  EpochSampler sampler_;
  std::optional<Pipeline> pipeline_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  SessionParts* parts_ = nullptr;
  std::unique_ptr<Session> session_;
};

// The schedule of that name, as schedule_name has it, for four micro-batches.
inline PipelineSchedule schedule_named(const std::string& name) {
  for (const PipelineSchedule& schedule : {gpipe(4), one_f_one_b(4), zero_bubble(4), interleaved(4, 2)}) {
    if (schedule_name(schedule.order) == name) return schedule;
  }
  throw Error("no schedule has the name " + name);
}

}  // namespace pacer::testing::pipelines
