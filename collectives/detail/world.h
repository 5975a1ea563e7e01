// What the communicators of one rank share: that of all ranks, and the groups and lanes that were split off
// it. One failed operation fails all of them, so that a rank which cannot go on in one group does not let the
// others wait in another.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <pacer/collectives/communicator.h>
#include <pacer/collectives/detail/rank_health.h>
#include <pacer/collectives/detail/transport.h>

namespace pacer::detail {

class World {
 public:
  World(std::shared_ptr<RankHealth> rank_health, int rank, int size, bool joins_processes);
  ~World();
  World(const World&) = delete;

  RankHealth& rank_health() { return *rank_health_; }
  int rank() const { return rank_; }
  int size() const { return size_; }
  // Whether any world of this process joins processes.
  static bool joins_processes();

  // A communicator's transports, for as long as they live.
  void add(const Connection& connection);

  // Throws the failure, if there is one.
  void require_working() const;
  bool has_failed() const;
  // Throws the failure of an operation that nobody has waited for.
  void check(const std::function<void(const std::string& cause)>& fail);
  // Ends the operations under way, unless that was done before, and keeps the error that `describe` makes of
  // the step, which every later call throws. Throws the failure that is kept.
  [[noreturn]] void fail(const std::function<CommunicationError(int64_t step)>& describe);
  void leave(const std::string& reason) noexcept;
  void abort() noexcept;

  // Counts a call, unless something has failed.
  void count(const std::string& group, const char* operation, int64_t bytes);
  int64_t step() const;
  void set_step(int64_t step);
  void set_phase(const std::string& phase);
  std::vector<Traffic> traffic() const;

 private:
  bool keep(CommunicationError failure);
  void abort_all() noexcept;
  std::vector<std::shared_ptr<Transport>> transports() const;

  const std::shared_ptr<RankHealth> rank_health_;
  const int rank_;
  const int size_;
  const bool joins_processes_;
  std::mutex failing_;        // one thread at a time finds out what happened
  mutable std::mutex mutex_;  // for what follows
  std::vector<std::weak_ptr<Transport>> transports_;
  int64_t step_ = -1;
  std::string phase_;
  std::vector<Traffic> traffic_;
  std::shared_ptr<const CommunicationError> failure_;
};

}  // namespace pacer::detail
