// Whether ranks call the same, the groups that are split off, and what a failure says. How an operation is started is
// in communicator_operations.cpp.
#include <pacer/collectives/detail/communicator_state.h>

#include <algorithm>
#include <cstring>
#include <tuple>
#include <utility>

#include <ATen/ops/zeros.h>

#include <pacer/core/error.h>
#include <pacer/files/crc32c.h>

namespace pacer::detail {

CommunicatorState::CommunicatorState(Connection connection, CommunicatorOptions options,
                                     std::shared_ptr<World> world, std::string name, std::string counted_as,
                                     std::vector<int> ranks)
    : connection_(std::move(connection)),
      options_(std::move(options)),
      world_(std::move(world)),
      name_(std::move(name)),
      counted_as_(std::move(counted_as)),
      ranks_(std::move(ranks)),
      operations_(connection_.data),
      messages_(connection_.control) {
  world_->add(connection_);
}

void CommunicatorState::compare(CallRecord record, const CollectiveOptions& options) {
  if (connection_.world_size == 1 || options.agreed() || !options_.check_calls()) return;
  world_->require_working();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    record.number = ++collectives_;
  }
  const std::vector<CallRecord> records = gather(record, options);
  for (int rank = 1; rank < connection_.world_size; ++rank) {
    const CallRecord &first = records[0], &other = records[static_cast<size_t>(rank)];
    if (std::memcmp(&other, &first, sizeof(CallRecord)) == 0) continue;
    throw CommunicationError(
        concatenate("the ranks do not call the same operation", name_.empty() ? "" : " in ", name_, ": rank ",
                    rank_in_world(0), " ", describe_agreement(&first), ", rank ", rank_in_world(rank), " ",
                    describe_agreement(&other),
                    "; nothing was sent, call the same operations in the same order on every rank"),
        record.operation, record.number, world_->step(), {rank_in_world(rank)});
  }
}

namespace {

// What a rank tells the others of the group it wants to be in. Numbers only, as it travels.
struct Wish {
  int64_t color, key, rank, host, node;
};

bool comes_before(const Wish& a, const Wish& b) {
  return std::tie(a.color, a.key, a.rank) < std::tie(b.color, b.key, b.rank);
}

// Ranks of one host among the group's, and of one node, as Connection has them.
void place_in_group(Connection& group, const std::vector<Wish>& members) {
  const Wish& own = members[static_cast<size_t>(group.rank)];
  group.local_size = group.local_rank = 0;
  std::map<int64_t, int> of_node;
  bool in_a_row = own.node >= 0;
  for (size_t i = 0; i < members.size(); ++i) {
    if (members[i].host == own.host) {
      if (static_cast<int>(i) < group.rank) ++group.local_rank;
      ++group.local_size;
    }
    in_a_row = in_a_row && (i == 0 || members[i].node >= members[i - 1].node);
    ++of_node[members[i].node];
  }
  for (const auto& [node, count] : of_node) in_a_row = in_a_row && count == of_node.begin()->second;
  group.ranks_per_node = in_a_row ? of_node.begin()->second : members.size() == 1 ? 1 : 0;
}

}  // namespace

std::shared_ptr<CommunicatorState> CommunicatorState::split(int color, int key, const std::string& name) {
  CallRecord record;
  const std::string call = concatenate("split", name.empty() ? "" : " ", name);
  std::strncpy(record.operation, call.c_str(), sizeof(record.operation) - 1);
  record.list = crc32c(name);
  record.dtype = record.elements = -1;
  compare(record, {});
  const Wish own{color, key, connection_.rank, connection_.host, connection_.node};
  std::vector<Wish> members;
  for (const Wish& wish : gather(own, {})) {
    if (color >= 0 && wish.color == color) members.push_back(wish);
  }
  std::sort(members.begin(), members.end(), comes_before);
  GroupMembership membership;
  for (const Wish& wish : members) {
    if (wish.rank == connection_.rank) membership.rank = static_cast<int>(membership.members.size());
    membership.members.push_back(static_cast<int>(wish.rank));
    membership.in_world.push_back(rank_in_world(membership.members.back()));
  }
  int64_t sequence = 0;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    membership.number = ++splits_;
    sequence = ++sequence_;
  }
  Connection group;
  try {
    group = connection_.join(membership);
  } catch (const std::exception& error) {
    fail("split", sequence, error.what());
  }
  if (members.empty()) return nullptr;
  group.rank = membership.rank;
  group.world_size = static_cast<int>(members.size());
  group.host = connection_.host;
  group.node = connection_.node;
  group.rank_health = connection_.rank_health;
  place_in_group(group, members);
  const auto inside = [](const std::string& own, const std::string& outer) {
    return outer.empty() ? own : concatenate(own, " of ", outer);
  };
  const std::string color_name = concatenate("group ", color);
  const std::string own_name = name.empty() ? concatenate(color_name, " of split ", membership.number) : name;
  return std::make_shared<CommunicatorState>(std::move(group), options_, world_, inside(own_name, name_),
                                             inside(name.empty() ? color_name : name, counted_as_),
                                             std::move(membership.in_world));
}

std::shared_ptr<Communicator> CommunicatorState::kept(const std::string& name, int color) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = kept_.find(name);
    if (found != kept_.end()) return found->second;
  }
  const auto made = split(color, connection_.rank, name);
  made->connect_neighbours();
  const std::lock_guard<std::mutex> lock(mutex_);
  return kept_.emplace(name, std::make_shared<Communicator>(made)).first->second;
}

void CommunicatorState::connect_neighbours() {
  const int ranks = connection_.world_size, next = (connection_.rank + 1) % ranks;
  const int former = (connection_.rank + ranks - 1) % ranks;
  if (ranks == 1) return;
  const at::TensorOptions bytes = at::TensorOptions(at::kByte).device(connection_.data->device());
  std::vector<Message> messages;
  for (const int peer : next == former ? std::vector<int>{next} : std::vector<int>{next, former}) {
    messages.push_back(Message::send(at::zeros({1}, bytes), peer));
    messages.push_back(Message::receive(at::zeros({1}, bytes), peer));
  }
  start("agreement", 1, {}, TransportCall([=](Transport& transport, Transport::Milliseconds timeout) {
          return transport.exchange(messages, timeout);
        }))
      .wait();
}

void CommunicatorState::fail(const std::string& operation, int64_t sequence, const std::string& cause) {
  world_->fail([&](int64_t step) {
    const RankHealth::FailureReport found = connection_.rank_health->find_suspects(ranks_);
    std::string where = concatenate(operation, " number ", sequence);
    if (!name_.empty()) where += " in " + name_;
    if (step >= 0) where += concatenate(" (step ", step, ")");
    const std::string words = first_line(cause);
    const std::string reason = found.text.empty() ? words : concatenate(found.text, "; ", words);
    connection_.rank_health->tell_failure(where, {found.ranks, reason});
    return CommunicationError(concatenate(where, " failed on rank ", world_->rank(), " of ", world_->size(),
                                          ": ", reason, "; end this run and resume from the last checkpoint"),
                              operation, sequence, step, found.ranks);
  });
}

}  // namespace pacer::detail
