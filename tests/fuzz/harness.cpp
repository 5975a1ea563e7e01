#include "fuzz/harness.h"

#include <malloc.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <typeinfo>

#include <pacer/core/error.h>
#include <pacer/files/json_writer.h>
#include <pacer/files/utf8.h>

namespace pacer::fuzz {
namespace {

constexpr int64_t kSlack = int64_t{1} << 20;  // beyond the input's size
// Room for a path, a name cut to 80 bytes, and what is wrong with it.
constexpr size_t kLongestSentence = 2000;

std::atomic<int64_t> live{0}, peak{0};

void check_sentence(const std::string& sentence) {
  const bool has_control_character = std::any_of(sentence.begin(), sentence.end(), [](char c) {
    return static_cast<unsigned char>(c) < 0x20 || c == 0x7F;
  });
  if (sentence.empty() || has_control_character || !is_utf8(sentence) || sentence.size() > kLongestSentence) {
    violation("a refusal is no sentence that can be printed: " + json_quote(sentence.substr(0, 200)));
  }
}

}  // namespace

void violation(const std::string& what) {
  std::fprintf(stderr, "\nVIOLATION: %s\n", what.c_str());
  std::abort();
}

bool accepts(size_t bytes, const std::function<void()>& read) {
  const int64_t before = allocated_bytes();
  restart_peak();
  bool accepted = false;
  try {
    read();
    accepted = true;
  } catch (const Error& error) {
    check_sentence(error.what());
  } catch (const std::exception& error) {
    violation(std::string("a refusal of another type, ") + typeid(error).name() + ": " + error.what());
  } catch (...) {
    violation("a refusal that is no exception of the standard library");
  }
  const int64_t most = peak_of_allocated_bytes() - before;
  if (most > static_cast<int64_t>(bytes) + kSlack) {
    violation(detail::concatenate("an input of ", bytes, " bytes made its reader allocate ", most));
  }
  return accepted;
}

int64_t allocated_bytes() { return live; }
int64_t peak_of_allocated_bytes() { return peak; }
void restart_peak() { peak = live.load(); }

namespace {

// Counts what was asked for even where there is no memory for it.
void* counted_allocate(size_t bytes, size_t alignment) {
  const auto asked = static_cast<int64_t>(bytes);
  if (live + asked > peak) peak = live + asked;
  void* memory = alignment == 0 ? std::malloc(std::max<size_t>(bytes, 1)) : nullptr;
  if (alignment != 0 && ::posix_memalign(&memory, alignment, std::max<size_t>(bytes, 1)) != 0) return nullptr;
  if (memory != nullptr) live += static_cast<int64_t>(::malloc_usable_size(memory));
  return memory;
}

void counted_free(void* memory) noexcept {
  if (memory != nullptr) live -= static_cast<int64_t>(::malloc_usable_size(memory));
  std::free(memory);
}

void* or_throw(void* memory) {
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace
}  // namespace pacer::fuzz

void* operator new(size_t bytes) { return pacer::fuzz::or_throw(pacer::fuzz::counted_allocate(bytes, 0)); }
void* operator new[](size_t bytes) { return pacer::fuzz::or_throw(pacer::fuzz::counted_allocate(bytes, 0)); }
void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
  return pacer::fuzz::counted_allocate(bytes, 0);
}
void* operator new(size_t bytes, std::align_val_t alignment) {
  return pacer::fuzz::or_throw(pacer::fuzz::counted_allocate(bytes, static_cast<size_t>(alignment)));
}
void operator delete(void* memory) noexcept { pacer::fuzz::counted_free(memory); }
void operator delete[](void* memory) noexcept { pacer::fuzz::counted_free(memory); }
void operator delete(void* memory, size_t) noexcept { pacer::fuzz::counted_free(memory); }
void operator delete[](void* memory, size_t) noexcept { pacer::fuzz::counted_free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { pacer::fuzz::counted_free(memory); }
void operator delete(void* memory, size_t, std::align_val_t) noexcept { pacer::fuzz::counted_free(memory); }
void operator delete(void* memory, const std::nothrow_t&) noexcept { pacer::fuzz::counted_free(memory); }
