#include <pacer/collectives/detail/gloo_uncaught.h>

#include <pthread.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <thread>

namespace pacer::detail {
namespace {

// Threads inherit the name of the one that starts them. That is how they are told from the program's. From
// LibTorch 2.13 on Gloo names its reading threads itself.
constexpr const char* kName = "pacer-gloo";
constexpr const char* kNameByGloo = "gloo_tcp_loop";

std::terminate_handler former = nullptr;

bool is_of_gloo() {
  std::array<char, 16> name{};
  return pthread_getname_np(pthread_self(), name.data(), name.size()) == 0 &&
         (std::strcmp(name.data(), kName) == 0 || std::strcmp(name.data(), kNameByGloo) == 0);
}

void print_exception() {
  try {
    if (const std::exception_ptr thrown = std::current_exception()) std::rethrow_exception(thrown);
  } catch (const std::exception& error) {
    std::fprintf(stderr,
                 "pacer: a thread of Gloo has failed and stops, what waits for it reaches its deadline: %s\n",
                 error.what());
  } catch (...) {  // no words
  }
}

// Nothing was unwound: what the thread holds stays locked, and its transport is left behind at the deadline.
[[noreturn]] void stop_or_terminate() {
  if (is_of_gloo()) {
    print_exception();
    while (true) std::this_thread::sleep_for(std::chrono::hours(1));
  }
  if (former != nullptr) former();
  std::abort();
}

}  // namespace

void stop_thread_on_uncaught_exception() {
  static const bool is_set = [] {
    former = std::get_terminate();
    std::set_terminate(stop_or_terminate);
    return true;
  }();
  if (is_set) pthread_setname_np(pthread_self(), kName);
}

}  // namespace pacer::detail
