// The health of the ranks of a run: which share a host, who has left since they met, and why. They tell each
// other by records of one key of their store, so that one request hears of everybody. Knows nothing of
// transports.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <pacer/collectives/detail/process_identity.h>
#include <pacer/collectives/detail/store.h>

namespace pacer::detail {

// Numbers are ranks of the world. Any thread.
class RankHealth {
 public:
  // Why operations cannot end, and which ranks are the cause; text ends without punctuation.
  struct FailureReport {
    std::vector<int> ranks;
    std::string text;
  };

  // `processes` are all ranks. `store_host`: the rank whose process holds the store, if one does. `place` is
  // where they met, for messages.
  RankHealth(std::shared_ptr<Store> store, int rank, std::vector<std::optional<ProcessIdentity>> processes,
             std::optional<int> store_host, std::string place);
  // Makes those of `world_size` threads of this process; element i is for rank i.
  static std::vector<std::shared_ptr<RankHealth>> of_threads(int world_size);
  // The rank that holds the store stays until the others have read why it failed.
  ~RankHealth();
  RankHealth(const RankHealth&) = delete;

  bool is_one_host() const;
  // Among the ranks of this host, in rank order.
  int local_rank() const;
  int local_size() const;
  // The first rank of this host.
  int first_local_rank() const;
  // The process of that rank ran on this host, and has ended.
  bool has_ended(int rank) const;
  // For the set-up. Throws CommunicationError where the process of a rank of this host has ended.
  void require_all_alive() const;

  // This rank cannot go on. Throws std::exception where the store cannot be reached.
  void leave(const std::string& reason);
  // This rank's communicators end, and nothing has failed: the others do not take the end of its process for
  // trouble. The rank that holds the store waits for the others to leave, a second at most. Never throws.
  void leave_quietly() noexcept;
  // Operation `operation` of this rank has failed, and `found` is what it found out.
  void tell_failure(const std::string& operation, const FailureReport& found) noexcept;

  // Returns why operations that these ranks take part in cannot end any more: one has left or failed, its
  // process has ended on this host without leave_quietly, or the process that held the store is gone. Nothing
  // where that is not known, also where the store is silent. Asks the store once.
  std::optional<FailureReport> find_trouble(const std::vector<int>& ranks);
  // After a failure here: says that this rank is alive, and finds out which of these ranks is the cause:
  // those that have left or whose process has ended, else those that failed in an operation with other ranks,
  // else those that give no sign of life within a second, else those that have left quietly. Where nobody
  // here is silent, waits for what ranks elsewhere find out that still search, a second more at most.
  FailureReport find_suspects(const std::vector<int>& ranks) noexcept;

 private:
  using Clock = std::chrono::steady_clock;
  struct RankState;
  struct WorldState;
  struct StatusRecord;

  void tell(const std::vector<std::string>& record);
  std::vector<RankState> states(const std::vector<int>& ranks, WorldState* world = nullptr);
  static std::optional<FailureReport> find_cause(const std::vector<RankState>& states);
  void require_store_host() const;
  const ProcessIdentity& own() const { return *processes_[static_cast<size_t>(rank_)]; }

  const std::shared_ptr<Store> store_;
  const int rank_;
  const std::vector<std::optional<ProcessIdentity>> processes_;
  const std::optional<int> store_host_;
  const std::string place_;
  std::atomic<bool> store_host_has_left_{false};
  std::atomic<Clock::rep> failed_at_{0};  // when this rank told of a failure; 0 where it has not
};

}  // namespace pacer::detail
