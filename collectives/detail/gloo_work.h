// Operations of c10d's Gloo process group as works with a deadline from their start, whatever Gloo does.
#pragma once

#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <pacer/collectives/detail/transport.h>

namespace pacer::detail {

// What works share with their transport, and keep when it goes.
struct GlooState {
  virtual ~GlooState() = default;

  std::mutex starting;  // the group is not made for several threads
  std::atomic<bool> ended{false};
  // Threads that wait for messages whose works were dropped: Gloo needs their memory until they are through.
  std::vector<std::future<void>> dropped;

  // Throws Error after abort().
  void require_open() const;
};

// What Gloo said, in one line, without the place in its source.
std::string words_of_gloo(const std::exception& error);

// An operation that goes on by itself.
TransportWorkPtr make_gloo_work(std::shared_ptr<GlooState> state, c10::intrusive_ptr<c10d::Work> work,
                                std::chrono::milliseconds timeout);
// Messages to and from other ranks. `after` is called by wait() once all are through.
TransportWorkPtr make_gloo_messages(std::shared_ptr<GlooState> state,
                                    std::vector<c10::intrusive_ptr<c10d::Work>> messages,
                                    std::chrono::milliseconds timeout, std::function<void()> after);

}  // namespace pacer::detail
