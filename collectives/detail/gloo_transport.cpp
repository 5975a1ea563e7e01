// The only file that sees c10d's Gloo process group. Everything that is only moved is moved as bytes, so that
// any dtype will do; sums are Gloo's own.
#include <pacer/collectives/detail/gloo_transport.h>

#include <exception>
#include <functional>
#include <mutex>
#include <utility>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <pacer/collectives/detail/gloo_store.h>
#include <pacer/collectives/detail/gloo_thread.h>
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

// Gloo's own deadlines come after ours, which are kept by a clock that cannot be set.
constexpr Milliseconds kGrace{500};
// A deadline that is over on every clock, also on one that was set back.
constexpr Milliseconds kOverAtOnce = -std::chrono::hours(24 * 365);

// Bytes from which on the time of a message counts, and not the wait for it.
constexpr int64_t kLongMessage = 128 << 10;

// abort() waits so long: closing a connection takes Gloo up to 10 ms.
Milliseconds abort_limit(int world_size) { return Milliseconds(1000) + world_size * Milliseconds(20); }

// The tensor's memory as one row of bytes that keeps it alive.
at::Tensor bytes_of(const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  return tensor.detach().view({-1}).view(at::kByte);
}

class Connections final : public GlooGroup {
 public:
  Connections(const GlooSetup& setup, const std::function<void()>& met)
      : rank_(setup.rank), world_size_(setup.world_size) {
    const auto store = c10::make_intrusive<GlooStore>([gather = setup.gather, met](const std::string& own) {
      std::vector<std::string> all = gather(own);
      met();
      return all;
    });
    const auto options = c10d::ProcessGroupGloo::Options::create(setup.timeout + kGrace);
    options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname(setup.address));
    group_ = c10::make_intrusive<c10d::ProcessGroupGloo>(store, rank_, world_size_, options);
  }

  // The group is not made for several threads. On the caller's only what does not touch connections.
  std::timed_mutex starting;
  c10d::ProcessGroupGloo& group() { return *group_; }

  GroupWork send(int kind, const at::Tensor& bytes, int to) {
    std::vector<at::Tensor> tensors{bytes};
    return group_->send(tensors, to, tag_of(kind, bytes));
  }
  GroupWork receive(int kind, const at::Tensor& bytes, int from) {
    std::vector<at::Tensor> tensors{bytes};
    return group_->recv(tensors, from, tag_of(kind, bytes));
  }

  // Gloo has no abort, but when an operation passes its deadline it closes all connections of its group: here
  // everything that waits throws at once, and the peers see closed connections. So we let one pass its
  // deadline.
  void close() override {
    const std::lock_guard<std::timed_mutex> lock(starting);
    for (int peer = 0; peer < world_size_; ++peer) {
      if (peer == rank_) continue;
      try {
        std::vector<at::Tensor> nothing{at::empty({1}, at::kByte)};
        group_->recv(nothing, peer, kNeverTag)->wait(kOverAtOnce);
      } catch (const std::exception&) {  // the connection is closed, now or since before
      }
    }
  }

 private:
  const int rank_, world_size_;
  c10::intrusive_ptr<c10d::ProcessGroupGloo> group_;
};

class GlooWork final : public TransportWork {
 public:
  GlooWork(std::shared_ptr<GlooThread> thread, std::shared_ptr<GlooOperation> operation,
           std::function<void()> after)
      : thread_(std::move(thread)), operation_(std::move(operation)), after_(std::move(after)) {}

  void wait() override {
    thread_->wait(*operation_);
    if (after_) std::exchange(after_, nullptr)();
  }
  bool is_done() override { return thread_->is_done(*operation_); }

 private:
  const std::shared_ptr<GlooThread> thread_;
  const std::shared_ptr<GlooOperation> operation_;
  std::function<void()> after_;
};

class GlooTransport final : public Transport {
 public:
  explicit GlooTransport(const GlooSetup& setup)
      : rank_(setup.rank),
        world_size_(setup.world_size),
        one_host_(setup.one_host),
        thread_(std::make_shared<GlooThread>(abort_limit(setup.world_size))),
        connections_(static_cast<Connections&>(thread_->connect(
            [setup](const std::function<void()>& met) { return std::make_unique<Connections>(setup, met); },
            setup.timeout))) {}
  ~GlooTransport() override {
    thread_->abort();
    thread_->release();
  }

  std::string name() const override { return "Gloo"; }
  at::Device device() const override { return at::kCPU; }

  TransportWorkPtr all_reduce(const at::Tensor& tensor, Milliseconds timeout) override {
    c10d::AllreduceOptions options;
    options.timeout = timeout + kGrace;
    std::vector<at::Tensor> tensors{tensor.detach()};
    return start(timeout, [&] { return connections_.group().allreduce(tensors, options); });
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
    return start(timeout, [&] { return connections_.group().broadcast(tensors, options); });
  }

  TransportWorkPtr exchange(const std::vector<Message>& messages, Milliseconds timeout) override {
    struct Part {
      at::Tensor bytes;
      int peer;
      bool is_sent;
    };
    std::vector<Part> parts;
    for (const Message& message : messages) {
      parts.push_back({bytes_of(message.tensor), message.peer, message.is_sent});
    }
    return start_messages(timeout, [parts = std::move(parts)](Connections& to) mutable {
      GlooMessages works;
      for (const Part& part : std::exchange(parts, {})) {
        works.push_back(part.is_sent ? to.send(kMessageTags, part.bytes, part.peer)
                                     : to.receive(kMessageTags, part.bytes, part.peer));
      }
      return works;
    });
  }

  void start_abort() noexcept override { thread_->start_abort(); }
  void abort() noexcept override { thread_->abort(); }

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
    const auto start = [received, sent, rank = rank_, world_size = world_size_, distance = 0,
                        at_once = peers_at_once(received, sent)](Connections& to) mutable {
      GlooMessages works;
      // Each rank begins with its neighbour, so that not all send to the same one.
      while (works.empty() && distance < world_size - 1) {
        const int begin = distance + 1;
        distance = std::min(distance + at_once, world_size - 1);
        for (int d = begin; d <= distance; ++d) {
          const int from = (rank + world_size - d) % world_size;
          const at::Tensor& chunk = received[static_cast<size_t>(from)];
          if (chunk.numel() > 0) works.push_back(to.receive(kExchangeTags, chunk, from));
        }
        for (int d = begin; d <= distance; ++d) {
          const int peer = (rank + d) % world_size;
          const at::Tensor& chunk = sent[static_cast<size_t>(peer)];
          if (chunk.numel() > 0) works.push_back(to.send(kExchangeTags, chunk, peer));
        }
      }
      return works;
    };
    return start_messages(timeout, start, std::move(after));
  }

  // Peers at a time. Where seven send to one link, TCP shares it so unevenly that it is idle for a sixth of
  // the time, so long messages go to one peer after the other.
  int peers_at_once(const std::vector<at::Tensor>& received, const std::vector<at::Tensor>& sent) const {
    if (one_host_) return world_size_;
    int64_t longest = 0;
    for (const auto* chunks : {&received, &sent}) {
      for (const at::Tensor& chunk : *chunks) longest = std::max(longest, chunk.numel());
    }
    return longest >= kLongMessage ? 1 : world_size_;
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

  // An operation of Gloo's own threads, which tell us when it is through. Starting it does not touch the
  // connections.
  template <class F>
  TransportWorkPtr start(Milliseconds timeout, const F& f) {
    thread_->require_open();
    const auto operation = std::make_shared<GlooOperation>(timeout);
    const std::unique_lock<std::timed_mutex> lock(connections_.starting, operation->deadline);
    if (!lock.owns_lock())
      return std::make_unique<GlooWork>(thread_, operation, nullptr);  // its deadline is over
    try {
      recorded(f)->getFuture()->addCallback(
          [thread = thread_, operation](c10::ivalue::Future& ended) {
            thread->finish(*operation, ended.hasError() ? ended.exception_ptr() : nullptr);
          },
          /*uses_future=*/false);
    } catch (const std::exception&) {  // rethrown by wait()
      thread_->finish(*operation, std::current_exception());
    }
    return std::make_unique<GlooWork>(thread_, operation, nullptr);
  }
  // c10d's flight recorder is one for all groups of the process. LibTorch 2.11 looks a group up there, and
  // enters it with its first operation, without a lock: where two threads do so at once, the program ends. So
  // operations that are recorded, all but messages, start one at a time.
  template <class F>
  static GroupWork recorded(const F& f) {
    static std::mutex recording;
    const std::lock_guard<std::mutex> lock(recording);
    return f();
  }
  // Messages that our thread starts.
  TransportWorkPtr start_messages(Milliseconds timeout, std::function<GlooMessages(Connections&)> f,
                                  std::function<void()> after = nullptr) {
    const auto operation = std::make_shared<GlooOperation>(timeout);
    operation->start = [f = std::move(f), &connections = connections_] {
      const std::lock_guard<std::timed_mutex> lock(connections.starting);
      return f(connections);
    };
    thread_->start(operation);
    return std::make_unique<GlooWork>(thread_, operation, std::move(after));
  }

  const int rank_;
  const int world_size_;
  const bool one_host_;
  const std::shared_ptr<GlooThread> thread_;
  Connections& connections_;  // the thread's
};

}  // namespace

std::shared_ptr<Transport> make_gloo_transport(const GlooSetup& setup) {
  return std::make_shared<GlooTransport>(setup);
}

}  // namespace pacer::detail
