#include <pacer/collectives/detail/process_identity.h>

#include <unistd.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <numeric>
#include <sstream>

#include <pacer/collectives/communication_error.h>
#include <pacer/core/error.h>

namespace pacer::detail {
namespace {

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

}  // namespace

ProcessIdentity ProcessIdentity::myself(int world_size) {
  ProcessIdentity own;
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

std::string ProcessIdentity::to_text() const {
  return concatenate(world_size, ' ', process, ' ', start, ' ', network, ' ', numbers);
}

std::optional<ProcessIdentity> ProcessIdentity::parse(const std::string& text) {
  std::istringstream fields(text);
  ProcessIdentity process;
  fields >> process.world_size >> process.process >> process.start >> process.network >> process.numbers;
  if (!fields) return std::nullopt;
  return process;
}

bool ProcessIdentity::has_ended(const ProcessIdentity& own) const {
  const bool is_of_host = process != 0 && numbers == own.numbers;
  const bool is_this_process = process == own.process && start == own.start;
  return is_of_host && !is_this_process && start_of(process) != start;
}

void require_alive(const std::vector<std::optional<ProcessIdentity>>& processes, const ProcessIdentity& own,
                   const std::string& place) {
  for (size_t rank = 0; rank < processes.size(); ++rank) {
    if (!processes[rank] || !processes[rank]->has_ended(own)) continue;
    fail_rendezvous(
        concatenate("rank ", rank, " (process ", processes[rank]->process,
                    ") has ended while the ranks met at ", place,
                    "; see what it printed, or, if it is of an earlier run, choose another place to meet"),
        {static_cast<int>(rank)});
  }
}

void fail_rendezvous(const std::string& what, const std::vector<int>& suspects) {
  throw CommunicationError(what, "rendezvous", 0, -1, suspects);
}

std::vector<int> all_ranks(int world_size) {
  std::vector<int> ranks(static_cast<size_t>(world_size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

std::string names_of(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) {
    text += (i == 0 ? "" : i + 1 == ranks.size() ? " and " : ", ") + std::to_string(ranks[i]);
  }
  return text;
}

}  // namespace pacer::detail
