// What happens to gradients between their hooks and their sums: the state that a GradientBucketer shares with
// the hooks on its parameters. Nobody else sees it, so all of it is public.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <pacer/collectives/detail/arrival_order.h>
#include <pacer/collectives/detail/gradient_buckets.h>
#include <pacer/collectives/detail/withheld_gradients.h>
#include <pacer/collectives/gradient_bucketer.h>

namespace pacer {

class GradientBucketer::State : public std::enable_shared_from_this<State> {
 public:
  State(std::shared_ptr<Communicator> world, const BucketOptions& options)
      : world_(std::move(world)), options_(options), withheld_(options.touch_remedy()) {}

  void add(const std::vector<NamedParameter>& parameters, const std::vector<at::Tensor>& may_stay_local);
  void begin(const std::vector<at::Tensor>& zero, const std::vector<at::Tensor>& done);
  int64_t bytes_of(const detail::Bucket& bucket) const;

  void build(const std::vector<size_t>& order);
  void learn_order();
  void finish_window(bool tells_arrivals);
  void settle_dropped();
  void renew_memory();
  size_t position_of(const at::Tensor& parameter) const;
  GradientScope scope_of(size_t position) const {
    return parameters_[position].may_stay_local ? scope_ : GradientScope::world;
  }
  bool stays_local(size_t position) const { return scope_of(position) == GradientScope::rank; }
  void arrive(size_t position);  // from the hooks
  void check_dense(size_t position) const;
  void put_in_place(const std::vector<size_t>& positions);
  void set_zero(size_t position);
  void send_full_buckets();
  void send_the_rest();
  void tell_missed();
  void learn_missed();
  void send(size_t bucket);
  void tell_arrival(const detail::Bucket& bucket);
  Work send_flat(detail::Bucket& bucket);
  Work send_in_place(const detail::Bucket& bucket);
  std::optional<at::ScalarType> wire_dtype_of(const detail::Bucket& bucket) const;

  const std::shared_ptr<Communicator> world_;
  const BucketOptions options_;
  std::vector<detail::BucketedParameter> parameters_;
  std::unordered_map<const void*, size_t> positions_;
  std::vector<detail::Bucket> buckets_;
  std::vector<size_t> order_;           // in which they fill
  detail::WithheldGradients withheld_;  // from end() to wait(), numbered as parameters_
  double prescale_ = 1;
  Arrived on_arrival_;

  std::mutex mutex_;  // hooks run on autograd's threads
  bool active_ = false;
  bool was_dropped_ = false;                    // the window before; what it sent may still be under way
  bool memory_is_lent_ = false;                 // to that, so that the next gradients need another one
  GradientScope scope_ = GradientScope::world;  // of those that may stay local
  bool order_is_learned_ = false;
  bool order_shows_ = false;        // all ranks see this window's order, undisturbed by dropped layers
  std::vector<size_t> arrivals_;    // in this window
  detail::ArrivalOrder gradients_;  // of the window under way; absent: zero on every rank
  std::vector<char> is_missed_;     // by parameter: no backward of the window reached it on this rank, and
                                    // once learn_missed() was called on any
  at::Tensor missed_here_, missed_everywhere_;  // uint8 [parameters], [ranks, parameters]; while they travel
  Work missed_work_;
  std::vector<Work> works_;  // by bucket
  int64_t sent_ = 0, sent_early_ = 0;
};

}  // namespace pacer
