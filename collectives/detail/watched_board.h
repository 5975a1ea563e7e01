// The notice board of ranks that have met: it also knows of processes that end without a word. What ranks say
// when something fails, by these keys:
//   left/RANK    why the rank has left
//   alive/RANK   the rank has noticed a failure, and is not its cause
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include <pacer/collectives/detail/roll_call.h>
#include <pacer/collectives/detail/transport.h>

namespace pacer::detail {

class WatchedBoard : public NoticeBoard {
 public:
  // `keeper`: the rank whose process keeps the notices, if one does.
  WatchedBoard(std::shared_ptr<NoticeBoard> board, std::shared_ptr<const RollCall> roll, int rank,
               std::optional<int> keeper);
  // The keeper stays until the others have read its last words.
  ~WatchedBoard() override;

  void post(const std::string& key, const std::string& text) override;
  // "left/RANK" is there, too, where the process of that rank has ended on this host, unless it was alive
  // when others had failed.
  std::optional<std::string> read(const std::string& key) override;

 private:
  using Clock = std::chrono::steady_clock;

  void require_keeper() const;

  const std::shared_ptr<NoticeBoard> board_;
  const std::shared_ptr<const RollCall> roll_;
  const int rank_;
  const std::optional<int> keeper_;
  std::atomic<Clock::rep> last_words_{0};
};

// Why an operation of all ranks cannot end any more, or nothing where that is not known: a rank has left, or
// the one that kept the notices has ended.
std::optional<std::string> find_trouble(NoticeBoard& board, int rank, int world_size);

}  // namespace pacer::detail
