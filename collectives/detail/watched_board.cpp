#include <pacer/collectives/detail/watched_board.h>

#include <thread>
#include <utility>

#include <pacer/core/error.h>

namespace pacer::detail {
namespace {

// From last words to the end of the store: the others notice the failure, and look for its cause for a
// second.
constexpr std::chrono::milliseconds kMourning{1500};

const std::string kLeft = "left/", kAlive = "alive/";

bool begins_with(const std::string& key, const std::string& start) { return key.rfind(start, 0) == 0; }

}  // namespace

WatchedBoard::WatchedBoard(std::shared_ptr<NoticeBoard> board, std::shared_ptr<const RollCall> roll, int rank,
                           std::optional<int> keeper)
    : board_(std::move(board)), roll_(std::move(roll)), rank_(rank), keeper_(keeper) {}

WatchedBoard::~WatchedBoard() {
  const Clock::rep last_words = last_words_;
  if (last_words != 0 && keeper_ == rank_) {
    std::this_thread::sleep_until(Clock::time_point(Clock::duration(last_words)) + kMourning);
  }
}

// LibTorch would find out as well, but print many lines.
void WatchedBoard::require_keeper() const {
  require<Error>(!keeper_ || !roll_->has_ended(*keeper_), "the process of rank ", keeper_.value_or(0),
                 ", which kept the notices, has ended");
}

void WatchedBoard::post(const std::string& key, const std::string& text) {
  require_keeper();
  board_->post(key, text);
  if (begins_with(key, kLeft) || begins_with(key, kAlive)) {
    last_words_ = Clock::now().time_since_epoch().count();
  }
}

std::optional<std::string> WatchedBoard::read(const std::string& key) {
  require_keeper();
  // In this order: a process may post and end between the two.
  const bool has_ended = begins_with(key, kLeft) && roll_->has_ended(std::stoi(key.substr(kLeft.size())));
  std::optional<std::string> text = board_->read(key);
  if (text || !has_ended) return text;
  if (board_->read(kAlive + key.substr(kLeft.size()))) return std::nullopt;
  return "its process has ended";
}

std::optional<std::string> find_trouble(NoticeBoard& board, int rank, int world_size) {
  try {
    for (int other = 0; other < world_size; ++other) {
      if (other == rank) continue;
      if (const auto reason = board.read(kLeft + std::to_string(other))) {
        return concatenate("rank ", other, " left: ", *reason);
      }
    }
  } catch (const BoardSilent&) {  // a machine that was paused goes on later
    return std::nullopt;
  } catch (const std::exception& error) {
    return concatenate(
        "rank 0, or the launcher, has ended: the store where the ranks met cannot be reached (", error.what(),
        ")");
  }
  return std::nullopt;
}

}  // namespace pacer::detail
