// What a JsonScanner makes of a text, for tests and fuzz targets.
#pragma once

#include <string>
#include <vector>

#include <pacer/files/json_scanner.h>

namespace pacer::testing {

// What `read` makes of a copy of the text, which has to end there; throws what the scanner throws.
template <class Read>
auto scanned(const std::string& text, const Read& read) {
  std::vector<char> bytes(text.begin(), text.end());
  JsonScanner scanner(bytes.data(), bytes.size(), 0, "file");
  auto value = read(scanner);
  scanner.expect_end();
  return value;
}
inline std::string scanned_string(const std::string& text) {
  return scanned(text, [](JsonScanner& scanner) { return std::string(scanner.string()); });
}
inline double scanned_number(const std::string& text) {
  return scanned(text, [](JsonScanner& scanner) { return scanner.number(); });
}

}  // namespace pacer::testing
