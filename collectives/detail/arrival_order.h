// The order in which the gradients of a backward leave: in buckets, each as soon as it is full and all before it
// have left, so that every rank sends in one order, whatever the order in which its gradients arrive.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace pacer::detail {

// Parameters are positions in their owner's list. Gradients arrive on autograd's threads, so that an owner calls
// all of this under a lock of its own.
class ArrivalOrder {
 public:
  // The position is in this bucket from the next reset() on. Buckets are numbered in the order in which they leave.
  void put(size_t position, size_t bucket) {
    if (position >= bucket_of_.size()) bucket_of_.resize(position + 1);
    bucket_of_[position] = bucket;
  }
  size_t bucket_of(size_t position) const { return bucket_of_[position]; }

  // A backward begins: every position is awaited, and no bucket has left.
  void reset() {
    states_.assign(bucket_of_.size(), State::awaited);
    awaited_.clear();
    for (const size_t bucket : bucket_of_) {
      awaited_.resize(std::max(awaited_.size(), bucket + 1));
      ++awaited_[bucket];
    }
    next_ = 0;
  }

  // Returns whether the gradient was awaited until now.
  bool arrive(size_t position) { return settle(position, State::arrived); }
  // Nobody waits for a gradient that is absent, but it may arrive all the same. One that is there stays there.
  void set_absent(size_t position) {
    if (is_awaited(position)) settle(position, State::absent);
  }
  void set_rest_absent() {
    for (size_t i = 0; i < states_.size(); ++i) set_absent(i);
  }

  bool is_awaited(size_t position) const { return states_[position] == State::awaited; }
  bool is_absent(size_t position) const { return states_[position] == State::absent; }
  bool has_arrived(size_t position) const { return states_[position] == State::arrived; }
  // Its bucket has left, so that a gradient comes too late.
  bool has_left(size_t position) const { return bucket_of_[position] < next_; }

  // The bucket that leaves next, which is also how many have left.
  size_t next() const { return next_; }
  bool next_is_full() const { return next_ < awaited_.size() && awaited_[next_] == 0; }
  // Returns the bucket that has left with this.
  size_t leave() { return next_++; }

 private:
  enum class State : char { awaited, absent, arrived };

  bool settle(size_t position, State state) {
    const bool was_awaited = is_awaited(position);
    if (was_awaited) --awaited_[bucket_of_[position]];
    states_[position] = state;
    return was_awaited;
  }

  std::vector<size_t> bucket_of_;  // by position
  std::vector<State> states_;      // by position
  std::vector<size_t> awaited_;    // by bucket: gradients that are still to come
  size_t next_ = 0;
};

}  // namespace pacer::detail
