#include <pacer/checkpoints/detail/weights_index.h>

#include <algorithm>

#include <pacer/core/error.h>
#include <pacer/files/file_system.h>
#include <pacer/files/json_scanner.h>
#include <pacer/files/safetensors.h>

namespace pacer::detail {
namespace {

constexpr int64_t kLargestIndex = kMaxSafetensorsHeader;  // bytes

// The name of one file, and no way to another folder.
bool is_plain_name(std::string_view name) {
  return !name.empty() && name != "." && name != ".." && name.find('/') == std::string_view::npos &&
         name.find('\0') == std::string_view::npos;
}

}  // namespace

// {"metadata": {...}, "weight_map": {"NAME": "model-00001-of-00002.safetensors", ...}}, in any order.
class WeightsIndex::Parser {
 public:
  Parser(WeightsIndex& index, const std::string& path)
      : index_(index), scanner_(index.text_.data(), index.text_.size(), 0, path) {}

  void run() {
    bool has_map = false;
    scanner_.expect('{');
    if (!scanner_.take('}')) {
      do {
        const size_t at = scanner_.position();
        const bool is_map = scanner_.string() == "weight_map";
        scanner_.expect(':');
        if (!is_map) {
          scanner_.skip_value();
          continue;
        }
        if (has_map) scanner_.fail_at(at, "a second \"weight_map\"");
        has_map = true;
        read_map();
      } while (scanner_.more('}'));
    }
    scanner_.expect_end();
    sort_by_name();
  }

 private:
  void read_map() {
    scanner_.expect('{');
    if (scanner_.take('}')) return;
    do {
      const size_t at = scanner_.position();
      const std::string_view tensor = scanner_.string();
      if (tensor.find('\0') != std::string_view::npos) scanner_.fail_at(at, "a tensor's name holds a NUL");
      scanner_.expect(':');
      const std::string_view file = scanner_.string();
      if (!is_plain_name(file)) {
        scanner_.fail_at(at, "the tensor ", quote_for_message(tensor), " is said to be in ",
                         quote_for_message(file), ", which is not the name of a file in the folder");
      }
      append({ended(tensor), ended(file)});
    } while (scanner_.more('}'));
  }

  // Grows by eighths, so that a text of many entries never has twice their memory.
  void append(Entry entry) {
    auto& entries = index_.entries_;
    if (entries.size() == entries.capacity()) entries.reserve(entries.size() + entries.size() / 8 + 1024);
    entries.push_back(entry);
  }

  // Puts a NUL behind a name, in place of its closing quote or of what its escapes left.
  uint32_t ended(std::string_view name) {
    const auto at = static_cast<size_t>(name.data() - index_.text_.data());
    index_.text_[at + name.size()] = '\0';
    return static_cast<uint32_t>(at);
  }

  void sort_by_name() {
    auto& entries = index_.entries_;
    const auto by_name = [&](Entry a, Entry b) {
      const int order = index_.view(a.tensor).compare(index_.view(b.tensor));
      return order != 0 ? order < 0 : a.tensor < b.tensor;
    };
    if (!std::is_sorted(entries.begin(), entries.end(), by_name)) {
      std::sort(entries.begin(), entries.end(), by_name);
    }
    for (size_t i = 1; i < entries.size(); ++i) {
      const std::string_view name = index_.view(entries[i].tensor);
      if (name == index_.view(entries[i - 1].tensor)) {
        scanner_.fail_at(entries[i].tensor - 1, "the tensor ", quote_for_message(name), " occurs twice");
      }
    }
  }

  WeightsIndex& index_;
  JsonScanner scanner_;
};

WeightsIndex WeightsIndex::read(const std::string& path) {
  FileReader reader(posix_file_system(), path);
  require<FileError>(reader.size() <= kLargestIndex, path, " has ", reader.size(), " bytes; the limit is ",
                     kLargestIndex);
  return parse(reader.read(), path);
}

WeightsIndex WeightsIndex::parse(std::vector<char> text, const std::string& path) {
  WeightsIndex index;
  index.text_ = std::move(text);
  Parser(index, path).run();
  require<FileError>(!index.empty(), path, " names no file: it has no \"weight_map\", or an empty one");
  return index;
}

std::optional<std::string_view> WeightsIndex::file_of(std::string_view tensor) const {
  const auto entry =
      std::lower_bound(entries_.begin(), entries_.end(), tensor,
                       [&](Entry each, std::string_view wanted) { return view(each.tensor) < wanted; });
  if (entry == entries_.end() || view(entry->tensor) != tensor) return std::nullopt;
  return view(entry->file);
}

std::vector<std::string_view> WeightsIndex::files() const {
  std::vector<uint32_t> places;
  places.reserve(entries_.size());
  for (const Entry entry : entries_) places.push_back(entry.file);
  std::sort(places.begin(), places.end(), [&](uint32_t a, uint32_t b) { return view(a) < view(b); });
  const auto end =
      std::unique(places.begin(), places.end(), [&](uint32_t a, uint32_t b) { return view(a) == view(b); });
  std::vector<std::string_view> files;
  for (auto place = places.begin(); place != end; ++place) files.push_back(view(*place));
  return files;
}

}  // namespace pacer::detail
