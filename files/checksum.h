// XXH3-128, the checksum of everything pacer keeps on disk. It finds accidents (a flipped bit, a lost block);
// it does not stop a forger, who computes it anew.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

namespace pacer {

// The checksum of bytes that come in pieces; how they are cut makes no difference.
class Checksum {
 public:
  Checksum();
  ~Checksum();
  Checksum(Checksum&&) noexcept;
  Checksum& operator=(Checksum&&) noexcept;

  // Takes the next bytes.
  Checksum& add(const void* data, size_t bytes);

  // The checksum of all bytes so far, as 32 lower-case hexadecimal digits, the most significant first, as
  // `xxhsum -H2` prints them.
  std::string hex() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// The same for bytes that are all there.
std::string checksum_of(std::string_view bytes);

// Whether the text has the form that hex() returns.
bool is_checksum(std::string_view text);

}  // namespace pacer
