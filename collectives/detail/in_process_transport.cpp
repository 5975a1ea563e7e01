#include <pacer/collectives/detail/in_process_transport.h>

#include <condition_variable>
#include <map>
#include <mutex>
#include <tuple>
#include <utility>

#include <ATen/core/grad_mode.h>

#include <pacer/collectives/detail/rank_health.h>
#include <pacer/core/error.h>

namespace pacer::detail {
namespace {

using Milliseconds = Transport::Milliseconds;
using Clock = std::chrono::steady_clock;

// What one rank brings to an operation.
struct Part {
  std::string operation;
  at::Tensor output, input;
  std::vector<int64_t> output_counts, input_counts;
  int root = 0;
};

// One operation of all ranks, or one message between two.
struct Gathering {
  explicit Gathering(size_t ranks) : parts(ranks) {}
  std::vector<Part> parts;
  size_t arrived = 0;
  bool done = false;
  std::string error;
};

int64_t offset_of(const std::vector<int64_t>& counts, size_t chunk) {
  int64_t offset = 0;
  for (size_t i = 0; i < chunk; ++i) offset += counts[i];
  return offset;
}

at::Tensor piece(const at::Tensor& tensor, int64_t offset, int64_t count) {
  return tensor.view({-1}).narrow(0, offset, count);
}

// terms[first] + terms[first + 1] + ... + terms[first - 1]
at::Tensor sum_from(size_t first, const std::vector<at::Tensor>& terms) {
  at::Tensor sum = terms[first].clone();
  for (size_t i = 1; i < terms.size(); ++i) sum.add_(terms[(first + i) % terms.size()]);
  return sum;
}

at::Tensor sum_of(const std::vector<at::Tensor>& terms, SumOrder order) {
  if (order == SumOrder::ranks) return sum_from(0, terms);
  const auto ranks = static_cast<int64_t>(terms.size());
  const int64_t elements = terms.front().numel();
  at::Tensor sum = terms.front().clone();
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const int64_t begin = elements * rank / ranks, count = elements * (rank + 1) / ranks - begin;
    std::vector<at::Tensor> chunks;
    for (const at::Tensor& term : terms) chunks.push_back(piece(term, begin, count));
    piece(sum, begin, count).copy_(sum_from(static_cast<size_t>(rank), chunks));
  }
  return sum;
}

void check_alike(const Gathering& gathering) {
  for (const Part& part : gathering.parts) {
    const Part& first = gathering.parts.front();
    const bool alike = part.operation == first.operation && part.root == first.root &&
                       part.output.scalar_type() == first.output.scalar_type() &&
                       (part.operation == "all_to_all" || part.output.numel() == first.output.numel());
    require<Error>(alike, "ranks call different operations: ", first.operation, " of ", first.output.numel(),
                   " elements and ", part.operation, " of ", part.output.numel());
  }
}

// What all ranks came for. Every part is there.
void perform(Gathering& gathering, SumOrder order) {
  const at::NoGradGuard no_grad;
  std::vector<Part>& parts = gathering.parts;
  const auto ranks = static_cast<int64_t>(parts.size());
  const std::string& operation = parts.front().operation;
  if (operation == "all_reduce") {
    std::vector<at::Tensor> terms;
    for (const Part& part : parts) terms.push_back(part.output);
    const at::Tensor sum = sum_of(terms, order);
    for (Part& part : parts) part.output.copy_(sum);
  } else if (operation == "reduce_scatter") {
    for (int64_t r = 0; r < ranks; ++r) {
      at::Tensor& output = parts[static_cast<size_t>(r)].output;
      std::vector<at::Tensor> terms;
      for (const Part& part : parts) terms.push_back(piece(part.input, r * output.numel(), output.numel()));
      const size_t first = order == SumOrder::ring ? static_cast<size_t>(r) : 0;
      output.copy_(sum_from(first, terms).view_as(output));
    }
  } else if (operation == "all_gather") {
    for (int64_t r = 0; r < ranks; ++r) {
      const at::Tensor& input = parts[static_cast<size_t>(r)].input;
      for (Part& part : parts) piece(part.output, r * input.numel(), input.numel()).copy_(input.view({-1}));
    }
  } else if (operation == "all_to_all") {
    for (size_t to = 0; to < parts.size(); ++to) {
      for (size_t from = 0; from < parts.size(); ++from) {
        const int64_t count = parts[from].input_counts[to];
        require<Error>(count == parts[to].output_counts[from], "rank ", from, " sends ", count,
                       " elements to rank ", to, ", which expects ", parts[to].output_counts[from]);
        piece(parts[to].output, offset_of(parts[to].output_counts, from), count)
            .copy_(piece(parts[from].input, offset_of(parts[from].input_counts, to), count));
      }
    }
  } else if (operation == "broadcast") {
    const at::Tensor& source = parts[static_cast<size_t>(parts.front().root)].output;
    for (Part& part : parts) {
      if (!part.output.is_same(source)) part.output.copy_(source);
    }
  } else {  // a message: part 0 sends, part 1 receives
    const at::Tensor &sent = parts[0].input, &received = parts[1].output;
    require<Error>(sent.numel() == received.numel() && sent.scalar_type() == received.scalar_type(),
                   "a message of ", sent.numel(), " elements of ", sent.scalar_type(), " for a receiver of ",
                   received.numel(), " of ", received.scalar_type());
    received.copy_(sent.view_as(received));
  }
}

// Where the ranks of one channel meet.
class Hub {
 public:
  Hub(size_t ranks, SumOrder order) : ranks_(ranks), order_(order) {}
  size_t ranks() const { return ranks_; }
  SumOrder order() const { return order_; }

  std::shared_ptr<Gathering> join(int64_t number, size_t rank, Part part) {
    return join(collectives_, number, ranks_, rank, std::move(part));
  }

  // Message number `number` from one rank to another; side 0 sends, side 1 receives.
  std::shared_ptr<Gathering> join_message(size_t from, size_t to, int64_t number, size_t side, Part part) {
    return join(messages_, std::make_tuple(from, to, number), 2, side, std::move(part));
  }

  void wait(const Gathering& gathering, Clock::time_point deadline) {
    std::unique_lock<std::mutex> lock(mutex_);
    const bool ended = changed_.wait_until(lock, deadline, [&] { return gathering.done || aborted_; });
    if (!ended) throw TransportTimeout("not every rank came before the deadline");
    if (!gathering.done) throw Error("a rank ended the communication");
    if (!gathering.error.empty()) throw Error(gathering.error);
  }

  bool is_done(const Gathering& gathering) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return gathering.done || aborted_;
  }

  void abort() {
    const std::lock_guard<std::mutex> lock(mutex_);
    aborted_ = true;
    changed_.notify_all();
  }

 private:
  template <class Key>
  std::shared_ptr<Gathering> join(std::map<Key, std::shared_ptr<Gathering>>& gatherings, const Key& key,
                                  size_t size, size_t part_number, Part part) {
    const std::lock_guard<std::mutex> lock(mutex_);
    require<Error>(!aborted_, "a rank ended the communication");
    std::shared_ptr<Gathering>& place = gatherings[key];
    if (place == nullptr) place = std::make_shared<Gathering>(size);
    const std::shared_ptr<Gathering> gathering = place;
    gathering->parts[part_number] = std::move(part);
    if (++gathering->arrived < size) return gathering;
    gatherings.erase(key);
    try {
      if (gathering->parts.front().operation != "message") check_alike(*gathering);
      perform(*gathering, order_);
    } catch (const std::exception& error) {
      gathering->error = error.what();
    }
    gathering->done = true;
    gathering->parts.clear();
    changed_.notify_all();
    return gathering;
  }

  const size_t ranks_;
  const SumOrder order_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool aborted_ = false;
  std::map<int64_t, std::shared_ptr<Gathering>> collectives_;
  std::map<std::tuple<size_t, size_t, int64_t>, std::shared_ptr<Gathering>> messages_;
};

class InProcessWork : public TransportWork {
 public:
  InProcessWork(std::shared_ptr<Hub> hub, std::shared_ptr<Gathering> gathering, Milliseconds timeout)
      : hub_(std::move(hub)), meeting_(std::move(gathering)), deadline_(Clock::now() + timeout) {}
  void wait() override { hub_->wait(*meeting_, deadline_); }
  bool is_done() override { return hub_->is_done(*meeting_); }

 private:
  std::shared_ptr<Hub> hub_;
  std::shared_ptr<Gathering> meeting_;
  Clock::time_point deadline_;
};

class InProcessTransport : public Transport {
 public:
  InProcessTransport(std::shared_ptr<Hub> hub, int rank)
      : hub_(std::move(hub)),
        rank_(static_cast<size_t>(rank)),
        sent_(hub_->ranks()),
        received_(hub_->ranks()) {}

  std::string name() const override { return "threads"; }
  at::Device device() const override { return at::kCPU; }
  bool sums_in_rank_order() const override { return hub_->order() == SumOrder::ranks; }
  bool gathers_in_one_hop() const override { return true; }

  TransportWorkPtr all_reduce(const at::Tensor& tensor, Milliseconds timeout) override {
    return collective({"all_reduce", tensor, {}, {}, {}}, timeout);
  }
  TransportWorkPtr reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                                  Milliseconds timeout) override {
    return collective({"reduce_scatter", output, input, {}, {}}, timeout);
  }
  TransportWorkPtr all_gather(const at::Tensor& output, const at::Tensor& input,
                              Milliseconds timeout) override {
    return collective({"all_gather", output, input, {}, {}}, timeout);
  }
  TransportWorkPtr all_to_all(const at::Tensor& output, const std::vector<int64_t>& output_counts,
                              const at::Tensor& input, const std::vector<int64_t>& input_counts,
                              Milliseconds timeout) override {
    return collective({"all_to_all", output, input, output_counts, input_counts}, timeout);
  }
  TransportWorkPtr broadcast(const at::Tensor& tensor, int root, Milliseconds timeout) override {
    return collective({"broadcast", tensor, {}, {}, {}, root}, timeout);
  }
  TransportWorkPtr exchange(const std::vector<Message>& messages, Milliseconds timeout) override {
    std::vector<TransportWorkPtr> works;
    for (const Message& message : messages) {
      const auto peer = static_cast<size_t>(message.peer);
      const at::Tensor& tensor = message.tensor;
      // What is sent is copied, so that ranks that send first do not wait for each other.
      works.push_back(work(
          message.is_sent
              ? hub_->join_message(rank_, peer, sent_[peer]++, 0, {"message", {}, tensor.clone(), {}, {}})
              : hub_->join_message(peer, rank_, received_[peer]++, 1, {"message", tensor, {}, {}, {}}),
          timeout));
    }
    return joined(std::move(works));
  }
  void abort() noexcept override { hub_->abort(); }

 private:
  TransportWorkPtr collective(Part part, Milliseconds timeout) {
    return work(hub_->join(number_++, rank_, std::move(part)), timeout);
  }
  TransportWorkPtr work(std::shared_ptr<Gathering> gathering, Milliseconds timeout) const {
    return std::make_unique<InProcessWork>(hub_, std::move(gathering), timeout);
  }

  std::shared_ptr<Hub> hub_;
  const size_t rank_;
  int64_t number_ = 0;
  std::vector<int64_t> sent_, received_;
};

// The two hubs of a communicator, and those of the groups that were split off it: ranks that are in one group
// come to the same ones.
struct Hubs {
  Hubs(size_t ranks, SumOrder order)
      : data(std::make_shared<Hub>(ranks, order)), control(std::make_shared<Hub>(ranks, SumOrder::ranks)) {}

  std::shared_ptr<Hubs> group(const GroupMembership& membership) {
    const std::lock_guard<std::mutex> lock(mutex);
    std::weak_ptr<Hubs>& place = groups[{membership.number, membership.members.front()}];
    std::shared_ptr<Hubs> hubs = place.lock();
    if (hubs == nullptr) place = hubs = std::make_shared<Hubs>(membership.members.size(), data->order());
    return hubs;
  }

  const std::shared_ptr<Hub> data, control;
  std::mutex mutex;
  std::map<std::pair<int, int>, std::weak_ptr<Hubs>> groups;
};

Connection join(const std::shared_ptr<Hubs>& hubs, int rank) {
  Connection connection;
  connection.data = std::make_shared<InProcessTransport>(hubs->data, rank);
  connection.control = std::make_shared<InProcessTransport>(hubs->control, rank);
  connection.join = [hubs](const GroupMembership& membership) {
    return membership.members.empty() ? Connection() : join(hubs->group(membership), membership.rank);
  };
  return connection;
}

}  // namespace

std::vector<Connection> connect_in_process(int world_size, int ranks_per_node, SumOrder order) {
  require(world_size >= 1, "a world of threads needs at least 1 rank, not ", world_size);
  const auto hubs = std::make_shared<Hubs>(static_cast<size_t>(world_size), order);
  const std::vector<std::shared_ptr<RankHealth>> rank_healths = RankHealth::of_threads(world_size);
  std::vector<Connection> connections;
  for (int rank = 0; rank < world_size; ++rank) {
    Connection connection = join(hubs, rank);
    connection.rank = connection.local_rank = rank;
    connection.world_size = connection.local_size = world_size;
    connection.ranks_per_node = ranks_per_node == 0 ? world_size : ranks_per_node;
    connection.rank_health = rank_healths[static_cast<size_t>(rank)];
    connections.push_back(std::move(connection));
  }
  return connections;
}

}  // namespace pacer::detail
