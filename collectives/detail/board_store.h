// A notice board as the store that c10d's process groups want for their set-up: what one rank sets, others
// get as soon as it is there.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <pacer/collectives/detail/transport.h>

namespace pacer::detail {

class BoardStore : public c10d::Store {
 public:
  // `watch` is called while a key is waited for, and throws where nobody will post it any more.
  BoardStore(std::shared_ptr<NoticeBoard> board, std::string prefix, std::chrono::milliseconds timeout,
             std::function<void()> watch);

  c10::intrusive_ptr<c10d::Store> clone() override;
  // The first value of a key stays.
  void set(const std::string& key, const std::vector<uint8_t>& value) override;
  std::vector<uint8_t> get(const std::string& key) override;
  bool check(const std::vector<std::string>& keys) override;
  void wait(const std::vector<std::string>& keys) override;
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override;

  // A board cannot do these, and groups of the CPU do not ask for them. Each throws Error.
  int64_t add(const std::string& key, int64_t value) override;
  bool deleteKey(const std::string& key) override;
  int64_t getNumKeys() override;

 private:
  const std::shared_ptr<NoticeBoard> board_;
  const std::string prefix_;
  const std::function<void()> watch_;
};

}  // namespace pacer::detail
