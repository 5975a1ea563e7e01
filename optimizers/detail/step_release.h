// A step that updates parameters one by one, while backward runs (GradientRelease). It works with the plan of a
// StepEngine: all step groups are told their scalars when the step begins, and each tensor of the plan's tables has
// a launch of its own, as pages have where state is paged.
//
// Every parameter that is trained is expected, and what has not come by the end keeps its count. One without state, which the
// plan does not know, waits for others of its kind, and then the step goes on with a new plan for what has not been updated yet.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <pacer/optimizers/detail/optimizer_view.h>
#include <pacer/optimizers/detail/paged_table.h>
#include <pacer/optimizers/session_optimizer.h>

namespace pacer::detail {

class StepEngine;

class StepRelease {
 public:
  // What the step is about; it lives until end().
  struct Step {
    const ParamGroups* groups;
    ParamStates* states;
    const TensorNames* names;
    double average;
  };

  // The engine's plan fits. The three calls of SessionOptimizer follow.
  void begin(StepEngine& engine, const Step& step);
  void arrive(StepEngine& engine, const at::Tensor& parameter, ReleasedParameters& released);
  void end(StepEngine& engine, bool has_failed, ReleasedParameters& released);

  // The plan is no longer there.
  void forget_plan();

 private:
  bool is_under_way() const { return step_.has_value(); }
  // Between these two, parameters of one plan are updated.
  void begin_part(StepEngine& engine, const ReleasedParameters& released);
  void end_part(StepEngine& engine);
  void update_waiting(StepEngine& engine, ReleasedParameters& released);
  void update(StepEngine& engine, size_t entry, ReleasedParameters& released);
  void launch(StepEngine& engine, size_t entry);

  std::optional<Step> step_;
  // On a GPU: all launches of a step are on one stream, whichever backward makes a gradient on.
  std::optional<c10::Stream> stream_;
  int64_t elements_ = 0;             // of all parameters
  std::vector<at::Tensor> waiting_;  // without an entry
  int64_t waiting_elements_ = 0;

  // They belong to the plan that there is.
  std::vector<PagedTable> launches_;  // by table, and in each by position
  std::vector<char> arrived_;         // by entry
  const kernels::StepScalars* scalars_ = nullptr;
};

}  // namespace pacer::detail
