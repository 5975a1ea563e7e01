// The first thing ranks do when they meet: each writes down who it is, and waits for the others. From then on
// each knows which ranks share its host, and can tell when a process there has ended.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <pacer/collectives/detail/transport.h>

namespace pacer::detail {

class RollCall {
 public:
  using Clock = std::chrono::steady_clock;

  // `place` is for messages.
  RollCall(std::shared_ptr<NoticeBoard> board, int rank, int world_size, std::string place);

  // Returns when all ranks are here. Throws InvalidArgument where this rank is here already,
  // CommunicationError where another counts a different number of ranks, does not come in time or ends
  // meanwhile. What one rank finds wrong, all throw.
  void wait_for_all(std::chrono::milliseconds timeout);

  // True where every rank has come, be it in vain.
  bool has_everybody_come() const;

  // The rest is for after. Any thread.
  bool is_one_host() const;
  // Among the ranks of this host, in rank order.
  int local_rank() const;
  int local_size() const;
  // The rank is one of this host, and its process has ended. Killed ones count before their parent knows.
  bool has_ended(int rank) const;
  // Throws CommunicationError where one has.
  void require_all_alive() const;

 private:
  struct Member {
    int world_size = 0;
    int process = 0;
    std::string start;    // of the process, to tell it from a later one of that number
    std::string network;  // equal: the same loopback interface
    std::string numbers;  // equal: the same numbers of processes
  };
  static Member myself(int world_size);
  static std::string to_text(const Member& member);
  static std::optional<Member> parse(const std::string& text);

  void enter();
  void read_new();
  std::vector<int> missing() const;
  void wait_until(Clock::time_point deadline, std::chrono::milliseconds timeout);

  const std::shared_ptr<NoticeBoard> board_;
  const int rank_;
  const std::string place_;
  const Member own_;
  std::vector<std::optional<Member>> members_;
};

}  // namespace pacer::detail
