// A transport that does what it is told to at one operation: for finding out what the others do then.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <pacer/collectives/detail/transport.h>

namespace pacer::testing {

// Calls `fault` before operation number `at` (from 1) of a transport, or, with `inside`, once it has been
// started. Counts operations of the name `only`, or all where that is empty, in `operations`, which several
// transports may share. An exchange of messages that all go one way between two ranks has a name of its own,
// too: "send to 1" or "receive from 0".
class FaultyTransport : public detail::Transport {
 public:
  FaultyTransport(std::shared_ptr<Transport> real, std::string only, int at, bool inside,
                  std::function<void()> fault, std::shared_ptr<int> operations)
      : real_(std::move(real)),
        only_(std::move(only)),
        at_(at),
        inside_(inside),
        fault_(std::move(fault)),
        operations_(std::move(operations)) {}

  std::string name() const override { return real_->name(); }
  at::Device device() const override { return real_->device(); }
  bool sums_in_rank_order() const override { return real_->sums_in_rank_order(); }
  detail::TransportWorkPtr all_reduce(const at::Tensor& tensor, Milliseconds timeout) override {
    return pass("all_reduce", [&] { return real_->all_reduce(tensor, timeout); });
  }
  detail::TransportWorkPtr all_reduce_coalesced(const std::vector<at::Tensor>& tensors,
                                                Milliseconds timeout) override {
    return pass("all_reduce", [&] { return real_->all_reduce_coalesced(tensors, timeout); });
  }
  bool coalesces() const override { return real_->coalesces(); }
  detail::TransportWorkPtr reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                                          Milliseconds timeout) override {
    return pass("reduce_scatter", [&] { return real_->reduce_scatter(output, input, timeout); });
  }
  detail::TransportWorkPtr all_gather(const at::Tensor& output, const at::Tensor& input,
                                      Milliseconds timeout) override {
    return pass("all_gather", [&] { return real_->all_gather(output, input, timeout); });
  }
  detail::TransportWorkPtr all_to_all(const at::Tensor& output, const std::vector<int64_t>& output_counts,
                                      const at::Tensor& input, const std::vector<int64_t>& input_counts,
                                      Milliseconds timeout) override {
    return pass("all_to_all",
                [&] { return real_->all_to_all(output, output_counts, input, input_counts, timeout); });
  }
  detail::TransportWorkPtr broadcast(const at::Tensor& tensor, int root, Milliseconds timeout) override {
    return pass("broadcast", [&] { return real_->broadcast(tensor, root, timeout); });
  }
  detail::TransportWorkPtr exchange(const std::vector<Message>& messages, Milliseconds timeout) override {
    return pass(only_ == "exchange" ? only_ : name_of(messages),
                [&] { return real_->exchange(messages, timeout); });
  }
  bool gathers_in_one_hop() const override { return real_->gathers_in_one_hop(); }
  bool has_stream() const override { return real_->has_stream(); }
  detail::TransportWorkPtr run_on_stream(const std::function<void()>& f) override {
    return real_->run_on_stream(f);
  }
  void check() override { real_->check(); }
  void start_abort() noexcept override { real_->start_abort(); }
  void abort() noexcept override { real_->abort(); }

 private:
  static std::string name_of(const std::vector<Message>& messages) {
    for (const Message& message : messages) {
      if (message.is_sent != messages[0].is_sent || message.peer != messages[0].peer) return "exchange";
    }
    if (messages.empty()) return "exchange";
    return (messages[0].is_sent ? "send to " : "receive from ") + std::to_string(messages[0].peer);
  }

  template <class Start>
  detail::TransportWorkPtr pass(const std::string& operation, const Start& start) {
    if (!only_.empty() && only_ != operation) return start();
    const bool now = ++*operations_ == at_;
    if (now && !inside_) fault_();
    auto work = start();
    if (now && inside_) fault_();
    return work;
  }

  std::shared_ptr<Transport> real_;
  const std::string only_;
  const int at_;
  const bool inside_;
  const std::function<void()> fault_;
  const std::shared_ptr<int> operations_;
};

}  // namespace pacer::testing
