// What the small JSON files beside weights have in common: an object of fields, of which some are known.
#pragma once

#include <cstddef>
#include <set>
#include <string>
#include <string_view>

#include <pacer/core/error.h>
#include <pacer/files/json_scanner.h>

namespace pacer::detail {

// The most fields of such a file. There are some 40 in use; more than these are no way to fill the memory.
constexpr size_t kMostConfigFields = 1000;

// Passes over a value; true for null, false, "", 0, an empty list and an empty object.
inline bool skip_if_off(JsonScanner& scanner) {
  const char first = scanner.peek();
  if (first == '[' || first == '{') {
    JsonScanner ahead = scanner;
    ahead.take(first);
    const bool empty = ahead.take(first == '[' ? ']' : '}');
    scanner.skip_value();
    return empty;
  }
  if (first == '"') return scanner.string().empty();
  if (first == 't' || first == 'f') return !scanner.boolean();
  if (first != 'n') return scanner.number() == 0;
  scanner.skip_value();
  return true;
}

// Calls read(scanner, name, position of the field) for each field of the object that comes next, to read its value.
// Returns the names, which point into the text. Throws FileError for a name that occurs twice and too many fields.
template <class Read>
std::set<std::string_view> read_fields(JsonScanner& scanner, const Read& read) {
  std::set<std::string_view> seen;
  scanner.expect('{');
  if (scanner.take('}')) return seen;
  do {
    const size_t at = scanner.position();
    if (seen.size() == kMostConfigFields) {
      scanner.fail_at(at, "more than ", kMostConfigFields, " fields");
    }
    const std::string_view name = scanner.string();
    if (!seen.insert(name).second) {
      scanner.fail_at(at, "the field ", quote_for_message(name), " occurs twice");
    }
    scanner.expect(':');
    read(scanner, name, at);
  } while (scanner.more('}'));
  return seen;
}

// The same for a text that is one object, with nothing behind it. Its strings are overwritten by what they mean.
template <class Read>
std::set<std::string_view> read_config_fields(std::string& text, const std::string& path, const Read& read) {
  JsonScanner scanner(text.data(), text.size(), 0, path);
  const std::set<std::string_view> seen = read_fields(scanner, read);
  scanner.expect_end();
  return seen;
}

}  // namespace pacer::detail
