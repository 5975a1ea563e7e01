// A simulated device for paging: its memory is the host's, and every queue runs late, in an order drawn at
// random among all that events allow. A wait that the schedule lacks shows as wrong bits.
#pragma once

#include <array>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include <pacer/optimizers/detail/page_device.h>
#include <pacer/optimizers/detail/step_engine.h>

#include "support/optimizers/optimizers.h"

namespace pacer::testing {

class LatePageDevice final : public detail::PageDevice {
 public:
  using Queue = detail::PageQueue;

  explicit LatePageDevice(unsigned seed, int64_t room = int64_t{1} << 40) : random_(seed), room_(room) {}

  std::shared_ptr<void> host_memory(int64_t bytes) override {
    ++host_memories;
    host_bytes += bytes;
    return filled(bytes, 0);
  }
  std::shared_ptr<void> device_memory(int64_t bytes) override {
    if (bytes > room_) return nullptr;
    room_ -= bytes;
    const std::shared_ptr<void> memory = filled(bytes, 0x5A);
    return {memory.get(), [this, memory, bytes, alive = std::weak_ptr<int>(alive_)](void*) {
              std::memset(memory.get(), 0xA5, static_cast<size_t>(bytes));
              if (alive.lock()) room_ += bytes;
            }};
  }
  int64_t free_bytes() const override { return room_; }
  // As if somebody else had taken memory.
  void set_free_bytes(int64_t bytes) { room_ = bytes; }

  void copy(Queue queue, void* to, const void* from, int64_t bytes) override {
    ++copies;
    copied_bytes += bytes;
    add(queue, [=] { std::memcpy(to, from, static_cast<size_t>(bytes)); });
  }
  void record(Queue queue, size_t event) override {
    const int64_t number = ++recorded_[event];
    add(queue, [this, event, number] { happened_[event] = number; });
  }
  void wait(Queue queue, size_t event) override {
    Work work{[] {}, event, recorded_[event]};
    queues_[static_cast<size_t>(queue)].push_back(std::move(work));
  }
  void update(const std::function<void()>& enqueue) override {
    add(Queue::update, enqueue);
    if (updates_at_once) synchronize(Queue::update);
  }
  void synchronize(Queue queue) override {
    while (!queues_[static_cast<size_t>(queue)].empty()) run_one();
  }
  void watch_pressure(std::function<void()> make_room) override { make_room_ = std::move(make_room); }

  bool is_watched() const { return make_room_ != nullptr; }
  void press() { make_room_(); }
  void run_some(int count) {
    for (int i = 0; i < count && !is_idle(); ++i) run_one();
  }

  // For updates in between of what a CPU does at once.
  bool updates_at_once = false;
  int64_t host_memories = 0, host_bytes = 0, copies = 0, copied_bytes = 0;

 private:
  struct Work {
    std::function<void()> run;
    size_t event = 0;
    int64_t number = 0;  // of the event, that must have happened
  };

  static std::shared_ptr<void> filled(int64_t bytes, int value) {
    auto memory = std::shared_ptr<void>(::operator new (static_cast<size_t>(bytes), std::align_val_t{256}),
                                        [](void* own) { ::operator delete (own, std::align_val_t{256}); });
    std::memset(memory.get(), value, static_cast<size_t>(bytes));
    return memory;
  }
  void add(Queue queue, std::function<void()> run) {
    queues_[static_cast<size_t>(queue)].push_back({std::move(run)});
  }
  bool is_idle() const {
    for (const auto& queue : queues_) {
      if (!queue.empty()) return false;
    }
    return true;
  }
  void run_one() {
    std::vector<size_t> ready;
    for (size_t q = 0; q < queues_.size(); ++q) {
      if (!queues_[q].empty() && happened_[queues_[q].front().event] >= queues_[q].front().number) {
        ready.push_back(q);
      }
    }
    REQUIRE_FALSE(ready.empty());  // else the queues wait for each other for ever
    const size_t chosen = ready[random_() % ready.size()];
    const Work work = std::move(queues_[chosen].front());
    queues_[chosen].pop_front();
    work.run();
  }

  std::mt19937 random_;
  int64_t room_;
  std::shared_ptr<int> alive_ = std::make_shared<int>();
  std::array<std::deque<Work>, 3> queues_;
  std::map<size_t, int64_t> recorded_, happened_;
  std::function<void()> make_room_;
};

// An optimizer of CPU parameters whose state is paged through a simulated device. Updates have run when a
// step returns, because a CPU's gradients may change afterwards; copies may be late.
template <class Optimizer>
class PagedOnHost : public Optimizer {
 public:
  PagedOnHost(const std::vector<Tensor>& parameters, const OptionsOf<Optimizer>& options,
              const Paging& paging, unsigned seed = 1, int64_t room = int64_t{1} << 40)
      : Optimizer(parameters, options) {
    this->engine().page(paging, [this, seed, room](at::Device) {
      auto made = std::make_unique<LatePageDevice>(seed, room);
      device = made.get();
      device->updates_at_once = true;
      return made;
    });
  }

  const Optimizer& base() const { return *this; }
  Optimizer& base() { return *this; }
  detail::StepEngine& own_engine() { return this->engine(); }

  LatePageDevice* device = nullptr;  // from the first step on
};

}  // namespace pacer::testing
