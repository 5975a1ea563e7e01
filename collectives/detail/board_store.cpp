#include <pacer/collectives/detail/board_store.h>

#include <thread>
#include <utility>

#include <pacer/core/error.h>

namespace pacer::detail {

BoardStore::BoardStore(std::shared_ptr<NoticeBoard> board, std::string prefix,
                       std::chrono::milliseconds timeout, std::function<void()> watch)
    : c10d::Store(timeout), board_(std::move(board)), prefix_(std::move(prefix)), watch_(std::move(watch)) {}

c10::intrusive_ptr<c10d::Store> BoardStore::clone() {
  return c10::make_intrusive<BoardStore>(board_, prefix_, timeout_, watch_);
}

void BoardStore::set(const std::string& key, const std::vector<uint8_t>& value) {
  board_->post(prefix_ + key, std::string(value.begin(), value.end()));
}

std::vector<uint8_t> BoardStore::get(const std::string& key) {
  wait({key}, timeout_);
  const std::string value = board_->read(prefix_ + key).value();
  return {value.begin(), value.end()};
}

bool BoardStore::check(const std::vector<std::string>& keys) {
  for (const std::string& key : keys) {
    if (!board_->read(prefix_ + key)) return false;
  }
  return true;
}

void BoardStore::wait(const std::vector<std::string>& keys) { wait(keys, timeout_); }

void BoardStore::wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  for (int poll = 1; !check(keys); ++poll) {
    if (poll % 10 == 0) watch_();
    if (std::chrono::steady_clock::now() >= deadline) {
      throw TransportTimeout(
          concatenate("a rank did not say within ", timeout.count(), " ms where it can be reached"));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

int64_t BoardStore::add(const std::string& key, int64_t /*value*/) {
  throw Error("a notice board cannot count: " + key);
}
bool BoardStore::deleteKey(const std::string& key) { throw Error("a notice cannot be taken away: " + key); }
int64_t BoardStore::getNumKeys() { throw Error("the notices on a board are not counted"); }

}  // namespace pacer::detail
