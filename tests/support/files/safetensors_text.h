// Safetensors files put together by hand, so that anything can be wrong with them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <pacer/files/safetensors.h>

#include "support/files/string_sink.h"

namespace pacer::testing {

inline std::string little_endian_length(uint64_t length) {
  std::string bytes;
  for (int i = 0; i < 8; ++i) bytes += static_cast<char>((length >> (8 * i)) & 0xFF);
  return bytes;
}

// A file with this header, padded, and so many bytes of data.
inline std::string safetensors_text(std::string header, size_t data) {
  header.resize((header.size() + 7) / 8 * 8, ' ');
  return little_endian_length(header.size()) + header + std::string(data, 'd');
}

inline SafetensorsFile parsed_safetensors(const std::string& text) {
  return SafetensorsFile::parse(as_bytes(text), "some/file.safetensors");
}

inline std::string written_safetensors(const std::vector<TensorBytes>& tensors,
                                       const std::map<std::string, std::string>& metadata = {}) {
  StringSink sink;
  write_safetensors(sink, tensors, metadata);
  return sink.text();
}

}  // namespace pacer::testing
