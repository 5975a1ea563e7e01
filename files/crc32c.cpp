#include <pacer/files/crc32c.h>

#include <array>

namespace pacer {
namespace {

constexpr uint32_t kReversedPolynomial = 0x82F63B78u;  // 0x1EDC6F41, the first bit being the lowest

constexpr std::array<uint32_t, 256> make_crc32c_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t remainder = byte;
    for (int bit = 0; bit < 8; ++bit) {
      remainder = (remainder & 1) != 0 ? (remainder >> 1) ^ kReversedPolynomial : remainder >> 1;
    }
    table[byte] = remainder;
  }
  return table;
}

constexpr std::array<uint32_t, 256> kCrc32cTable = make_crc32c_table();

}  // namespace

uint32_t crc32c(std::string_view bytes, uint32_t previous) {
  uint32_t remainder = ~previous;
  for (const char byte : bytes) {
    remainder = kCrc32cTable[(remainder ^ static_cast<unsigned char>(byte)) & 0xFF] ^ (remainder >> 8);
  }
  return ~remainder;
}

}  // namespace pacer
