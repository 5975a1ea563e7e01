#include <pacer/collectives/detail/world.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <utility>

#include <pacer/core/error.h>

namespace pacer::detail {
namespace {

std::atomic<int> process_worlds{0};  // that are alive and join several processes

}  // namespace

World::World(std::shared_ptr<RankHealth> rank_health, int rank, int size, bool joins_processes)
    : rank_health_(std::move(rank_health)), rank_(rank), size_(size), joins_processes_(joins_processes) {
  if (joins_processes_) ++process_worlds;
}

World::~World() {
  if (joins_processes_) --process_worlds;
  // Where an exception ends this rank, the others must not take that for the normal end.
  if (!failure_ && std::uncaught_exceptions() == 0) rank_health_->leave_quietly();
}

bool World::joins_processes() { return process_worlds > 0; }

void World::add(const Connection& connection) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto is_gone = [](const std::weak_ptr<Transport>& transport) { return transport.expired(); };
  transports_.erase(std::remove_if(transports_.begin(), transports_.end(), is_gone), transports_.end());
  transports_.push_back(connection.data);
  transports_.push_back(connection.control);
}

std::vector<std::shared_ptr<Transport>> World::transports() const {
  std::vector<std::shared_ptr<Transport>> alive;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& transport : transports_) {
    if (auto found = transport.lock()) alive.push_back(std::move(found));
  }
  return alive;
}

void World::require_working() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (failure_) throw *failure_;
}

bool World::has_failed() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return failure_ != nullptr;
}

void World::check(const std::function<void(const std::string& cause)>& fail) {
  require_working();
  const auto all = transports();  // memory that is short here is no failure of theirs
  try {
    for (const auto& transport : all) transport->check();
  } catch (const std::exception& error) {
    fail(error.what());
  }
}

// True for the first.
bool World::keep(CommunicationError failure) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (failure_) return false;
  failure_ = std::make_shared<const CommunicationError>(std::move(failure));
  return true;
}

// All begin before one is waited for: each may need what another still holds.
void World::abort_all() noexcept {
  const auto all = transports();
  for (const auto& transport : all) transport->start_abort();
  for (const auto& transport : all) transport->abort();
}

void World::fail(const std::function<CommunicationError(int64_t step)>& describe) {
  const std::lock_guard<std::mutex> one_at_a_time(failing_);
  require_working();
  // The others notice sooner, so that all take part in the search for the cause.
  abort_all();
  keep(describe(step()));
  const std::lock_guard<std::mutex> lock(mutex_);
  throw *failure_;
}

void World::leave(const std::string& reason) noexcept {
  try {
    const std::string line = first_line(reason);
    if (!keep(CommunicationError(concatenate("rank ", rank_, " has left its ", size_ - 1, " peers: ", line),
                                 "leave", 0, step(), {rank_}))) {
      return;
    }
    rank_health_->leave(line);
  } catch (const std::exception&) {  // then they find out by the broken connection
  }
  abort_all();
}

void World::abort() noexcept {
  try {
    keep(CommunicationError(concatenate("the communicator of rank ", rank_, " was aborted"), "abort", 0,
                            step(), {}));
  } catch (const std::exception&) {  // no memory for words
  }
  abort_all();
}

void World::count(const std::string& group, const char* operation, int64_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (failure_) throw *failure_;
  const auto found = std::find_if(traffic_.begin(), traffic_.end(), [&](const Traffic& entry) {
    return entry.phase == phase_ && entry.group == group && entry.operation == operation;
  });
  Traffic& entry =
      found != traffic_.end() ? *found : traffic_.emplace_back(Traffic{phase_, group, operation});
  ++entry.calls;
  entry.bytes_sent += bytes;
}

int64_t World::step() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return step_;
}

void World::set_step(int64_t step) {
  const std::lock_guard<std::mutex> lock(mutex_);
  step_ = step;
}

void World::set_phase(const std::string& phase) {
  const std::lock_guard<std::mutex> lock(mutex_);
  phase_ = phase;
}

std::vector<Traffic> World::traffic() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return traffic_;
}

}  // namespace pacer::detail
