// What ranks tell each other before Gloo connects them, as the store that c10d's process group wants: one
// gathering of all ranks' values instead of world_size^2 requests for single ones.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <pacer/collectives/detail/transport.h>

namespace pacer::detail {

// Tells the others this rank's text and returns those of all ranks, in their order. Throws std::exception
// where one does not come.
using Gather = std::function<std::vector<std::string>(const std::string& own)>;

// Returns a Gather over ranks that are connected already.
Gather gather_over(std::shared_ptr<Transport> transport, int world_size, std::chrono::milliseconds timeout);

// A group sets the value of its rank (the key is "0/RANK"), and then waits for and gets those of all ranks:
// the first question gathers them.
class GlooStore : public c10d::Store {
 public:
  explicit GlooStore(Gather gather) : gather_(std::move(gather)) {}

  void set(const std::string& key, const std::vector<uint8_t>& value) override;
  std::vector<uint8_t> get(const std::string& key) override;
  bool check(const std::vector<std::string>& keys) override;
  void wait(const std::vector<std::string>& keys) override;
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override;

  // Groups of the CPU do not ask for these. Each throws Error.
  c10::intrusive_ptr<c10d::Store> clone() override;
  int64_t add(const std::string& key, int64_t value) override;
  bool deleteKey(const std::string& key) override;
  int64_t getNumKeys() override;

 private:
  const std::map<std::string, std::string>& values();

  Gather gather_;                 // until it was called
  std::vector<std::string> own_;  // key, value, key, value ...
  bool is_gathered_ = false;
  std::map<std::string, std::string> values_;
};

}  // namespace pacer::detail
