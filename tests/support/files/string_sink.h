// What is written, as a string; and strings as the bytes that parsers take.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include <pacer/files/file_system.h>

namespace pacer::testing {

class StringSink final : public ByteSink {
 public:
  void write(const void* data, size_t bytes) override {
    text_.append(static_cast<const char*>(data), bytes);
    ++writes_;
  }
  const std::string& text() const { return text_; }
  int writes() const { return writes_; }

 private:
  std::string text_;
  int writes_ = 0;
};

// In memory of exactly their size, so that the sanitizers see the first byte beyond.
inline std::vector<char> as_bytes(std::string_view text) { return {text.begin(), text.end()}; }

}  // namespace pacer::testing
