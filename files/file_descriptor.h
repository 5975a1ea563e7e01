// Descriptors of files that are opened. A program that was started with standard input, output or error
// closed gets 0, 1 or 2 for the next file it opens, and whoever then prints writes into that file. Files of
// this library therefore never have one of these numbers.
#pragma once

#include <cstdio>
#include <string>

namespace pacer {

// The same file under a descriptor above 2, closed by exec; `descriptor` itself where it is above 2 already,
// else it is closed. -1 with errno set where there is no other, or where `descriptor` is negative.
int above_standard_streams(int descriptor);

// Whether a file that exists is emptied or continued.
enum class StreamMode { truncate, append };

// A stream for writing, created where it is missing, closed by exec; null with errno set.
std::FILE* open_stream(const std::string& path, StreamMode mode);

}  // namespace pacer
