// The compressed parameters of a 1-bit optimizer after the freeze: their momentum, frozen variance and floors
// in flat buffers, the exchange of their momentum, and the steps they take. Who owns it decides when, and
// with which factor. On a GPU a step is only enqueued, and does nothing where the check says that gradients
// are not finite.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <pacer/collectives/detail/onebit_exchange.h>
#include <pacer/kernels/onebit_adam.h>
#include <pacer/optimizers/detail/adam_entry.h>
#include <pacer/optimizers/detail/adam_slots.h>
#include <pacer/optimizers/detail/onebit_flavour.h>
#include <pacer/optimizers/detail/onebit_lamb_stages.h>
#include <pacer/optimizers/detail/onebit_stages.h>
#include <pacer/optimizers/named_tensors.h>

namespace pacer::detail {

class OneBitEngine {
 public:
  // Every entry has its state: moments, and master copy or remainder where its dtype needs one. `exchange` is
  // null where nothing is compressed.
  OneBitEngine(std::vector<AdamEntry> entries, std::unique_ptr<OneBitExchange> exchange,
               double variance_floor, kernels::UpdateRule rule, at::Device device);

  // The variance becomes bias-corrected, by what each entry's own steps and settings say. False, changing
  // nothing, where all of it is zero. Waits for a GPU.
  bool freeze(const std::vector<AdamGroupSettings>& settings);
  // Goes on from a variance that is frozen already, from this rank's errors (names as export_errors writes
  // them, none for zeros), and from what only the rule has.
  void go_on(const NamedTensors& errors, const NamedTensors& of_rule);
  // Throws InvalidArgument for what go_on could not take, changing nothing.
  void check_errors(const NamedTensors& errors) const;
  void check_rule_state(const NamedTensors& of_rule) const;

  bool compresses() const { return exchange_ != nullptr; }
  OneBitExchange& exchange() const { return *exchange_; }

  // ---- One step: prepare, then the sum of squares if anybody asks, then one of the two. ----

  // Finds the gradients. A refresh takes place every so many steps, 0 for never. Throws before anything is
  // changed where parameters or gradients do not fit any more.
  void prepare(const std::vector<AdamGroupSettings>& settings, int64_t refresh_every);
  // *sum (on the device) = that of all stored gradients.
  void sum_of_squares(double* sum) { stages_.sum_of_squares(sum); }
  // The momentum travels as signs. Gradients are multiplied with the check's factor and `weight` first.
  // `step` counts attempts.
  void exchange_step(const kernels::GradientCheck* check, double weight, int64_t step);
  // Gradients are the mean over ranks already. With `refresh` the variance takes them in, too.
  void dense_step(const kernels::GradientCheck* check, bool refresh);

  // Of this rank's part of the last exchange: what was lost, relative to what was to be sent; 0 before.
  double compression_error() const;

  // The momentum in fp32, as "NAME/exp_avg", and what only the rule has.
  void export_shared(NamedTensors& state) const;
  // Of an exchange "NAME/worker_error" in the parameter's shape, and "NAME/server_error" for what this rank
  // serves of it. Without one nothing, or after errors were joined and until the next step
  // "NAME/momentum_error".
  void export_errors(NamedTensors& state) const;

  // LAMB, of one of the entries; 1 for any other tensor.
  double lamb_factor(const at::Tensor& parameter) const;
  double momentum_scale(const at::Tensor& parameter) const;

  // Said once, at the freeze: how much of the variance lies below its floor, and where most.
  std::string describe_floors() const;

 private:
  at::Tensor view(const at::Tensor& flat, size_t entry) const;
  at::Tensor flat_zeros() const;
  void set_floors(const kernels::OneBitControl& control);
  kernels::OneBitAdamTensor describe(AdamEntry& entry);
  kernels::OneBitAdamWork work(const void* scalars) const;
  kernels::OneBitControl control(const kernels::GradientCheck* check) const;
  const kernels::GradientCheck* weigh(const kernels::GradientCheck* check, double weight);
  void update(const void* scalars, const at::Tensor& dense_before, bool dense,
              const kernels::OneBitControl& control);
  void conclude();
  std::optional<size_t> find(const at::Tensor& parameter) const;
  void add_momentum_error(const kernels::GradientCheck* check);
  at::Tensor momentum() const;
  // Where the served elements of an entry begin in the exchange's server errors, and which they are.
  int64_t served_offset(size_t i, const kernels::OneBitLayout::Part& part) const;
  kernels::OneBitLayout::Part served_part(size_t i) const;

  std::vector<AdamEntry> entries_;
  std::vector<AdamGroupSettings> settings_;
  std::unique_ptr<OneBitExchange> exchange_;
  double variance_floor_;
  at::Device device_;
  kernels::OneBitLayout layout_;
  OneBitStages stages_;
  std::optional<OneBitLambStages> lamb_;
  AdamSlots slots_;
  at::Tensor variance_;        // fp32, flat
  at::Tensor floors_, total_;  // fp32, one for each entry; fp64, the sum of all variance
  at::Tensor weighed_;         // bytes: a GradientCheck
  // fp32, flat. Undefined: the momentum is what the exchange received. On CUDA its status says which of the
  // two it is while this is defined.
  at::Tensor momentum_;
  // fp32, flat: of a former exchange, for the next step; undefined where there is none.
  at::Tensor momentum_error_;
};

}  // namespace pacer::detail
