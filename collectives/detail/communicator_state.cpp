#include <pacer/collectives/detail/communicator_state.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <utility>

#include <ATen/ops/empty.h>
#include <c10/core/ScalarType.h>

#include <pacer/collectives/detail/roster.h>
#include <pacer/core/error.h>

namespace pacer::detail {

CommunicatorState::~CommunicatorState() {
  // Who unwinds an exception has not ended as it should.
  if (!failure_ && std::uncaught_exceptions() == 0) connection_.roster->retire();
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
  const Roster::Trouble found = connection_.roster->find_suspects(all_ranks(connection_.world_size));
  std::string at_step = step >= 0 ? concatenate(" (step ", step, ")") : std::string();
  const auto failure = std::make_shared<const CommunicationError>(
      concatenate(operation, " number ", sequence, at_step, " failed on rank ", connection_.rank, " of ",
                  connection_.world_size, ": ", found.text, found.text.empty() ? "" : "; ", cause,
                  "; end this run and resume from the last checkpoint"),
      operation, sequence, step, found.ranks);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    failure_ = failure;
  }
  connection_.roster->tell_failure(operation, found);
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
    connection_.roster->leave(reason);
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
