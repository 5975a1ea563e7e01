// A bucket of a 1-bit optimizer's compressed entries (compressed_parameters.h): their momentum, frozen
// variance and floors in flat buffers, the exchange of their momentum, and what it does to the parameters. On
// a GPU a step is only enqueued, and does nothing where the check says that gradients are not finite.
//
// The step is in onebit_bucket.cpp, tables on a GPU and floors are in onebit_bucket_floors.cpp, and the freeze
// and what is saved in onebit_bucket_state.cpp.
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
#include <pacer/device/detail/device_buffer.h>
#include <pacer/kernels/onebit_adam.h>
#include <pacer/optimizers/detail/named_views.h>
#include <pacer/optimizers/detail/onebit_lamb_kernels.h>
#include <pacer/optimizers/detail/onebit_settings.h>
#include <pacer/optimizers/detail/parameter_entry.h>
#include <pacer/optimizers/detail/shared_sums.h>
#include <pacer/optimizers/named_tensors.h>

namespace pacer::detail {

class OneBitBucket {
 public:
  // `shard_ranks`: the ranks that have the other parts of the tensors; null where these are whole. Norms, floors,
  // scales of momentum and factors are then those of whole tensors, for which all of them call alike.
  OneBitBucket(std::vector<OneBitTensor> tensors, const OneBitSetup& setup,
               const std::shared_ptr<Communicator>& shard_ranks);
  OneBitBucket(const OneBitBucket&) = delete;  // lamb_ refers to its tensors

  const std::vector<OneBitTensor>& tensors() const { return tensors_; }
  at::Tensor variance_of(size_t tensor) const { return view(variance_, tensor); }
  // Null where nothing is exchanged.
  OneBitExchange* exchange() const { return exchange_.get(); }

  // ---- The freeze, in this order, and set_floors() between. ----

  // The variance becomes bias-corrected, by what the own steps and settings of each state say.
  void take_moments(const OneBitStates& states, const std::vector<GroupSettings>& settings);
  // The states give their moments away.
  void take_over(const OneBitStates& states, const std::vector<GroupSettings>& settings);

  // Does what CompressedParameters::go_on does, for these tensors, and takes out what it has loaded.
  void go_on(const OneBitStates& states, NamedTensors& errors, int64_t errors_version, NamedTensors& of_rule);

  // Computes the floors from the variance. All shard ranks call it together.
  void set_floors(const kernels::GradientCheck* check);
  // On the device, as set_floors() has left it; and of how many elements, of whole tensors if ranks have parts.
  const at::Tensor& sum_of_variance() const { return total_; }
  int64_t elements() const;
  // Tensors without any variance get the floor of this mean (fp64, one number) in place of the bucket's.
  void raise_floors(const at::Tensor& mean_variance);

  // ---- A step. ----

  // `attempt` and `refresh_every` as in CompressedParameters::Step.
  void begin(int64_t attempt, int64_t refresh_every);
  void set_tensor(size_t i, const ParameterEntry& entry, const void* gradient, const GroupSettings& settings);
  // Sends what set_tensor changed.
  void send();
  // The same, and what the rule needs.
  void prepare(const std::vector<GroupSettings>& settings);
  // *sum (on the device) = that of all stored gradients.
  void sum_of_squares(double* sum);

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

  // ---- What others want to know. ----

  // Sums of squares: of what rounding lost, and of what was rounded.
  std::pair<double, double> lost_and_sent() const;
  // The momentum in fp32, as "NAME/exp_avg", and what only the rule has.
  void export_shared(NamedTensors& state) const;
  // If there is an exchange, writes "NAME/worker_error" in the parameter's shape, and "NAME/server_error" for
  // what this rank serves of it, in memory order, which "NAME/strides" tells if it is not row-major. Without
  // one it writes nothing, or after errors were joined and until the next step "NAME/momentum_error".
  void export_errors(NamedTensors& state) const;
  OneBitLambKernels::Numbers lamb_numbers(size_t tensor) const {
    return lamb_ ? lamb_->numbers_of(tensor) : OneBitLambKernels::Numbers();
  }
  // Returns, on the device, how many elements of tensor i have less variance than its floor.
  at::Tensor floored(size_t i) const;
  void rename(size_t i, const std::string& name) { tensors_[i].name = name; }

 private:
  at::Tensor view(const at::Tensor& flat, size_t tensor) const;
  at::Tensor flat_zeros() const;
  // What the kernels read; its pointers are those of now.
  kernels::OneBitAdamRows rows(const kernels::StepScalars* scalars) const;
  kernels::OneBitControl control(const kernels::GradientCheck* check) const;
  template <class F>
  void for_units(const F& f) const;
  int64_t step_groups() const;
  const kernels::StepScalars* with_factor(const kernels::StepScalars* scalars, const at::Tensor& factor);
  void update(const kernels::StepScalars* scalars, const at::Tensor& dense_before, bool dense,
              const kernels::OneBitControl& control);
  void make_tables();
  at::Tensor all_partials() const;
  void set_floors_on_cpu();
  void add_momentum_error(const kernels::GradientCheck* check);
  at::Tensor momentum() const;
  // The errors under the names by which they are saved: views of a flat buffer, which without an exchange is
  // the momentum error's, and of the part that this rank serves.
  NamedViews error_views(const at::Tensor& worker, const at::Tensor& server) const;
  void load_errors(NamedTensors& errors, int64_t version);

  std::vector<OneBitTensor> tensors_;
  std::unique_ptr<OneBitExchange> exchange_;
  double variance_floor_;
  at::Device device_;
  kernels::OneBitLayout layout_;
  kernels::OneBitRows rows_;
  std::optional<OneBitLambKernels> lamb_;
  int64_t attempt_ = 0;
  int64_t refresh_every_ = 0;
  at::Tensor variance_;  // fp32, flat
  at::Tensor floors_;    // fp32, as frozen_bounds has them
  at::Tensor total_;     // fp64, the sum of all variance
  at::Tensor sums_;      // fp64, that of each tensor, as set_floors has left it
  // fp32, flat. Undefined: the momentum is what the exchange received. On CUDA its status says which of the
  // two it is while this is defined.
  at::Tensor momentum_;
  at::Tensor dense_before_;  // between the parts of a dense step of LAMB: the momentum before
  // fp32, flat: of a former exchange, for the next step; undefined where there is none.
  at::Tensor momentum_error_;
  // Bytes, (step groups, a StepScalars): those of a step, with a factor of the bucket's own.
  at::Tensor own_scalars_;

  DeviceBuffer<kernels::OneBitAdamTensor> arguments_;  // by tensor: what kernels read of it
  std::vector<Tile> units_;                            // in which sums are taken, tensor by tensor
  at::Tensor partials_;                                // fp64, by unit
  std::unique_ptr<SharedUnits> shared_units_;          // null where tensors are whole
  // On CUDA: the dtype sets, and for sums the gradients, the variance and all units.
  std::vector<OneBitTable> tables_;
  DeviceBuffer<kernels::AdamGradient> gradients_, variances_;
  DeviceBuffer<Tile> all_units_;
  DeviceBuffer<TileRange> units_of_;
  DeviceBuffer<int64_t> counts_;
};

}  // namespace pacer::detail
