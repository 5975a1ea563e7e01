#include <pacer/collectives/detail/roll_call.h>

#include <unistd.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <sstream>
#include <thread>
#include <utility>

#include <pacer/collectives/communication_error.h>
#include <pacer/core/error.h>

namespace pacer::detail {
namespace {

constexpr std::chrono::milliseconds kPoll{10};
// How often the processes are looked at, in polls.
constexpr int kLook = 5;

std::string key_of(int rank) { return "here/" + std::to_string(rank); }

std::string first_word_of(const std::string& path) {
  std::string word;
  std::ifstream(path) >> word;
  return word.empty() ? "-" : word;
}

std::string link_target(const char* path) {
  std::array<char, 64> target = {};
  const ssize_t size = ::readlink(path, target.data(), target.size());
  return size > 0 ? std::string(target.data(), static_cast<size_t>(size)) : "-";
}

// When the process began, or nothing where it has ended.
std::optional<std::string> start_of(int process) {
  std::ifstream file(concatenate("/proc/", process, "/stat"));
  std::string line;
  if (!std::getline(file, line)) return std::nullopt;
  // PID (NAME) STATE ...: the name may hold anything, so fields count from its last parenthesis.
  std::istringstream fields(line.substr(std::min(line.rfind(')') + 1, line.size())));
  std::string state, field;
  fields >> state;
  for (int number = 4; number <= 22; ++number) fields >> field;
  if (state == "Z" || state == "X") return std::nullopt;
  return field;
}

std::string numbers_of(const std::vector<int>& ranks) {
  std::string text;
  for (const int rank : ranks) text += (text.empty() ? "" : ", ") + std::to_string(rank);
  return text;
}

[[noreturn]] void fail(const std::string& what, const std::vector<int>& suspects) {
  throw CommunicationError(what, "rendezvous", 0, -1, suspects);
}

// What was found wrong, for the others: the suspects, 0 or more, a colon and the message.
constexpr const char* kVerdict = "verdict";

std::string to_verdict(const CommunicationError& error) {
  std::string text;
  for (const int rank : error.suspected_ranks()) text += std::to_string(rank) + ' ';
  return text + ':' + error.what();
}

[[noreturn]] void throw_verdict(const std::string& verdict) {
  const size_t colon = verdict.find(':');
  std::istringstream numbers(verdict.substr(0, colon));
  std::vector<int> suspects;
  for (int rank = 0; numbers >> rank;) suspects.push_back(rank);
  fail(verdict.substr(colon + 1), suspects);
}

}  // namespace

RollCall::Member RollCall::myself(int world_size) {
  Member own;
  own.world_size = world_size;
  own.process = static_cast<int>(::getpid());
  own.start = start_of(own.process).value_or("-");
  std::array<char, 256> host = {};
  ::gethostname(host.data(), host.size() - 1);
  // Containers of one machine have one boot_id, but networks and numbers of processes of their own.
  const std::string machine = concatenate(first_word_of("/proc/sys/kernel/random/boot_id"), '/', host.data());
  own.network = concatenate(machine, '/', link_target("/proc/self/ns/net"));
  own.numbers = concatenate(machine, '/', link_target("/proc/self/ns/pid"));
  return own;
}

std::string RollCall::to_text(const Member& member) {
  return concatenate(member.world_size, ' ', member.process, ' ', member.start, ' ', member.network, ' ',
                     member.numbers);
}

std::optional<RollCall::Member> RollCall::parse(const std::string& text) {
  std::istringstream fields(text);
  Member member;
  fields >> member.world_size >> member.process >> member.start >> member.network >> member.numbers;
  if (!fields) return std::nullopt;
  return member;
}

RollCall::RollCall(std::shared_ptr<NoticeBoard> board, int rank, int world_size, std::string place)
    : board_(std::move(board)),
      rank_(rank),
      place_(std::move(place)),
      own_(myself(world_size)),
      members_(static_cast<size_t>(world_size)) {}

void RollCall::enter() {
  const std::string own = to_text(own_);
  if (!board_->read(key_of(rank_))) board_->post(key_of(rank_), own);
  require(board_->read(key_of(rank_)) == own, "rank ", rank_, " of ", members_.size(), " is at ", place_,
          " already: two processes have the same rank, or something is left from an earlier run; start each "
          "rank once, and choose another place to meet");
}

void RollCall::read_new() {
  for (size_t rank = 0; rank < members_.size(); ++rank) {
    if (members_[rank]) continue;
    const std::optional<std::string> text = board_->read(key_of(static_cast<int>(rank)));
    if (!text) continue;
    const std::optional<Member> member = parse(*text);
    if (!member || member->world_size != own_.world_size) {
      fail(concatenate("rank ", rank_, " counts ", own_.world_size, " ranks, but rank ", rank, " counts ",
                       member ? std::to_string(member->world_size) : "in another way",
                       "; start all ranks of a run with the same world size and version of pacer"),
           {static_cast<int>(rank)});
    }
    members_[rank] = member;
  }
}

std::vector<int> RollCall::missing() const {
  std::vector<int> ranks;
  for (size_t rank = 0; rank < members_.size(); ++rank) {
    if (!members_[rank]) ranks.push_back(static_cast<int>(rank));
  }
  return ranks;
}

void RollCall::wait_until(Clock::time_point deadline, std::chrono::milliseconds timeout) {
  for (int poll = 1;; ++poll) {
    read_new();
    const std::vector<int> ranks = missing();
    if (ranks.empty()) return;
    if (const auto verdict = board_->read(kVerdict)) throw_verdict(*verdict);
    if (poll % kLook == 0) require_all_alive();
    if (Clock::now() >= deadline) {
      fail(concatenate("only ", members_.size() - ranks.size(), " of ", members_.size(), " ranks came to ",
                       place_, " within ", timeout.count(), " ms, without ",
                       ranks.size() == 1 ? "rank " : "ranks ", numbers_of(ranks),
                       "; start them all, or set a longer timeout"),
           ranks);
    }
    std::this_thread::sleep_for(kPoll);
  }
}

void RollCall::wait_for_all(std::chrono::milliseconds timeout) {
  const auto deadline = Clock::now() + timeout;
  enter();
  try {
    wait_until(deadline, timeout);
  } catch (const CommunicationError& error) {
    try {
      board_->post(kVerdict, to_verdict(error));
    } catch (const std::exception&) {  // then the others find out by themselves
    }
    throw;
  }
}

bool RollCall::has_everybody_come() const {
  for (size_t rank = 0; rank < members_.size(); ++rank) {
    if (!board_->read(key_of(static_cast<int>(rank)))) return false;
  }
  return true;
}

bool RollCall::is_one_host() const {
  return std::all_of(members_.begin(), members_.end(),
                     [&](const auto& member) { return member && member->network == own_.network; });
}

int RollCall::local_rank() const {
  return static_cast<int>(std::count_if(members_.begin(), members_.begin() + rank_, [&](const auto& member) {
    return member && member->network == own_.network;
  }));
}

int RollCall::local_size() const {
  return static_cast<int>(std::count_if(members_.begin(), members_.end(), [&](const auto& member) {
    return member && member->network == own_.network;
  }));
}

bool RollCall::has_ended(int rank) const {
  const std::optional<Member>& member = members_.at(static_cast<size_t>(rank));
  return member && member->numbers == own_.numbers && start_of(member->process) != member->start;
}

void RollCall::require_all_alive() const {
  for (size_t rank = 0; rank < members_.size(); ++rank) {
    const int number = static_cast<int>(rank);
    if (!has_ended(number)) continue;
    fail(concatenate("rank ", rank, " (process ", members_[rank]->process,
                     ") has ended while the ranks met at ", place_,
                     "; see what it printed, or, if it is of an earlier run, choose another place to meet"),
         {number});
  }
}

}  // namespace pacer::detail
