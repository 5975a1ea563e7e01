// The words of a failure that is remembered, so that later calls can refuse with them.
#pragma once

#include <exception>
#include <new>
#include <string>

#include <pacer/core/error.h>

namespace pacer::detail {

// Keeps the first line of what the exception says. The text is never empty afterwards, also where memory has
// run out.
inline void keep_failure(const std::exception& error, std::string& text) noexcept {
  try {
    text = first_line(error.what());
  } catch (const std::bad_alloc&) {
    text.clear();
  }
  if (text.empty()) text = "no memory";  // so short that it needs none of its own
}

}  // namespace pacer::detail
