// Catch2 for all tests, the same with version 2.13 (Debian 12) and version 3, and PACER_SKIP.
#pragma once

#include <cstdio>
#include <string>

// LibTorch's log macros include a CHECK that aborts. They come first, so that Catch2's is the one that stays.
#include <c10/util/Logging.h>
#undef CHECK

// An exception in an assertion ends the test case, which reports it, in place of the assertion. A handler around each of
// the thousands of assertions is a sixth of what it takes to compile the tests.
#define CATCH_CONFIG_FAST_COMPILE
#if __has_include(<catch2/catch_test_macros.hpp>)
#include <catch2/catch_approx.hpp>
#include <catch2/catch_template_test_macros.hpp>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/generators/catch_generators_range.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#else
#include <catch2/catch.hpp>
// The names that version 3 gave to what version 2 has under others.
namespace Catch {
using Detail::Approx;
namespace Matchers {
inline auto ContainsSubstring(const std::string& part) { return Contains(part); }
}  // namespace Matchers
}  // namespace Catch
#endif

// Ends the running test case as skipped. Only for the body of a TEST_CASE, before any section: version 2
// knows no skipped tests, so the case passes and tests/run.sh counts the printed line.
#define PACER_SKIP(reason)                                         \
  do {                                                             \
    const std::string pacer_skip_reason = (reason);                \
    std::printf("PACER_SKIPPED: %s\n", pacer_skip_reason.c_str()); \
    std::fflush(stdout);                                           \
    SUCCEED("skipped: " << pacer_skip_reason);                     \
    return;                                                        \
  } while (false)
