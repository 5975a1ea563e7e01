// A bucket of a 1-bit optimizer's compressed entries (compressed_parameters.h): their momentum, frozen
// variance and floors in flat buffers, the exchange of their momentum, and what it does to the parameters. On
// a GPU a step is only enqueued, and does nothing where the check says that gradients are not finite.
//
// Flat buffers hold elements in the order of the parameters' memory, and ranks agree on places in them.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <pacer/compression/detail/onebit_exchange.h>
#include <pacer/kernels/onebit_adam.h>
#include <pacer/optimizers/detail/onebit_kernels.h>
#include <pacer/optimizers/detail/onebit_lamb_kernels.h>
#include <pacer/optimizers/detail/onebit_settings.h>
#include <pacer/optimizers/detail/parameter_entry.h>
#include <pacer/optimizers/named_tensors.h>

namespace pacer::detail {

class OneBitBucket {
 public:
  // `exchange` is null where nothing is compressed. `shard_ranks` as for OneBitKernels: norms, floors, scales
  // of momentum and factors are those of whole tensors.
  OneBitBucket(std::vector<OneBitTensor> tensors, std::unique_ptr<OneBitExchange> exchange,
               double variance_floor, kernels::UpdateRule rule, at::Device device,
               const std::shared_ptr<Communicator>& shard_ranks = nullptr);
  OneBitBucket(const OneBitBucket&) = delete;  // kernels_ and lamb_ refer to its tensors

  const std::vector<OneBitTensor>& tensors() const { return tensors_; }
  at::Tensor variance_of(size_t tensor) const { return view(variance_, tensor); }
  OneBitExchange* exchange() const { return exchange_.get(); }

  // ---- The freeze, in this order, and set_floors() between. ----

  // The variance becomes bias-corrected, by what the own steps and settings of each state say.
  void take_moments(const OneBitStates& states, const std::vector<GroupSettings>& settings);
  // The states give their moments away.
  void take_over(const OneBitStates& states, const std::vector<GroupSettings>& settings);

  // Does what CompressedParameters::go_on does, for these tensors.
  void go_on(const OneBitStates& states, const NamedTensors& errors, int64_t errors_version,
             const NamedTensors& of_rule);

  // Computes the floors from the variance. All shard ranks call it together.
  void set_floors(const kernels::GradientCheck* check);
  // On the device, as set_floors() has left it; and of how many elements.
  const at::Tensor& sum_of_variance() const { return total_; }
  int64_t elements() const { return kernels_.elements(); }
  // Tensors without any variance get the floor of this mean (fp64, one number) in place of the bucket's.
  void raise_floors(const at::Tensor& mean_variance);

  // ---- A step. ----

  // `attempt` and `refresh_every` as in CompressedParameters::Step.
  void begin(int64_t attempt, int64_t refresh_every);
  void set_tensor(size_t i, const ParameterEntry& entry, const void* gradient, const GroupSettings& settings);
  // Sends what set_tensor changed.
  void send() { kernels_.send(); }
  // The same, and what the rule needs.
  void prepare(const std::vector<GroupSettings>& settings);
  // *sum (on the device) = that of all stored gradients.
  void sum_of_squares(double* sum) { kernels_.sum_of_squares(sum); }

  // A compressed step, in the parts of the exchange. Gradients are multiplied with `factor` (fp64, one number
  // on the device), and where it is undefined with that of the scalars.
  void start(const kernels::StepScalars* scalars, const kernels::GradientCheck* check,
             const at::Tensor& factor);
  bool can_serve() const { return exchange_->can_serve(); }
  void serve() { exchange_->serve(); }
  void finish(const kernels::StepScalars* scalars, const kernels::GradientCheck* check);
  // A step whose gradients are the mean over ranks already. With `refresh` set_floors() comes between.
  void take_gradients(const kernels::StepScalars* scalars, const kernels::GradientCheck* check, bool refresh);
  void update_dense(const kernels::StepScalars* scalars, const kernels::GradientCheck* check);

  // ---- What others want to know, as CompressedParameters say. ----

  // Sums of squares: of what rounding lost, and of what was rounded.
  std::pair<double, double> lost_and_sent() const;
  void export_shared(NamedTensors& state) const;
  void export_errors(NamedTensors& state) const;
  bool has(const std::string& name) const;
  double lamb_factor(const std::string& name) const;
  double momentum_scale(const std::string& name) const;
  // Returns, on the device, how many elements of tensor i have less variance than its floor.
  at::Tensor floored(size_t i) const;
  void rename(size_t i, const std::string& name) { tensors_[i].name = name; }

 private:
  at::Tensor view(const at::Tensor& flat, size_t tensor) const;
  at::Tensor flat_zeros() const;
  kernels::OneBitAdamWork work(const kernels::StepScalars* scalars) const;
  kernels::OneBitControl control(const kernels::GradientCheck* check) const;
  const kernels::StepScalars* with_factor(const kernels::StepScalars* scalars, const at::Tensor& factor);
  void update(const kernels::StepScalars* scalars, const at::Tensor& dense_before, bool dense,
              const kernels::OneBitControl& control);
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
  double variance_floor_;
  at::Device device_;
  kernels::OneBitLayout layout_;
  OneBitKernels kernels_;
  std::optional<OneBitLambKernels> lamb_;
  int64_t attempt_ = 0;
  int64_t refresh_every_ = 0;
  at::Tensor variance_;  // fp32, flat
  at::Tensor floors_;    // fp32, as frozen_bounds has them
  at::Tensor total_;     // fp64, the sum of all variance
  // fp32, flat. Undefined: the momentum is what the exchange received. On CUDA its status says which of the
  // two it is while this is defined.
  at::Tensor momentum_;
  at::Tensor dense_before_;  // between the parts of a dense step of LAMB: the momentum before
  // fp32, flat: of a former exchange, for the next step; undefined where there is none.
  at::Tensor momentum_error_;
  // Bytes, (step groups, a StepScalars): those of a step, with a factor of the bucket's own.
  at::Tensor own_scalars_;
};

}  // namespace pacer::detail
