#include <pacer/collectives/detail/communicator_state.h>

#include <algorithm>
#include <cstring>
#include <thread>
#include <utility>

#include <ATen/ops/empty.h>
#include <c10/core/ScalarType.h>

#include <pacer/core/error.h>

namespace pacer::detail {
namespace {

// How long survivors wait for each other's sign of life.
constexpr std::chrono::milliseconds kRollCall{1000};

std::string key_of(const char* what, int rank) { return concatenate(what, "/", rank); }

std::string list(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) {
    text += (i == 0 ? "" : i + 1 == ranks.size() ? " and " : ", ") + std::to_string(ranks[i]);
  }
  return text;
}

}  // namespace

CommunicatorState::~CommunicatorState() {
  if (!queue_.is_busy()) return;
  connection_.data->abort();  // so that what is under way ends
}

Work CommunicatorState::start(const char* operation, int64_t bytes, OperationParts parts) {
  return pending(operation, bytes, [&] {
    const bool is_chain = parts.parts.size() > 1 || parts.after;
    if (!connection_.data->has_stream() || !is_chain) return queue_.start(std::move(parts));
    TransportWorkPtr work = connection_.data->run_on_stream([&] {
      for (const NextPart& part : parts.parts) {
        if (const TransportWorkPtr done = part()) done->wait();
      }
      if (parts.after) parts.after();
    });
    return std::make_shared<QueuedOperation>(std::move(work), std::move(parts));
  });
}

Work CommunicatorState::start_message(const char* operation, int64_t bytes, const NextPart& message) {
  return pending(operation, bytes,
                 [&] { return std::make_shared<QueuedOperation>(message(), OperationParts()); });
}

Work CommunicatorState::pending(const char* operation, int64_t bytes,
                                const std::function<std::shared_ptr<QueuedOperation>()>& start) {
  const int64_t sequence = count(operation, bytes);
  std::shared_ptr<QueuedOperation> queued;
  try {
    queued = start();
  } catch (const std::exception& error) {
    fail(operation, sequence, error.what());
  }
  return Work(std::make_shared<PendingOperation>(shared_from_this(), operation, sequence, std::move(queued)));
}

void CommunicatorState::compare(CallRecord record, std::chrono::milliseconds timeout) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (failure_) throw *failure_;
    record.number = ++collectives_;
  }
  constexpr auto kBytes = static_cast<int64_t>(sizeof(CallRecord));
  const at::Tensor own = at::empty({kBytes}, at::kByte);
  const at::Tensor all = at::empty({connection_.world_size * kBytes}, at::kByte);
  std::memcpy(own.mutable_data_ptr(), &record, sizeof(record));
  start_message("agreement", (connection_.world_size - 1) * kBytes, [=] {
    return connection_.control->all_gather(all, own, timeout);
  }).wait();
  const auto* records = static_cast<const CallRecord*>(all.const_data_ptr());
  for (int rank = 1; rank < connection_.world_size; ++rank) {
    if (std::memcmp(&records[rank], &records[0], sizeof(CallRecord)) == 0) continue;
    throw CommunicationError(
        concatenate("the ranks do not call the same operation: rank 0 ", describe_agreement(&records[0]),
                    ", rank ", rank, " ", describe_agreement(&records[rank]),
                    "; nothing was sent, call the same operations in the same order on every rank"),
        record.operation, record.number, step_, {rank});
  }
}

CommunicatorState::Suspects CommunicatorState::find_suspects() noexcept {
  Suspects suspects;
  try {
    NoticeBoard& board = *connection_.board;
    std::vector<int> silent;
    for (int rank = 0; rank < connection_.world_size; ++rank) {
      if (rank != connection_.rank) silent.push_back(rank);
    }
    board.post(key_of("alive", connection_.rank), "");
    const auto end = std::chrono::steady_clock::now() + kRollCall;
    for (bool first = true; !silent.empty(); first = false) {
      const auto answers = [&](int rank) {
        if (const auto reason = board.read(key_of("left", rank))) {
          suspects.ranks.push_back(rank);
          suspects.text += concatenate("rank ", rank, " left: ", *reason, "; ");
          return true;
        }
        return board.read(key_of("alive", rank)).has_value();
      };
      silent.erase(std::remove_if(silent.begin(), silent.end(), answers), silent.end());
      // Who left is the cause; there is no need to hear the rest.
      if (!suspects.ranks.empty() || std::chrono::steady_clock::now() >= end) break;
      if (!first) std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    if (suspects.ranks.empty() && !silent.empty()) {
      suspects.ranks = silent;
      suspects.text = concatenate("no sign of life from ", list(silent), "; ");
    }
  } catch (const BoardSilent&) {
    suspects.text += "the store where the ranks met does not answer; ";
  } catch (const std::exception&) {
    // The board is kept by rank 0, or by the launcher.
    suspects.text += "rank 0, or the launcher, has ended: the store where the ranks met cannot be reached; ";
    if (suspects.ranks.empty() && connection_.rank != 0) suspects.ranks = {0};
  }
  return suspects;
}

void CommunicatorState::fail(const std::string& operation, int64_t sequence, const std::string& cause) {
  const std::lock_guard<std::mutex> one_at_a_time(failing_);
  int64_t step = 0;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (failure_) throw *failure_;
    step = step_;
  }
  // The others notice sooner, so that all take part in the roll call.
  connection_.data->abort();
  connection_.control->abort();
  const Suspects suspects = find_suspects();
  std::string at_step = step >= 0 ? concatenate(" (step ", step, ")") : std::string();
  const auto failure = std::make_shared<const CommunicationError>(
      concatenate(operation, " number ", sequence, at_step, " failed on rank ", connection_.rank, " of ",
                  connection_.world_size, ": ", suspects.text, cause,
                  "; end this run and resume from the last checkpoint"),
      operation, sequence, step, suspects.ranks);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    failure_ = failure;
  }
  throw *failure;
}

void CommunicatorState::leave(const std::string& reason) noexcept {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (failure_) return;
    failure_ = std::make_shared<const CommunicationError>(
        concatenate("rank ", connection_.rank, " has left its ", connection_.world_size - 1,
                    " peers: ", reason),
        "leave", sequence_, step_, std::vector<int>{connection_.rank});
  }
  try {
    connection_.board->post(key_of("left", connection_.rank), reason);
  } catch (const std::exception&) {  // then they find out by the broken connection
  }
  connection_.data->abort();
  connection_.control->abort();
}

void CommunicatorState::abort() noexcept {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!failure_) {
      failure_ = std::make_shared<const CommunicationError>(
          concatenate("the communicator of rank ", connection_.rank, " was aborted"), "abort", sequence_,
          step_, std::vector<int>());
    }
  }
  connection_.data->abort();
  connection_.control->abort();
}

void CommunicatorState::check() {
  int64_t sequence = 0;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (failure_) throw *failure_;
    sequence = sequence_;
  }
  try {
    connection_.data->check();
  } catch (const std::exception& error) {
    fail("an operation up to", sequence, error.what());
  }
}

bool CommunicatorState::has_failed() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return failure_ != nullptr;
}

void CommunicatorState::set_step(int64_t step) {
  const std::lock_guard<std::mutex> lock(mutex_);
  step_ = step;
}

void CommunicatorState::set_phase(const std::string& phase) {
  const std::lock_guard<std::mutex> lock(mutex_);
  phase_ = phase;
}

std::vector<Traffic> CommunicatorState::traffic() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return traffic_;
}

// The number of the operation.
int64_t CommunicatorState::count(const char* operation, int64_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (failure_) throw *failure_;
  const auto found = std::find_if(traffic_.begin(), traffic_.end(), [&](const Traffic& entry) {
    return entry.phase == phase_ && entry.operation == operation;
  });
  Traffic& entry = found != traffic_.end() ? *found : traffic_.emplace_back(Traffic{phase_, operation});
  ++entry.calls;
  entry.bytes_sent += bytes;
  return ++sequence_;
}

void PendingOperation::wait() {
  try {
    queued_->wait();
  } catch (const std::exception& error) {
    state_->fail(operation_, sequence_, error.what());
  }
}

}  // namespace pacer::detail

namespace pacer {

void Work::wait() {
  if (operation_) operation_->wait();
}

bool Work::is_done() const { return operation_ == nullptr || operation_->is_done(); }

}  // namespace pacer
