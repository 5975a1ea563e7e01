// The only file that sees c10d's Gloo process group. Everything that is only moved is moved as bytes, so that
// any dtype will do; sums are Gloo's own.
#include <pacer/collectives/detail/gloo_transport.h>

#include <exception>
#include <mutex>
#include <utility>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <pacer/collectives/detail/broken_pipe.h>
#include <pacer/collectives/detail/gloo_store.h>
#include <pacer/collectives/detail/gloo_work.h>
#include <pacer/core/error.h>

namespace pacer::detail {
namespace {

using Milliseconds = Transport::Milliseconds;
using GroupWork = c10::intrusive_ptr<c10d::Work>;

// A message that is longer than its receiver expects would end the process, by an exception on a thread of
// Gloo. So messages of different sizes have different tags: those that do not fit do not meet, and reach
// their deadline. Messages of exchange() and those of all_to_all() are apart, too.
constexpr int kNeverTag = 0;  // of the message that nobody sends
constexpr int kMessageTags = 0x20000000;
constexpr int kExchangeTags = 0x40000000;

int tag_of(int kind, const at::Tensor& message) {
  return kind | static_cast<int>(message.nbytes() % static_cast<size_t>(kMessageTags));
}

// Gloo's own deadline comes after ours, so that a passed deadline is never taken for a broken connection.
constexpr Milliseconds kGrace{500};

// The tensor's memory as one row of bytes that keeps it alive.
at::Tensor bytes_of(const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  return tensor.detach().view({-1}).view(at::kByte);
}

struct Connections : GlooState {
  c10::intrusive_ptr<c10d::ProcessGroupGloo> group;
};

class GlooTransport final : public Transport {
 public:
  explicit GlooTransport(const GlooSetup& setup)
      : rank_(setup.rank), world_size_(setup.world_size), connections_(std::make_shared<Connections>()) {
    const NoBrokenPipe inherited;  // by the threads of Gloo
    const auto store = c10::make_intrusive<GlooStore>(setup.gather);
    const auto options = c10d::ProcessGroupGloo::Options::create(setup.timeout);
    options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname(setup.address));
    connections_->group =
        c10::make_intrusive<c10d::ProcessGroupGloo>(store, setup.rank, setup.world_size, options);
  }
  // The group waits for its operations when it goes.
  ~GlooTransport() override { abort(); }

  std::string name() const override { return "Gloo"; }
  at::Device device() const override { return at::kCPU; }

  TransportWorkPtr all_reduce(const at::Tensor& tensor, Milliseconds timeout) override {
    c10d::AllreduceOptions options;
    options.timeout = timeout + kGrace;
    std::vector<at::Tensor> tensors{tensor.detach()};
    return start(timeout, [&] { return connections_->group->allreduce(tensors, options); });
  }

  TransportWorkPtr reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                                  Milliseconds timeout) override {
    const at::Tensor parts = at::empty(input.sizes(), input.options().requires_grad(false));
    const std::vector<int64_t> counts(static_cast<size_t>(world_size_), output.numel());
    const auto add = [parts, output, world_size = world_size_] {
      const at::NoGradGuard no_grad;
      const at::Tensor flat = output.view({-1}), rows = parts.view({world_size, -1});
      flat.copy_(rows[0]);
      for (int64_t rank = 1; rank < world_size; ++rank) flat.add_(rows[rank]);
    };
    return exchange_chunks(chunks_of(parts, counts), chunks_of(input, counts), timeout, add);
  }

  TransportWorkPtr all_gather(const at::Tensor& output, const at::Tensor& input,
                              Milliseconds timeout) override {
    // Gloo's own needs memory for all of the output once more.
    const std::vector<int64_t> counts(static_cast<size_t>(world_size_), input.numel());
    const std::vector<at::Tensor> same(static_cast<size_t>(world_size_), bytes_of(input));
    return exchange_chunks(chunks_of(output, counts), same, timeout);
  }

  TransportWorkPtr all_to_all(const at::Tensor& output, const std::vector<int64_t>& output_counts,
                              const at::Tensor& input, const std::vector<int64_t>& input_counts,
                              Milliseconds timeout) override {
    return exchange_chunks(chunks_of(output, output_counts), chunks_of(input, input_counts), timeout);
  }

  TransportWorkPtr broadcast(const at::Tensor& tensor, int root, Milliseconds timeout) override {
    c10d::BroadcastOptions options;
    options.rootRank = root;
    options.timeout = timeout + kGrace;
    std::vector<at::Tensor> tensors{bytes_of(tensor)};
    return start(timeout, [&] { return connections_->group->broadcast(tensors, options); });
  }

  TransportWorkPtr exchange(const std::vector<Message>& messages, Milliseconds timeout) override {
    return start_messages(timeout, [&](std::vector<GroupWork>& works) {
      for (const Message& message : messages) {
        const at::Tensor bytes = bytes_of(message.tensor);
        works.push_back(message.is_sent ? send_bytes(kMessageTags, bytes, message.peer)
                                        : receive_bytes(kMessageTags, bytes, message.peer));
      }
    });
  }

  // Gloo has no abort, but when an operation passes its deadline it closes all connections of its group: here
  // everything that waits throws at once, and the peers see closed connections. So we let one pass its
  // deadline.
  void abort() noexcept override {
    if (connections_->ended.exchange(true)) return;
    const NoBrokenPipe guard;
    for (int peer = 0; peer < world_size_; ++peer) {
      if (peer == rank_) continue;
      try {
        std::vector<at::Tensor> nothing{at::empty({1}, at::kByte)};
        connections_->group->recv(nothing, peer, kNeverTag)->wait(Milliseconds(1));
      } catch (const std::exception&) {  // the connection is closed, now or since before
      }
    }
  }

 private:
  // Gloo has all_to_all operations, but a pair of counts that contradict each other would end the process
  // there.
  TransportWorkPtr exchange_chunks(const std::vector<at::Tensor>& received,
                                   const std::vector<at::Tensor>& sent, Milliseconds timeout,
                                   std::function<void()> after = nullptr) {
    const at::Tensor &to_self = sent[static_cast<size_t>(rank_)],
                     &from_self = received[static_cast<size_t>(rank_)];
    require<Error>(to_self.numel() == from_self.numel(), "this rank sends itself ", to_self.numel(),
                   " bytes, but expects ", from_self.numel());
    const at::NoGradGuard no_grad;
    if (from_self.const_data_ptr() != to_self.const_data_ptr()) from_self.copy_(to_self);
    return start_messages(
        timeout,
        [&](std::vector<GroupWork>& works) {
          // Each rank begins with its neighbour, so that not all send to the same one.
          for (int distance = 1; distance < world_size_; ++distance) {
            const int from = (rank_ + world_size_ - distance) % world_size_;
            const at::Tensor& chunk = received[static_cast<size_t>(from)];
            if (chunk.numel() > 0) works.push_back(receive_bytes(kExchangeTags, chunk, from));
          }
          for (int distance = 1; distance < world_size_; ++distance) {
            const int to = (rank_ + distance) % world_size_;
            const at::Tensor& chunk = sent[static_cast<size_t>(to)];
            if (chunk.numel() > 0) works.push_back(send_bytes(kExchangeTags, chunk, to));
          }
        },
        std::move(after));
  }

  static std::vector<at::Tensor> chunks_of(const at::Tensor& tensor, const std::vector<int64_t>& counts) {
    std::vector<at::Tensor> chunks;
    const at::Tensor bytes = bytes_of(tensor);
    int64_t offset = 0;
    for (const int64_t count : counts) {
      const int64_t size = count * static_cast<int64_t>(tensor.element_size());
      chunks.push_back(bytes.narrow(0, offset, size));
      offset += size;
    }
    return chunks;
  }

  GroupWork send_bytes(int kind, const at::Tensor& bytes, int to) {
    std::vector<at::Tensor> tensors{bytes};
    return connections_->group->send(tensors, to, tag_of(kind, bytes));
  }
  GroupWork receive_bytes(int kind, const at::Tensor& bytes, int from) {
    std::vector<at::Tensor> tensors{bytes};
    return connections_->group->recv(tensors, from, tag_of(kind, bytes));
  }

  template <class F>
  TransportWorkPtr start(Milliseconds timeout, const F& f) {
    GroupWork work;
    call([&] { work = f(); });
    return make_gloo_work(connections_, std::move(work), timeout);
  }
  template <class F>
  TransportWorkPtr start_messages(Milliseconds timeout, const F& f, std::function<void()> after = nullptr) {
    std::vector<GroupWork> works;
    call([&] { f(works); });
    return make_gloo_messages(connections_, std::move(works), timeout, std::move(after));
  }
  template <class F>
  void call(const F& f) {
    connections_->require_open();
    const NoBrokenPipe guard;
    const std::lock_guard<std::mutex> lock(connections_->starting);
    try {
      f();
    } catch (const std::exception& error) {
      connections_->require_open();
      throw Error("Gloo: " + words_of_gloo(error));
    }
  }

  const int rank_;
  const int world_size_;
  const std::shared_ptr<Connections> connections_;
};

}  // namespace

std::shared_ptr<Transport> make_gloo_transport(const GlooSetup& setup) {
  return std::make_shared<GlooTransport>(setup);
}

}  // namespace pacer::detail
