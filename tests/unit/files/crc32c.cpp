// CRC-32C against published answers and against the division of polynomials it stands for.
#include <string>

#include <pacer/files/crc32c.h>

#include "support/catch.h"
#include "support/samples.h"

namespace pacer::testing {
namespace {

// The remainder of the message, its first 32 bits inverted, divided by 0x11EDC6F41: bit by bit, the highest
// power first, as the definition has it. Each byte enters with its lowest bit first; the result is inverted
// and read in the same reversed order.
uint32_t crc32c_by_long_division(const std::string& bytes) {
  uint32_t remainder = 0xFFFFFFFFu;
  for (const char byte : bytes) {
    for (int bit = 0; bit < 8; ++bit) {
      const bool message = ((static_cast<unsigned char>(byte) >> bit) & 1) != 0;
      const bool top = (remainder >> 31) != 0;
      remainder <<= 1;
      if (message != top) remainder ^= 0x1EDC6F41u;
    }
  }
  uint32_t reversed = 0;
  for (int bit = 0; bit < 32; ++bit) reversed |= ((~remainder >> bit) & 1) << (31 - bit);
  return reversed;
}

}  // namespace

TEST_CASE("the checksum has the published answers", "[core][crc32c]") {
  CHECK(crc32c("123456789") == 0xE3069283u);
  CHECK(crc32c("") == 0);
  // RFC 3720, appendix B.4.
  CHECK(crc32c(std::string(32, '\0')) == 0x8A9136AAu);
  CHECK(crc32c(std::string(32, '\xFF')) == 0x62A8AB43u);
  std::string up, down;
  for (int i = 0; i < 32; ++i) {
    up += static_cast<char>(i);
    down += static_cast<char>(31 - i);
  }
  CHECK(crc32c(up) == 0x46DD794Eu);
  CHECK(crc32c(down) == 0x113FDB5Cu);
  // A SCSI read command.
  const unsigned char command[48] = {0x01, 0xC0, 0, 0, 0, 0, 0,    0, 0,    0, 0, 0,    0, 0, 0, 0,
                                     0x14, 0,    0, 0, 0, 0, 0x04, 0, 0,    0, 0, 0x14, 0, 0, 0, 0x18,
                                     0x28, 0,    0, 0, 0, 0, 0,    0, 0x02, 0, 0, 0,    0, 0, 0, 0};
  CHECK(crc32c({reinterpret_cast<const char*>(command), sizeof command}) == 0xD9963A56u);
}

TEST_CASE("the checksum is a division of polynomials, in one piece or in two", "[core][crc32c]") {
  Samples samples(5);
  for (int i = 0; i < 2'000; ++i) {
    std::string bytes(static_cast<size_t>(samples.below(80)), ' ');
    for (char& c : bytes) c = static_cast<char>(samples.below(256));
    const uint32_t expected = crc32c_by_long_division(bytes);
    REQUIRE(crc32c(bytes) == expected);
    const size_t cut = static_cast<size_t>(samples.below(static_cast<int64_t>(bytes.size()) + 1));
    REQUIRE(crc32c(bytes.substr(cut), crc32c(bytes.substr(0, cut))) == expected);
  }
}

}  // namespace pacer::testing
