// The passes of one rank of a pipeline through one batch, in the order of the plan.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <pacer/hooks/detail/session_window.h>
#include <pacer/modules/split_backward.h>
#include <pacer/modules/tensor_call.h>
#include <pacer/parallel/detail/pipeline_hook.h>

namespace pacer::detail {

// What a Pipeline runs: what comes before the blocks, of the tensors of a batch; block i; and the loss, of
// what the blocks gave and the tensors of a batch.
struct PipelineFunctions {
  std::function<Tensors(const Tensors& batch)> first;
  std::function<Tensors(size_t i, const Tensors& x)> block;
  std::function<at::Tensor(const Tensors& x, const Tensors& batch)> last;
};

class PipelineRun {
 public:
  PipelineRun(PipelineHook& hook, const PipelineFunctions& functions) : hook_(hook), functions_(functions) {}

  // Forward and backward of a whole window, which is new. Returns the mean loss of its micro-batches, fp32,
  // no dimensions, on every rank of the pipeline.
  at::Tensor train(SessionWindow& window, const Tensors& batch);
  // Forward only, without gradients.
  at::Tensor evaluate(const Tensors& batch);

 private:
  // What a micro-batch leaves in a stage for its backward pass.
  struct SavedPass {
    Tensors inputs;  // that other stages gave
    Tensors outputs;
    TensorSpecs specs;  // of the outputs
    std::unique_ptr<SplitBackward> split;
  };

  std::vector<Tensors> micro_batches(const Tensors& batch) const;
  // What micro-batch `k` counts in an evaluation, where the first counts 1.
  double share_of_rows(size_t k) const;
  std::string checksum_of_batch(const Tensors& batch) const;
  void run_plan(SessionWindow& window);
  // `window` may be null: then without backward.
  void forward(SessionWindow* window, const PipelineAction& action);
  void backward(SessionWindow& window, const PipelineAction& action);
  void backward_weight(SessionWindow& window, const PipelineAction& action);
  void add_loss(const at::Tensor& loss, double weight);
  at::Tensor mean_loss();

  int64_t stage_of(const PipelineAction& action) const {
    return hook_.schedule().stage(hook_.grid().stage(), action.chunk);
  }
  at::TensorOptions device_options() const {
    return at::TensorOptions().dtype(at::kFloat).device(hook_.grid().world()->device());
  }
  bool is_last(int64_t stage) const { return stage == hook_.schedule().stages() - 1; }

  PipelineHook& hook_;
  const PipelineFunctions& functions_;
  std::vector<Tensors> batches_;                                   // micro-batches as hooks left them
  std::vector<size_t> kinds_;                                      // of these, see StageMessages
  std::map<std::pair<int64_t, int64_t>, SavedPass> saved_passes_;  // by micro-batch and chunk
  at::Tensor loss_;  // sum of weighted losses; of the last stage
  double weight_ = 0;
};

}  // namespace pacer::detail
