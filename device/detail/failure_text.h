// The words of a failure that is remembered, so that later calls can refuse with them.
#pragma once

#include <exception>
#include <new>
#include <string>
#include <string_view>

namespace pacer::detail {

// Keeps the first line of what the exception says; LibTorch's go on with a back trace. The text is never
// empty afterwards, also where memory has run out.
inline void keep_failure(const std::exception& error, std::string& text) noexcept {
  try {
    const std::string_view words = error.what();
    text.assign(words.substr(0, words.find('\n')));
  } catch (const std::bad_alloc&) {
    text.clear();
  }
  if (text.empty()) text = "no memory";  // so short that it needs none of its own
}

}  // namespace pacer::detail
