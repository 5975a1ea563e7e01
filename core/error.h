// The error types of pacer. Each message is one sentence that says what happened, where, and what to do.
// This header deliberately knows nothing of LibTorch: errors of the lower folders must be catchable without
// it.
#pragma once

#include <locale>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>

namespace pacer {

// The root of everything pacer throws.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The caller passed something that cannot work; nothing was changed.
class InvalidArgument : public Error {
 public:
  using Error::Error;
};

// The call is right but this build or this machine cannot serve it (for example CUDA in a CPU-only build).
class Unavailable : public Error {
 public:
  using Error::Error;
};

// A file could not be read or written; the message carries its path.
class FileError : public Error {
 public:
  using Error::Error;
};

// The device reported a failure; the message carries the operation and the device's own words.
class DeviceError : public Error {
 public:
  using Error::Error;
};

namespace detail {

// The parts as one text; numbers as in the C locale, whatever the program's is ("2000", not "2.000").
template <class... Parts>
std::string concatenate(const Parts&... parts) {
  std::ostringstream out;
  out.imbue(std::locale::classic());
  (out << ... << parts);
  return out.str();
}

// Returns the first line of what an exception says. LibTorch's messages go on with a back trace.
inline std::string first_line(std::string_view words) {
  return std::string(words.substr(0, words.find('\n')));
}

}  // namespace detail

// Throws E with the parts streamed into one message unless `condition` holds.
template <class E = InvalidArgument, class... Parts>
void require(bool condition, const Parts&... parts) {
  if (!condition) throw E(detail::concatenate(parts...));
}

}  // namespace pacer
