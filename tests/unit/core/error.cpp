// The error types: what is thrown, and what the message says.
#include <pacer/core/error.h>

#include "support/catch.h"

namespace pacer::testing {
namespace {

template <class Thrown, class Caught>
bool is_caught_as() {
  try {
    throw Thrown("what happened");
  } catch (const Caught& error) {
    return std::string(error.what()) == "what happened";
  } catch (...) {
    return false;
  }
}

}  // namespace

TEST_CASE("every error of pacer can be caught as Error and as a standard exception", "[core][error]") {
  CHECK(is_caught_as<Error, std::runtime_error>());
  CHECK(is_caught_as<InvalidArgument, Error>());
  CHECK(is_caught_as<Unavailable, Error>());
  CHECK(is_caught_as<FileError, Error>());
  CHECK(is_caught_as<DeviceError, Error>());
  CHECK(is_caught_as<DeviceError, std::exception>());
}

TEST_CASE("the kinds of error can be told apart", "[core][error]") {
  CHECK_FALSE(is_caught_as<InvalidArgument, Unavailable>());
  CHECK_FALSE(is_caught_as<Unavailable, InvalidArgument>());
  CHECK_FALSE(is_caught_as<FileError, DeviceError>());
  CHECK_FALSE(is_caught_as<DeviceError, FileError>());
  CHECK_FALSE(is_caught_as<Error, InvalidArgument>());
}

TEST_CASE("a requirement that holds throws nothing", "[core][error]") {
  CHECK_NOTHROW(require(true, "never read"));
  CHECK_NOTHROW(require<DeviceError>(true, "never ", "read"));
}

TEST_CASE("a broken requirement throws its parts as one message", "[core][error]") {
  CHECK_THROWS_AS(require(false, "x"), InvalidArgument);
  CHECK_THROWS_AS(require<FileError>(false, "x"), FileError);
  const std::string name = "layer.0.weight";
  try {
    require<Unavailable>(false, "parameter ", name, " has ", int64_t{1} << 40, " elements, ", 0.5,
                         " of them zero", '.');
    FAIL("nothing was thrown");
  } catch (const Unavailable& error) {
    CHECK(std::string(error.what()) ==
          "parameter layer.0.weight has 1099511627776 elements, 0.5 of them zero.");
  }
}

TEST_CASE("the first line of a message is what comes before its back trace", "[core][error]") {
  CHECK(detail::first_line("no memory\nException raised from\nframe #0") == "no memory");
  CHECK(detail::first_line("no memory") == "no memory");
  CHECK(detail::first_line("\nframe #0").empty());
  CHECK(detail::first_line("").empty());
}

}  // namespace pacer::testing
