// The ranks of a run as they met: which share a host, who has left since, and why. They tell each other by
// records of one key of their store, so that one request hears of everybody. Knows nothing of transports.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <pacer/collectives/detail/member.h>
#include <pacer/collectives/detail/store.h>

namespace pacer::detail {

// Numbers are ranks of the world. Any thread.
class Roster {
 public:
  // Why operations cannot end, and which ranks are the cause; text ends without punctuation.
  struct Trouble {
    std::vector<int> ranks;
    std::string text;
  };

  // `members` are all ranks. `keeper`: the rank whose process keeps the store, if one does. `place` is where
  // they met, for messages.
  Roster(std::shared_ptr<Store> store, int rank, std::vector<std::optional<Member>> members,
         std::optional<int> keeper, std::string place);
  // Makes the rosters of `world_size` threads of this process; element i is for rank i.
  static std::vector<std::shared_ptr<Roster>> of_threads(int world_size);
  // The keeper stays until the others have read its last words.
  ~Roster();
  Roster(const Roster&) = delete;

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
  // trouble. The keeper waits for the others to retire, a second at most. Never throws.
  void retire() noexcept;
  // Operation `operation` of this rank has failed, and `found` is what it found out.
  void tell_failure(const std::string& operation, const Trouble& found) noexcept;

  // Returns why operations that these ranks take part in cannot end any more: one has left or failed, its
  // process has ended on this host without retiring, or the process that kept the store is gone. Nothing
  // where that is not known, also where the store is silent. Asks the store once.
  std::optional<Trouble> find_trouble(const std::vector<int>& ranks);
  // After a failure here: says that this rank is alive, and finds out which of these ranks is the cause:
  // those that have left or whose process has ended, else those that failed in an operation with other ranks,
  // else those that give no sign of life within a second, else those that have retired. Where nobody here is
  // silent, waits for what ranks elsewhere find out that still search, a second more at most.
  Trouble find_suspects(const std::vector<int>& ranks) noexcept;

 private:
  using Clock = std::chrono::steady_clock;
  struct Standing;
  struct Elsewhere;
  struct News;

  void tell(const std::vector<std::string>& news);
  std::vector<Standing> standings(const std::vector<int>& ranks, Elsewhere* elsewhere = nullptr);
  static std::optional<Trouble> find_cause(const std::vector<Standing>& standings);
  void require_keeper() const;
  const Member& own() const { return *members_[static_cast<size_t>(rank_)]; }

  const std::shared_ptr<Store> store_;
  const int rank_;
  const std::vector<std::optional<Member>> members_;
  const std::optional<int> keeper_;
  const std::string place_;
  std::atomic<bool> keeper_has_retired_{false};
  std::atomic<Clock::rep> last_words_{0};  // when this rank told of a failure; 0 where it has not
};

}  // namespace pacer::detail
