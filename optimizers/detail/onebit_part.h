// The compressed entries of a 1-bit optimizer once the variance is frozen: their momentum, frozen variance
// and floors in flat buffers, the exchange of their momentum, and what it does to the parameters. The
// AdamEngine calls it in each step, as it calls its tables; the OneBitOptimizer says before which kind of
// step comes. On a GPU a step is only enqueued, and does nothing where the check says that gradients are not
// finite.
//
// Flat buffers hold elements in the order of the parameters' memory, and ranks agree on places in them. So
// dtype, shape and memory order of a compressed parameter are fixed from the freeze on; its address is not.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <pacer/compression/detail/onebit_exchange.h>
#include <pacer/kernels/onebit_adam.h>
#include <pacer/optimizers/detail/adam_entry.h>
#include <pacer/optimizers/detail/onebit_lamb_stages.h>
#include <pacer/optimizers/detail/onebit_plan.h>
#include <pacer/optimizers/detail/onebit_stages.h>
#include <pacer/optimizers/gradient_guard.h>
#include <pacer/optimizers/named_tensors.h>

namespace pacer::detail {

class OneBitPart {
 public:
  // `exchange` is null where nothing is compressed. `sharers` as for OneBitStages: norms, floors, scales of
  // momentum and factors are those of whole tensors.
  OneBitPart(std::vector<OneBitTensor> tensors, std::unique_ptr<OneBitExchange> exchange,
             double variance_floor, kernels::UpdateRule rule, at::Device device,
             const std::shared_ptr<Communicator>& sharers = nullptr);
  OneBitPart(const OneBitPart&) = delete;  // the stages refer to its tensors

  // From the states of the tensors, which have both moments. The variance becomes bias-corrected, by what
  // each one's own steps and settings say; then those that never took a step get the step count of their
  // group. False, changing nothing, where all of the variance is zero. Waits for a GPU.
  bool freeze(const OneBitStates& states, const std::vector<AdamGroupSettings>& settings);
  // Goes on from states whose variance is frozen already, from this rank's errors (names as export_errors
  // writes them, none for zeros) in a state of that version, and from what only the rule has. Throws
  // InvalidArgument for what does not fit; then the part is of no use. Else set_floors() comes before a step.
  void go_on(const OneBitStates& states, const NamedTensors& errors, int64_t errors_version,
             const NamedTensors& of_rule);

  // From the frozen variance. Sharers call together.
  void set_floors();

  bool compresses() const { return exchange_ != nullptr; }
  OneBitExchange& exchange() const { return *exchange_; }

  // ---- One step: begin (the optimizer), then the rest (the engine), in this order. ----

  // `local_weight` as in StepInputs, `attempt` counts steps, a refresh comes every so many (0: never).
  struct Step {
    OneBitKind kind = OneBitKind::dense;
    double local_weight = 1;
    int64_t attempt = 0;
    int64_t refresh_every = 0;
  };
  // Throws Error where an exchange failed before.
  void begin(const Step& step);
  // What stored gradients of this rank must be multiplied with besides the average.
  double local_weight() const { return step_.kind == OneBitKind::compressed ? step_.local_weight : 1; }

  // Throws InvalidArgument, in one sentence, where entries are no longer what the flat buffers were made of.
  void check_fits(const std::vector<const AdamEntry*>& entries) const;
  // The entry with its place among the tensors, and its gradient in this step, null for none.
  void set_tensor(const AdamEntry& entry, const void* gradient, const AdamGroupSettings& settings);
  // Sends what changed.
  void prepare(const std::vector<AdamGroupSettings>& settings);
  // The guard looks at all stored gradients as if those of the workers, whose noise does not cancel, had been
  // added. `averaged`: partial sums of squares of all others, on the device.
  void look(GradientGuard& guard, const double* averaged, int64_t count);
  void step(const kernels::StepScalars* scalars, const kernels::GradientCheck* check);

  // ---- What others want to know. ----

  // Of what this rank rounded in the last exchange: what was lost, relative to that; 0 before.
  double compression_error() const;
  // The momentum in fp32, as "NAME/exp_avg", and what only the rule has.
  void export_shared(NamedTensors& state) const;
  // Of an exchange "NAME/worker_error" in the parameter's shape, and "NAME/server_error" for what this rank
  // serves of it, in memory order, which "NAME/strides" tells where it is not row-major. Without one nothing,
  // or after errors were joined and until the next step "NAME/momentum_error".
  void export_errors(NamedTensors& state) const;
  // By the name of a tensor; 1 where there is none.
  double lamb_factor(const std::string& name) const;
  double momentum_scale(const std::string& name) const;
  // Said once, at the freeze: how much of the variance lies below its floor, and where most. Sharers call
  // together.
  std::string describe_floors() const;
  // The tensors' names from now on, in their order.
  void rename(const std::vector<std::string>& names);

 private:
  at::Tensor view(const at::Tensor& flat, size_t tensor) const;
  at::Tensor flat_zeros() const;
  void set_floors(const kernels::OneBitControl& control);
  kernels::OneBitAdamWork work(const kernels::StepScalars* scalars) const;
  kernels::OneBitControl control(const kernels::GradientCheck* check) const;
  void exchange_step(const kernels::StepScalars* scalars, const kernels::GradientCheck* check);
  void dense_step(const kernels::StepScalars* scalars, const kernels::GradientCheck* check);
  void update(const kernels::StepScalars* scalars, const at::Tensor& dense_before, bool dense,
              const kernels::OneBitControl& control);
  at::Tensor sums_of_workers(const at::Tensor& own) const;
  // The number that belongs to the tensor of that name; 1 where there is none.
  double number_of(const std::string& name, const at::Tensor& of_tensors) const;
  void add_momentum_error(const kernels::GradientCheck* check);
  at::Tensor momentum() const;
  // The errors under the names by which they are saved: views of a flat buffer, which without an exchange is
  // the momentum error's, and of the part that this rank serves.
  NamedViews error_views(const at::Tensor& worker, const at::Tensor& server) const;
  void load_errors(const NamedTensors& errors, int64_t version);

  std::vector<OneBitTensor> tensors_;
  std::unique_ptr<OneBitExchange> exchange_;
  std::shared_ptr<Communicator> sharers_;
  double variance_floor_;
  at::Device device_;
  kernels::OneBitLayout layout_;
  OneBitStages stages_;
  std::optional<OneBitLambStages> lamb_;
  Step step_;
  at::Tensor variance_;        // fp32, flat
  at::Tensor floors_, total_;  // fp32, one for each tensor; fp64, the sum of all variance
  at::Tensor sums_;            // fp64: sums of squares of own gradients, of averaged ones, and the joint one
  // fp32, flat. Undefined: the momentum is what the exchange received. On CUDA its status says which of the
  // two it is while this is defined.
  at::Tensor momentum_;
  // fp32, flat: of a former exchange, for the next step; undefined where there is none.
  at::Tensor momentum_error_;
};

}  // namespace pacer::detail
