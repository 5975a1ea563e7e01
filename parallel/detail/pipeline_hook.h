// A Pipeline as a Session sees it: ranks that train different stages of one model, and where there are
// several pipelines, replicas of each stage. Ranks agree before a step's first message; gradients are added
// over replicas, tied ones over stages, before the optimizer sees them; its guard is that of all stages.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <pacer/collectives/detail/withheld_gradients.h>
#include <pacer/collectives/gradient_bucketer.h>
#include <pacer/collectives/grid.h>
#include <pacer/hooks/detail/wide_gradients.h>
#include <pacer/parallel/detail/stage_messages.h>
#include <pacer/parallel/detail/stage_model.h>
#include <pacer/parallel/parallel_training.h>
#include <pacer/parallel/pipeline_options.h>

namespace pacer::detail {

class PipelineHook : public ParallelTraining {
 public:
  PipelineHook(torch::nn::Module& model, const Blocks& blocks, Grid grid, const PipelineSchedule& schedule,
               PipelineOptions options);

  const Grid& grid() const { return grid_; }
  const PipelineSchedule& schedule() const { return stage_model_.cut().schedule; }
  const StageModel& stage_model() const { return stage_model_; }
  // What this rank does in a step.
  const PipelinePlan& plan() const { return plan_; }
  StageMessages& messages() { return messages_; }
  SessionParts* session_parts() const { return attached_; }
  bool has_stage(int64_t stage) const { return stage % schedule().ranks == grid_.stage(); }

  std::string hook_name() const override { return "pipeline"; }
  std::string agreement() const override;
  // Throws InvalidArgument for another model than that of the Pipeline, and for an optimizer that does not
  // have this rank's parameters or whose gradients stay with their ranks.
  void attach(SessionParts& parts) override;
  // Throws with hooks whose work the pipeline does, or that cannot be had with it.
  void arrange() override;
  void start(const Progress& progress) override;
  void backward_begin(const Progress& progress) override;
  void backward_end(const Progress& progress) override;
  void backward_failed() override;
  void gradients_ready(const Progress& window) override;
  void after_step(StepReport& report) override;

  // Before the first message of a window. `data`: a checksum of its batch. Throws CommunicationError, on
  // every rank, where ranks are at different places, or those of a pipeline have different batches.
  void agree(const Progress& progress, const std::string& data);
  // The same of an evaluation, among the ranks of this pipeline.
  void require_same_batch(const std::string& data) const;

 private:
  double join() override;
  // The ranks of a pipeline have the same batches; the last stage's count.
  bool counts_batches() const override { return grid_.stage() == grid_.stages() - 1; }
  void watch_gradients();
  void add_tied_gradients();
  void share_tied_values();

  const torch::nn::Module& model_;
  const std::shared_ptr<torch::nn::Module> held_model_;  // the same, where a shared_ptr has it
  const Grid grid_;
  const PipelineOptions options_;
  StageModel stage_model_;
  const PipelinePlan plan_;
  StageMessages messages_;
  SessionParts* attached_ = nullptr;
  std::unique_ptr<GradientBucketer> bucketer_;  // with replicas
  // From the passes to gradients_ready, where there are other ranks: a norm of this rank's would be a stage's.
  std::unique_ptr<WithheldGradients> withheld_;
  WideGradients wide_;
};

}  // namespace pacer::detail
