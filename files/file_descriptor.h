// Descriptors of files that are opened. A program that was started with standard input, output or error
// closed gets 0, 1 or 2 for the next file it opens, and whoever then prints writes into that file. Files of
// this library therefore never have one of these numbers.
#pragma once

#include <cstdio>
#include <memory>
#include <string>

namespace pacer {

// The same file under a descriptor above 2, closed by exec; `descriptor` itself where it is above 2 already,
// else it is closed. -1 with errno set where there is no other, or where `descriptor` is negative.
int above_standard_streams(int descriptor);

// Whether a file that exists is emptied or continued.
enum class StreamMode { truncate, append };

// A file that text is appended to. It is created where it is missing, and closed by exec.
class OutputFile {
 public:
  OutputFile() = default;
  // Throws FileError where the file cannot be opened.
  OutputFile(const std::string& path, StreamMode mode);

  // The text has reached the operating system when this returns. Throws FileError where it cannot be
  // written in full (a full disk, for example).
  void write(const std::string& text);

 private:
  struct Close {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  std::string path_;
  std::unique_ptr<std::FILE, Close> file_;
};

}  // namespace pacer
