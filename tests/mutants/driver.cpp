// The main program around the test cases and the mutants. It starts once, and does what each line of its
// input asks for in a process of its own (a fork, so that LibTorch is loaded once):
//   SECONDS MUTANT CASE...   runs the cases, by their numbers, until one fails, with this mutant at work
//                            (0: none)
// The answer is one line: the word passed, failed, crashed or late, the case that it ended with, how long
// that took, and the numbers of the mutants whose places were reached. Without input it lists the cases:
// number, tags, name.
#define CATCH_CONFIG_RUNNER
#if __has_include(<catch2/catch_session.hpp>)
#include <catch2/catch_session.hpp>
#include <catch2/catch_test_case_info.hpp>
#include <catch2/interfaces/catch_interfaces_testcase.hpp>
#include <catch2/internal/catch_test_case_registry_impl.hpp>
#else
#include <catch2/catch.hpp>
#endif

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

namespace {

constexpr int kMutants = 1 << 16;
constexpr rlim_t kMemory = rlim_t{8} << 30;
constexpr rlim_t kFile = rlim_t{1} << 30;
unsigned char unseen[kMutants];  // for what runs before main

}  // namespace

int pacer_mutant = 0;
unsigned char* pacer_mutants_seen = unseen;

namespace {

struct Shared {
  int at;  // the case that runs
  unsigned char seen[kMutants];
};

#if __has_include(<catch2/catch_session.hpp>)
const Catch::TestCaseInfo& info_of(const Catch::TestCaseHandle& test) { return test.getTestCaseInfo(); }
#else
const Catch::TestCaseInfo& info_of(const Catch::TestCase& test) { return test; }
#endif

std::string escaped(const std::string& name) {
  std::string result = "\"";
  for (const char c : name) {
    if (c == '"' || c == '\\' || c == ',' || c == '[' || c == ']') result += '\\';
    result += c;
  }
  return result + '"';
}

int run(Catch::Session& session, const std::vector<std::string>& names, const std::vector<int>& cases,
        Shared& shared) {
  for (const int number : cases) {
    shared.at = number;
    session.configData().testsOrTags = {escaped(names[static_cast<size_t>(number)])};
    session.useConfigData(session.configData());
    if (session.run() != 0) return 1;
  }
  return 0;
}

void limit(int resource, rlim_t value) {
  const rlimit both{value, value};
  setrlimit(resource, &both);
}

[[noreturn]] void child(Catch::Session& session, const std::vector<std::string>& names,
                        const std::vector<int>& cases, Shared& shared) {
  setpgid(0, 0);
  const int null = open("/dev/null", O_RDWR);
  for (const int stream : {0, 1, 2}) dup2(null, stream);
  limit(RLIMIT_DATA, kMemory);
  limit(RLIMIT_FSIZE, kFile);
  limit(RLIMIT_CORE, 0);
  pacer_mutants_seen = shared.seen;
  _exit(run(session, names, cases, shared));
}

// Waits for the child, at most so long, and ends all that it started.
std::string outcome(pid_t process, double seconds) {
  const auto start = std::chrono::steady_clock::now();
  int status = 0;
  bool late = false;
  while (waitpid(process, &status, WNOHANG) == 0) {
    late = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() > seconds;
    if (late) break;
    usleep(2000);
  }
  kill(-process, SIGKILL);
  if (late) {
    kill(process, SIGKILL);
    waitpid(process, &status, 0);
    return "late";
  }
  if (!WIFEXITED(status)) return "crashed";
  return WEXITSTATUS(status) == 0 ? "passed" : WEXITSTATUS(status) == 1 ? "failed" : "crashed";
}

}  // namespace

int main() {
  Catch::Session session;
  std::vector<std::string> names;
  for (const auto& test : Catch::getAllTestCasesSorted(session.config())) {
    const Catch::TestCaseInfo& info = info_of(test);
    std::cout << names.size() << '\t' << info.tagsAsString() << '\t' << info.lineInfo.file << '\t'
              << info.name << '\n';
    names.push_back(info.name);
  }
  std::cout << std::endl;
  void* const memory =
      mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return 2;
  Shared& shared = *static_cast<Shared*>(memory);
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream words(line);
    double seconds = 0;
    int mutant = 0;
    words >> seconds >> mutant;
    std::vector<int> cases;
    for (int number = 0; words >> number;) cases.push_back(number);
    shared = Shared{};
    const auto start = std::chrono::steady_clock::now();
    const pid_t process = fork();
    if (process == 0) {
      pacer_mutant = mutant;
      child(session, names, cases, shared);
    }
    const std::string result = outcome(process, seconds);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    std::cout << result << ' ' << shared.at << ' ' << took.count();
    for (int number = 1; number < kMutants; ++number) {
      if (shared.seen[number]) std::cout << ' ' << number;
    }
    std::cout << std::endl;
  }
}
