// Which buckets of a compressed step have all their gradients while backward runs: hooks on the parameters
// count, and buckets start as soon as they are full and all before them have started, so that every rank
// starts them in one order, whatever the order of its gradients.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <pacer/collectives/detail/arrival_order.h>
#include <pacer/device/detail/seen_tensor.h>

namespace pacer::detail {

class OneBitOverlap : public std::enable_shared_from_this<OneBitOverlap> {
 public:
  // A parameter, its name, and the turn at which its bucket starts.
  struct Entry {
    std::string name;
    at::Tensor parameter;
    size_t turn;
    SeenTensor gradient = {};  // when its bucket started
  };
  // Both are called on autograd's threads, one at a time. start: the bucket of that turn; false where it
  // cannot start before the step does. progress: after every gradient, once a bucket has started.
  struct Calls {
    std::function<bool(size_t turn)> start;
    std::function<void()> progress;
  };

  // The hooks stay on the parameters as long as it lives.
  static std::shared_ptr<OneBitOverlap> on(std::vector<Entry> entries, Calls calls);
  OneBitOverlap(std::vector<Entry> entries, Calls calls);
  ~OneBitOverlap();

  // The next backward is the last before a step.
  void begin();
  // It is over, and the step begins. Returns how many buckets have started, which then count no more.
  size_t end();
  // Whether any bucket has started since begin().
  bool has_started() const;
  // Throws InvalidArgument that names the parameter where a gradient is no longer what its bucket started
  // with.
  void check_unchanged() const;

 private:
  void arrive(size_t entry);
  void remember(size_t turn);

  std::vector<Entry> entries_;
  Calls calls_;
  mutable std::mutex mutex_;
  bool is_counting_ = false;
  ArrivalOrder gradients_;  // by entry; buckets are turns
};

}  // namespace pacer::detail
