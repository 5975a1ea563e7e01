// One rank of a run, as its process sees it: how it meets the others without any network (files in a folder
// of the parent's), and how it reports. The parent is launcher.h.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include <c10/core/Device.h>

#include <pacer/collectives/detail/transport.h>

namespace pacer::testing {

class RankProcess {
 public:
  using Trouble = std::function<std::optional<std::string>()>;

  RankProcess(int rank, int world, int first_gpu, std::string folder, int report)
      : rank_(rank), world_(world), first_gpu_(first_gpu), folder_(std::move(folder)), report_(report) {}

  int rank() const { return rank_; }
  int world() const { return world_; }
  bool is_last() const { return rank_ + 1 == world_; }
  c10::Device device() const;

  // A new NCCL transport of all ranks; `group` is a name for it, used once.
  std::shared_ptr<detail::Transport> connect(const std::string& group, std::chrono::milliseconds timeout,
                                             Trouble trouble = {});

  // Runs one part of a scenario; says "PASS name" or "FAIL name".
  void check(const std::string& name, const std::function<void()>& body);
  void inform(const std::string& text);

  // Notes between the ranks.
  void post(const std::string& key, const std::string& text = "");
  std::optional<std::string> read(const std::string& key) const;
  // Throws after a minute.
  std::string wait_for(const std::string& key) const;
  // Returns when all of the first `ranks` ranks have called it with this key.
  void meet(const std::string& key, int ranks);

 private:
  void say(const std::string& line);

  const int rank_;
  const int world_;
  const int first_gpu_;
  const std::string folder_;
  const int report_;
};

// Throws where the condition does not hold.
void expect(bool condition, const std::string& what);

// Seconds since construction.
class Stopwatch {
 public:
  double seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count();
  }

 private:
  const std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

}  // namespace pacer::testing
