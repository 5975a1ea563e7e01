// CRC-32C (Castagnoli; RFC 3720, section 12.1 and appendix B.4), the checksum of TFRecord files. A table
// look-up per byte: meant for log records, not for checkpoints.
#pragma once

#include <cstdint>
#include <string_view>

namespace pacer {

// The checksum of `bytes`; 0 for none. To go on with more of the same stream pass what came before as
// `previous`: crc32c("b", crc32c("a")) == crc32c("ab").
uint32_t crc32c(std::string_view bytes, uint32_t previous = 0);

}  // namespace pacer
