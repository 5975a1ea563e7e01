#include <pacer/collectives/detail/alone_transport.h>

#include <ATen/core/grad_mode.h>

#include <pacer/collectives/detail/rank_health.h>
#include <pacer/core/error.h>

namespace pacer::detail {
namespace {

class DoneWork : public TransportWork {
 public:
  void wait() override {}
  bool is_done() override { return true; }
};

TransportWorkPtr copied(const at::Tensor& output, const at::Tensor& input) {
  const at::NoGradGuard no_grad;
  output.view({-1}).copy_(input.view({-1}));
  return std::make_unique<DoneWork>();
}

class AloneTransport : public Transport {
 public:
  explicit AloneTransport(at::Device device) : device_(device) {}
  std::string name() const override { return "one process"; }
  at::Device device() const override { return device_; }
  bool sums_in_rank_order() const override { return true; }
  TransportWorkPtr all_reduce(const at::Tensor&, Milliseconds) override {
    return std::make_unique<DoneWork>();
  }
  TransportWorkPtr reduce_scatter(const at::Tensor& output, const at::Tensor& input, Milliseconds) override {
    return copied(output, input);
  }
  TransportWorkPtr all_gather(const at::Tensor& output, const at::Tensor& input, Milliseconds) override {
    return copied(output, input);
  }
  TransportWorkPtr all_to_all(const at::Tensor& output, const std::vector<int64_t>&, const at::Tensor& input,
                              const std::vector<int64_t>&, Milliseconds) override {
    return copied(output, input);
  }
  TransportWorkPtr broadcast(const at::Tensor&, int, Milliseconds) override {
    return std::make_unique<DoneWork>();
  }
  TransportWorkPtr exchange(const std::vector<Message>&, Milliseconds) override {
    throw InvalidArgument("a world of one rank has nobody to send to or receive from");
  }
  bool gathers_in_one_hop() const override { return true; }
  void abort() noexcept override {}

 private:
  at::Device device_;
};

}  // namespace

Connection connect_alone(at::Device device) {
  Connection connection;
  connection.data = std::make_shared<AloneTransport>(device);
  connection.control = std::make_shared<AloneTransport>(at::kCPU);
  connection.rank_health = RankHealth::of_threads(1).front();
  connection.join = [device](const GroupMembership&) { return connect_alone(device); };
  return connection;
}

}  // namespace pacer::detail
