// What every fuzz target shares. A target is one file with two functions:
//
//   extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);   reads one hostile input
//   std::vector<std::string> pacer::fuzz::seeds();                             what a fuzzer starts from
//
// With clang it is linked with libFuzzer (tests/fuzz/run.sh); with any other compiler with driver.cpp, which
// replays the corpus and tries a fixed number of seeded mutations.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace pacer::fuzz {

// Ends the program with the sentence on stderr: the input at hand has broken a promise.
[[noreturn]] void violation(const std::string& what);
inline void demand(bool holds, const char* what) {
  if (!holds) violation(what);
}

// Does `read`, which reads an input of so many bytes that nobody vouches for. True where it was accepted,
// false where it was refused as it should be: by an error of pacer's own whose message is one sentence. It
// is a violation to throw anything else, and to have allocated more than `bytes` + 1 MiB at any moment.
bool accepts(size_t bytes, const std::function<void()>& read);

// The bytes that operator new has handed out and not got back, and the most of them since the last call of
// restart_peak.
int64_t allocated_bytes();
int64_t peak_of_allocated_bytes();
void restart_peak();

// In memory of exactly their size, so that the sanitizers see the first byte beyond.
inline std::vector<char> bytes_of(const uint8_t* data, size_t size) { return {data, data + size}; }
inline std::string text_of(const uint8_t* data, size_t size) { return {data, data + size}; }

// Of a target; the empty input and the lines of its corpus come in addition.
std::vector<std::string> seeds();

}  // namespace pacer::fuzz
