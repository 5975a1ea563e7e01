#include <pacer/files/checksum.h>

#include <algorithm>

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace pacer {
namespace {

std::string checksum_digits(XXH128_hash_t hash) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const XXH64_hash_t half : {hash.high64, hash.low64}) {
    for (int shift = 60; shift >= 0; shift -= 4) text += kDigits[(half >> shift) & 15];
  }
  return text;
}

}  // namespace

struct Checksum::State {
  XXH3_state_t xxh3;  // 64-byte aligned
};

Checksum::Checksum() : state_(std::make_unique<State>()) { XXH3_128bits_reset(&state_->xxh3); }
Checksum::~Checksum() = default;
Checksum::Checksum(Checksum&&) noexcept = default;
Checksum& Checksum::operator=(Checksum&&) noexcept = default;

Checksum& Checksum::add(const void* data, size_t bytes) {
  if (bytes > 0) XXH3_128bits_update(&state_->xxh3, data, bytes);
  return *this;
}

std::string Checksum::hex() const { return checksum_digits(XXH3_128bits_digest(&state_->xxh3)); }

std::string checksum_of(std::string_view bytes) {
  return checksum_digits(XXH3_128bits(bytes.data(), bytes.size()));
}

bool is_checksum(std::string_view text) {
  return text.size() == 32 && std::all_of(text.begin(), text.end(), [](char c) {
           return ('0' <= c && c <= '9') || ('a' <= c && c <= 'f');
         });
}

}  // namespace pacer
