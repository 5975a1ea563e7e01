// The store through which the ranks of a run meet and learn of each other's trouble: a key has a list of
// records, which are appended and never changed.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace pacer::detail {

// A store that does not answer, for now: nothing follows for any rank.
class StoreSilent : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Records may hold any bytes. Any thread. Throws StoreSilent where the store does not answer in time, another
// std::exception where it is gone.
class Store {
 public:
  virtual ~Store() = default;
  // The record is there, for everybody, when this returns.
  virtual void append(const std::string& key, const std::string& record) = 0;
  // Returns the records of the key so far, in the order in which they came.
  virtual std::vector<std::string> read(const std::string& key) = 0;
  // Returns true as soon as the key has a record, false after `limit`. The store wakes who waits: waiting
  // costs no requests. One thread at a time.
  virtual bool wait_for(const std::string& key, std::chrono::milliseconds limit) = 0;

  // How many questions this object has asked so far, for tests of what a protocol costs.
  int64_t requests() const { return requests_; }

 protected:
  void count_requests(int64_t count) { requests_ += count; }

 private:
  std::atomic<int64_t> requests_{0};
};

// For threads of one process.
class MemoryStore : public Store {
 public:
  void append(const std::string& key, const std::string& record) override;
  std::vector<std::string> read(const std::string& key) override;
  bool wait_for(const std::string& key, std::chrono::milliseconds limit) override;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::vector<std::string>> records_;
};

// Several texts as one, each after its length, so that they may hold anything. Packed texts that follow one
// another unpack as all of them.
std::string pack(const std::vector<std::string>& texts);
// Throws Error for bytes that are no packed texts.
std::vector<std::string> unpack(const std::string& bytes);

// Throws Error unless `holds`: then this is not a record of the ranks. Any program that reaches the store can
// write records.
void require_record(bool holds);
// The number of a rank in a record. Throws Error where it is none.
int parse_rank(const std::string& text);

// One exchange of texts through a store, between all ranks. Requests are O(world_size) in all: each rank
// appends its text, rank 0 collects them and publishes all as one record, for which the others wait.
struct StoreAllGather {
  using Texts = std::vector<std::optional<std::string>>;  // by rank

  std::shared_ptr<Store> store;
  std::string key;  // of this exchange alone
  int rank = 0;
  int world_size = 1;
  std::string place;  // for messages
  std::chrono::milliseconds timeout{};
  // Sees what has come so far, about once a second, and throws where the exchange cannot end well.
  std::function<void(const Texts&)> check;

  // Returns the texts of all ranks. Throws what `check` throws, and CommunicationError where a rank does not
  // come in time. Where one rank throws CommunicationError, all do.
  std::vector<std::string> run(const std::string& own) const;

 private:
  std::vector<std::string> collect() const;
};

}  // namespace pacer::detail
