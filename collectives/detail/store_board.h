// A notice board over c10d's TCPStore: rank 0, or the launcher's agent, keeps the notices. A store whose host
// has stopped would block its clients for ever, so every call here has a deadline.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include <pacer/collectives/detail/addresses.h>
#include <pacer/collectives/detail/transport.h>

namespace pacer::detail {

class StoreBoard : public NoticeBoard {
 public:
  // `hosts`: this process listens at `address`, from its first board there to its end. `prefix` keeps
  // meetings and launches that share a store apart. Throws std::exception where nobody answers in time.
  StoreBoard(const Address& address, int port, bool hosts, std::string prefix,
             std::chrono::milliseconds timeout);
  ~StoreBoard() override;

  // The first notice of a key stays; later ones are not seen.
  void post(const std::string& key, const std::string& text) override;
  std::optional<std::string> read(const std::string& key) override;

  // How long a call may take from now on; at first, the timeout.
  void limit_calls(std::chrono::milliseconds limit) { limit_ms_ = limit.count(); }

 private:
  struct Client;

  const std::string place_, prefix_;
  std::atomic<int64_t> limit_ms_;
  std::shared_ptr<Client> client_;
};

}  // namespace pacer::detail
