// The compressed parameters of a OneBitAdam after the freeze: their momentum, frozen variance and floors in
// flat buffers, the exchange of their momentum, and the steps they take. Who owns it decides when, and with
// which factor.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <pacer/collectives/detail/onebit_exchange.h>
#include <pacer/kernels/onebit_adam.h>
#include <pacer/optimizers/detail/adam_entry.h>
#include <pacer/optimizers/detail/onebit_flavour.h>
#include <pacer/optimizers/named_tensors.h>

namespace pacer::detail {

class OneBitAdamEngine {
 public:
  // Every entry has its state: moments, and master copy or remainder where its dtype needs one. `exchange` is
  // null where nothing is compressed.
  OneBitAdamEngine(std::vector<AdamEntry> entries, std::unique_ptr<OneBitExchange> exchange,
                   double variance_floor);

  // The variance becomes bias-corrected, by what each entry's own steps and settings say. False, changing
  // nothing, where all of it is zero.
  bool freeze(const std::vector<AdamGroupSettings>& settings);
  // Goes on from a variance that is frozen already, and from this rank's errors (names as export_errors
  // writes them, none for zeros).
  void go_on(const NamedTensors& errors);
  // Throws InvalidArgument for what go_on could not take, changing nothing.
  void check_errors(const NamedTensors& errors) const;

  bool compresses() const { return exchange_ != nullptr; }
  OneBitExchange& exchange() const { return *exchange_; }

  // ---- One step: prepare, then the sum of squares if anybody asks, then one of the two. ----

  // Finds the gradients. Throws before anything is changed where parameters or gradients do not fit any more.
  void prepare(const std::vector<AdamGroupSettings>& settings);
  // Of the stored gradients.
  double sum_of_squares();
  // Gradients are multiplied with `factor` first. The momentum travels as signs. `step` counts attempts.
  void exchange_step(double factor, int64_t step);
  // Gradients are the mean over ranks already. Where `refresh_after` is set the variance takes them in, too:
  // that many steps after it last did.
  void dense_step(double factor, std::optional<int64_t> refresh_after);

  // Of this rank's part of the last exchange: what was lost, relative to what was to be sent; 0 before.
  double compression_error() const;

  // The momentum in fp32, as "NAME/exp_avg".
  void export_momentum(NamedTensors& state) const;
  // Of an exchange "NAME/worker_error" in the parameter's shape, and "NAME/server_error" for what this rank
  // serves of it. Without one nothing, or after errors were joined and until the next step
  // "NAME/momentum_error".
  void export_errors(NamedTensors& state) const;

  // Said once, at the freeze: how much of the variance lies below its floor, and where most.
  std::string describe_floors() const;

 private:
  at::Tensor view(const at::Tensor& flat, size_t entry) const;
  bool set_floors();
  void set_scalars(double factor);
  kernels::OneBitAdamWork work() const;
  void for_units(const std::function<void(int64_t)>& f) const;
  void update();
  // Where the served elements of an entry begin in the exchange's server errors, and which they are.
  int64_t served_offset(size_t i, const kernels::OneBitLayout::Part& part) const;
  kernels::OneBitLayout::Part served_part(size_t i) const;

  std::vector<AdamEntry> entries_;
  std::vector<AdamGroupSettings> settings_;
  std::unique_ptr<OneBitExchange> exchange_;
  double variance_floor_;
  kernels::OneBitLayout layout_;
  kernels::OneBitRows rows_;
  std::vector<Tile> units_;  // of the gradients' sums of squares, entry by entry
  std::vector<kernels::OneBitAdamTensor> tensors_;
  at::Tensor variance_;  // fp32, flat
  at::Tensor momentum_;  // fp32, flat; undefined while it is what the exchange received
  at::Tensor
      momentum_error_;  // fp32, flat: of a former exchange, for the next step; undefined where there is none
};

}  // namespace pacer::detail
