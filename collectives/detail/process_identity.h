// Who a rank is: its process, and which others share its host.
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace pacer::detail {

struct ProcessIdentity {
  int world_size = 0;
  int process = 0;      // 0: none of its own
  std::string start;    // of the process, to tell it from a later one of that number
  std::string network;  // equal: the same loopback interface
  std::string numbers;  // equal: the same numbers of processes

  // This process as one of so many ranks.
  static ProcessIdentity myself(int world_size);
  std::string to_text() const;
  static std::optional<ProcessIdentity> parse(const std::string& text);
  // True where its process is one of this host and has ended. Killed ones count before their parent knows.
  bool has_ended(const ProcessIdentity& own) const;
};

// Throws CommunicationError where the process of one of these, by rank, has ended. `place` is for the
// message.
void require_alive(const std::vector<std::optional<ProcessIdentity>>& processes, const ProcessIdentity& own,
                   const std::string& place);

// What goes wrong while ranks meet.
[[noreturn]] void fail_rendezvous(const std::string& what, const std::vector<int>& suspects = {});

// Returns 0, 1 ... world_size - 1.
std::vector<int> all_ranks(int world_size);
// "rank 1", "ranks 1 and 2", "ranks 1, 2 and 3".
std::string names_of(const std::vector<int>& ranks);

}  // namespace pacer::detail
