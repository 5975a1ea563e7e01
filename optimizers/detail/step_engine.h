// One step of every optimizer here, in every phase, from parameter groups to kernel launches. The engine has
// a plan (step_plan.h), and each step only checks that it still fits. What no longer fits is planned anew, or
// refused, before the first write. The CompressedParameters of a 1-bit optimizer belong to the engine, which
// calls them as it calls its tables, from the freeze on. The three calls of a step are those of
// SessionOptimizer.
//
// docs/contributing.md lists the files that one AdamW step goes through.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <pacer/optimizers/detail/row_room.h>
#include <pacer/optimizers/detail/step_early_look.h>
#include <pacer/optimizers/detail/step_plan.h>
#include <pacer/optimizers/detail/step_release.h>
#include <pacer/optimizers/detail/visible_rows.h>

namespace pacer::detail {

class StepEngine {
 public:
  explicit StepEngine(const OptimizerTraits& traits) : plan_(traits) {}

  // Only these elements of the parameter, in memory order, are updated and have state. Its state, if there is
  // any, is of the range already.
  void update_only(const at::Tensor& parameter, ParameterRange range) {
    plan_.update_only(parameter, std::move(range));
    forget_plan();
  }
  const ParameterRanges& ranges() const { return plan_.ranges(); }
  // These ranks update the other ranges: the norm is that of all gradients, to the bit. Null: there are none.
  void share_norm_with(std::shared_ptr<Communicator> ranks) {
    plan_.share_norm_with(std::move(ranks));
    forget_plan();
  }

  // From now on state is paged, on devices that `make` makes.
  void page(const Paging& paging, StepPlan::MakePageDevice make = make_page_device) {
    plan_.page(paging, std::move(make));
    forget_plan();
  }
  bool is_paged() const { return plan_.is_paged(); }
  // See FusedOptimizer::set_visible_rows.
  void set_visible_rows(const at::Tensor& parameter, const at::Tensor& visible) {
    visible_rows_.set(parameter, visible);
  }
  bool has_visible_rows() const { return visible_rows_.has_masks(); }
  // Where parameters and their state have grown.
  RowRoom& row_room() { return row_room_; }
  // See FusedOptimizer::sync_state and FusedOptimizer::resident_state_bytes.
  void sync_state() {
    if (plan_.pager) plan_.pager->bring_home();
  }
  int64_t resident_state_bytes() const { return plan_.pager ? plan_.pager->resident_bytes() : 0; }
  // See SessionOptimizer::expect_step.
  void expect_step();

  // Checks, plans, creates missing state and sends what changed: every parameter that has a gradient will be
  // updated. `settings` are those of the groups.
  void prepare(const ParamGroups& groups, std::vector<GroupSettings> settings, ParamStates& states,
               const TensorNames& names, const StepInputs& inputs);
  // Kernels only. False where the host saw gradients that are not finite.
  bool enqueue();
  void conclude(bool applied);
  // See SessionOptimizer. The arguments of begin_release live until end_release.
  void begin_release(const ParamGroups& groups, std::vector<GroupSettings> settings, ParamStates& states,
                     const TensorNames& names, const StepInputs& inputs);
  void release(const at::Tensor& parameter, ReleasedParameters& released) {
    release_.arrive(*this, parameter, released);
  }
  void end_release(bool has_failed, ReleasedParameters& released) {
    release_.end(*this, has_failed, released);
  }
  // See SessionOptimizer::look_early. Fills the partial sums of these parameters, so that enqueue() only has
  // to fold.
  bool look_early(const std::vector<at::Tensor>& parameters) { return early_look_.look(plan_, parameters); }

  // States were replaced: nothing that the plan holds is valid any more.
  void forget_plan();

  // Makes a plan in which every parameter of a compressed group has state, whether it had a gradient or not.
  void complete_compressed(const ParamGroups& groups, std::vector<GroupSettings> settings,
                           ParamStates& states, const TensorNames& names);
  // Whether the plan fits the step to come, as far as that is known before its gradients are. The
  // CompressedParameters may then take up tensors as their gradients come: of those numbered [first, end)
  // prepare_ahead gives them the gradients, and returns the scalars of the coming step, by step group. Null
  // where these have to be planned anew. `local_weight` as theirs in that step.
  bool plan_fits_next_step(const ParamGroups& groups, std::vector<GroupSettings> settings,
                           const ParamStates& states);
  const kernels::StepScalars* prepare_ahead(double average, double local_weight, size_t first, size_t end);
  // From the next step on compressed entries belong to these; null: tables update all.
  void compress_with(std::unique_ptr<CompressedParameters> parameters) {
    plan_.compressed_parameters = std::move(parameters);
    forget_plan();
  }
  CompressedParameters* compressed_parameters() const { return plan_.compressed_parameters.get(); }
  // From the next step on ranks make the directions of all matrices together; null: each by itself.
  void exchange_directions(std::unique_ptr<DirectionExchange> directions) {
    plan_.directions = std::move(directions);
    forget_plan();
  }
  DirectionExchange* directions() const { return plan_.directions.get(); }
  // From the next step on each of these ranks makes its part of the products of matrices; null: all of them.
  void share_products(std::unique_ptr<ProductShare> products) {
    plan_.products = std::move(products);
    forget_plan();
  }
  ProductShare* products() const { return plan_.products.get(); }
  // The L1 norm of the bias-corrected variance of all compressed entries, added up in their order. Waits for
  // a GPU.
  double compressed_variance_norm() const { return plan_.compressed_variance_norm(); }

  // Counts the changes after which a captured enqueue() is out of date.
  int64_t enqueue_version() const { return enqueue_version_; }
  int64_t skipped_steps() const;
  // Returns LAMB's trust ratio of the parameter's last update; 1 for other rules, before the first update,
  // and once the parameter is compressed.
  double trust_ratio(const at::Tensor& parameter) const;

 private:
  friend class StepRelease;

  void prepare_step(const ParamGroups& groups, ParamStates& states, const TensorNames& names,
                    const StepInputs& inputs);
  void make_plan(const ParamGroups& groups, ParamStates& states, const TensorNames& names,
                 bool with_compressed);
  void choose_guard(const StepInputs& inputs);
  bool gradients_are_finite();
  void count_states(const std::vector<char>& which);
  // The scalars of the step, and what matrices need of it.
  const kernels::StepScalars* begin_update(const kernels::GradientCheck* check, bool has_matrices);
  template <class Which>
  int64_t add_squares(int64_t offset, const Which& which);

  StepPlan plan_;
  EarlyLook early_look_;
  VisibleRows visible_rows_;
  RowRoom row_room_;
  StepRelease release_;
  DeviceBuffer<kernels::StepScalars> ahead_;  // the scalars of the step to come, by step group
  std::shared_ptr<GradientGuard> own_guard_;  // for finite_check without a Session
  std::shared_ptr<GradientGuard> guard_;      // of this step
  double average_ = 1;
  int64_t enqueue_version_ = 0;
};

}  // namespace pacer::detail
