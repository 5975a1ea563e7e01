// Points at which a rank suffers: in its hooks, and in the operations of its transports. The rank says so and
// ends or stops, as its arguments tell it.
#pragma once

#include <csignal>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include <pacer/checkpoints/all.h>
#include <pacer/hooks/hooks.h>
#include <pacer/metrics/all.h>
#include <pacer/parallel/parallel.h>
#include <pacer/schedulers/schedulers.h>
#include <pacer/session/all.h>

#include "faulty_transport.h"
#include "scenario.h"

namespace pacer::testing {

// Ends or stops this process, or only says that it came here: signal=KILL, STOP or NONE.
inline void suffer(const Player& player) {
  say("fault");
  const std::string signal = player.text("signal");
  if (signal != "NONE") raise(signal == "KILL" ? SIGKILL : SIGSTOP);
}

// The point=NAME of the rank that is the culprit; "" on all others.
inline std::string fault_point(const Player& player) {
  const bool is_culprit = player.has("culprit") && player.number("culprit") == player.rank;
  return is_culprit ? player.text("point") : "";
}

// The step in which hooks suffer, from 0.
constexpr int64_t kFaultStep = 3;

using WrapTransports = std::function<void(std::shared_ptr<detail::Transport>& data,
                                          std::shared_ptr<detail::Transport>& control)>;

// Calls `wrap` for the transports of a connection, and of all groups that are made from it.
inline void wrap_transports(detail::Connection& connection, const WrapTransports& wrap) {
  wrap(connection.data, connection.control);
  connection.join = [wrap, join = connection.join](const detail::GroupMembership& membership) {
    detail::Connection group = join(membership);
    if (!membership.members.empty()) wrap_transports(group, wrap);
    return group;
  };
}

// The world, in which this rank suffers at a point OPERATION:N or OPERATION:N:inside of its transports, those
// of groups and lanes included: the operation is that of FaultyTransport, or data (any of those that move
// data), or control (any of those that carry small messages). Other points are for hooks.
inline std::shared_ptr<Communicator> join_with_fault(const Player& player, const std::string& point,
                                                     const std::function<void()>& fault) {
  const size_t colon = point.find(':');
  detail::Connection connection = player.connect();
  if (colon != std::string::npos) {
    const std::string operation = point.substr(0, colon);
    const int number = std::atoi(point.c_str() + colon + 1);
    const bool inside = point.find(":inside") != std::string::npos;
    const auto operations = std::make_shared<int>(0);
    wrap_transports(connection, [=](std::shared_ptr<detail::Transport>& data,
                                    std::shared_ptr<detail::Transport>& control) {
      std::shared_ptr<detail::Transport>& chosen = operation == "control" ? control : data;
      const bool is_any = operation == "control" || operation == "data";
      chosen = std::make_shared<FaultyTransport>(chosen, is_any ? "" : operation, number, inside, fault,
                                                 operations);
    });
  }
  return std::make_shared<Communicator>(std::move(connection), player.options());
}

// Points in the Session's step and in checkpoints: a hook that suffers there, in step 3.
class FaultHook : public Hook {
 public:
  FaultHook(std::string point, std::function<void()> fault)
      : point_(std::move(point)), fault_(std::move(fault)) {}
  std::string hook_name() const override { return "fault"; }
  Slot slot() const override { return Slot::schedule; }
  void attach(SessionParts& parts) override { parts_ = &parts; }
  void begin(const Progress& p, MicroBatch&) override { at("begin", p.step); }
  void backward_begin(const Progress& p) override { at("backward", p.step); }
  void backward_end(const Progress& p) override { at("after_backward", p.step); }
  void gradients_ready(const Progress& p) override { at("before_kernel", p.step); }
  void after_step(StepReport& r) override { at("after_kernel", r.progress().step - 1); }
  void save(NamedTensors&) const override { at("in_save", parts_->progress.step - 1); }
  void load(const NamedTensors&) override {
    if (point_ == "in_load") fault_();
  }

 private:
  void at(const char* point, int64_t step) const {
    if (point_ == point && step == kFaultStep) fault_();
  }
  std::string point_;
  std::function<void()> fault_;
  SessionParts* parts_ = nullptr;
};

}  // namespace pacer::testing
