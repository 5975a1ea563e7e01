// The reading half of files/safetensors.h; the writing one is files/safetensors_writer.cpp.
#include <pacer/files/safetensors.h>

#include <algorithm>
#include <charconv>
#include <limits>

#include <pacer/core/error.h>
#include <pacer/files/json_scanner.h>

namespace pacer {
namespace {

constexpr size_t kLengthBytes = 8;  // of the header's length, at the start of the file
// Of the shortest entry, "":{"dtype":"I8","shape":[],"data_offsets":[0,0]}, and its comma there are 50.
constexpr size_t kShortestEntry = 48;

// What a file is that cannot be safetensors and begins as others do, and what to do with it.
std::string other_format(const char* start, uint64_t file_bytes) {
  const std::string_view begin(start, kLengthBytes);
  const auto opens_with = [&](std::string_view magic) { return begin.substr(0, magic.size()) == magic; };
  if (opens_with("version ") && file_bytes < 1024) {
    return "the pointer that Git LFS leaves in place of a large file; fetch the file itself with git lfs "
           "pull";
  }
  if (opens_with("PK\x03\x04")) {
    return "a zip archive, as torch::save and Python's torch.save write them; load it there and save it with "
           "pacer::save_weights or Python's safetensors";
  }
  if (begin[0] == '\x80' && begin[1] >= 2 && begin[1] <= 5) {
    return "a Python pickle, as torch.save wrote them before version 1.6; load it in Python and save it with "
           "safetensors";
  }
  if (opens_with("GGUF")) return "a GGUF file of llama.cpp; take the safetensors files that it was made of";
  if (opens_with("\x89HDF")) return "an HDF5 file; load it in Python and save it with safetensors";
  return "";
}

// Of the header, which then lies within the file; `start`: its first kLengthBytes, as far as there are any.
size_t header_size(const char* start, uint64_t file_bytes, const std::string& path) {
  require<FileError>(file_bytes >= kLengthBytes, path, " has ", file_bytes,
                     " bytes; a safetensors file starts with 8 that give the header's length");
  uint64_t length = 0;
  for (size_t i = kLengthBytes; i-- > 0;) length = (length << 8) | static_cast<unsigned char>(start[i]);
  const uint64_t rest = file_bytes - kLengthBytes;
  const uint64_t most = std::min(rest, static_cast<uint64_t>(kMaxSafetensorsHeader));
  const std::string other = length > most ? other_format(start, file_bytes) : "";
  require<FileError>(other.empty(), path, " is no safetensors file: it is ", other);
  require<FileError>(length <= rest, path, ", byte 0: a header of ", length, " bytes, but only ", rest,
                     " follow: the file is cut short or not safetensors");
  require<FileError>(length <= static_cast<uint64_t>(kMaxSafetensorsHeader), path, ", byte 0: a header of ",
                     length, " bytes; the limit is ", kMaxSafetensorsHeader);
  return static_cast<size_t>(length);
}

}  // namespace

// Fills a SafetensorsFile whose bytes are there, those of the header at least.
class SafetensorsFile::Parser {
 public:
  Parser(SafetensorsFile& file, size_t header, const std::string& path)
      : file_(file),
        path_(path),
        data_at_(kLengthBytes + header),
        scanner_(file.bytes_.data() + kLengthBytes, header, kLengthBytes, path) {}

  void run() {
    const size_t header = data_at_ - kLengthBytes;
    require<FileError>(header > 0 && file_.bytes_[kLengthBytes] == '{', path_, ", byte ", kLengthBytes,
                       ": the header does not start with '{': the file is damaged or not safetensors");
    file_.records_.reserve(header / kShortestEntry + 1);
    bool has_metadata = false;
    scanner_.expect('{');
    if (!scanner_.take('}')) {
      do {
        const size_t at = scanner_.position();
        const std::string_view name = scanner_.string();
        scanner_.expect(':');
        if (name == "__metadata__") {
          if (has_metadata) scanner_.fail_at(at, "a second \"__metadata__\"");
          has_metadata = true;
          read_metadata();
        } else {
          if (name.find('\0') != std::string_view::npos) scanner_.fail_at(at, "a tensor's name holds a NUL");
          read_tensor(name, at);
        }
      } while (scanner_.more('}'));
    }
    scanner_.expect_end();
    check_places();
    check_names();
  }

 private:
  Text text_of(std::string_view view) const {
    return {static_cast<uint32_t>(view.data() - file_.bytes_.data()), static_cast<uint32_t>(view.size())};
  }

  void read_metadata() {
    auto& metadata = file_.metadata_;
    scanner_.expect('{');
    if (!scanner_.take('}')) {
      do {
        if (metadata.size() == kMaxSafetensorsMetadata) {
          scanner_.fail_at(scanner_.position(), "more than ", kMaxSafetensorsMetadata,
                           " entries of metadata");
        }
        const Text key = text_of(scanner_.string());
        scanner_.expect(':');
        metadata.emplace_back(key, text_of(scanner_.string()));
      } while (scanner_.more('}'));
    }
    const auto by_key = [&](const auto& a, const auto& b) {
      return file_.view(a.first) < file_.view(b.first);
    };
    std::sort(metadata.begin(), metadata.end(), by_key);
    for (size_t i = 1; i < metadata.size(); ++i) {
      if (!by_key(metadata[i - 1], metadata[i])) {
        scanner_.fail_at(metadata[i].first.at - kLengthBytes, "the metadata ",
                         quote_for_message(file_.view(metadata[i].first)), " occurs twice");
      }
    }
  }

  void read_tensor(std::string_view name, size_t at) {
    Record record{};
    record.name = text_of(name);
    bool has_dtype = false, has_shape = false, has_offsets = false;
    int64_t elements = 0, begin = 0, end = 0;
    Text unknown{};  // the dtype
    const auto fail = [&](const auto&... parts) {
      scanner_.fail_at(at, "the tensor ", quote_for_message(name), ' ', parts...);
    };
    const auto first = [&](bool& seen, const char* field) {
      if (seen) fail("has the field \"", field, "\" twice");
      seen = true;
    };
    scanner_.expect('{');
    do {
      const std::string_view field = scanner_.string();
      scanner_.expect(':');
      if (field == "dtype") {
        first(has_dtype, "dtype");
        const std::string_view dtype = scanner_.string();
        if (dtype.empty()) fail("has a dtype without a name");
        record.dtype = dtype_named(dtype).value_or(Dtype::OTHER);
        if (record.dtype == Dtype::OTHER) unknown = text_of(dtype);
      } else if (field == "shape") {
        first(has_shape, "shape");
        elements = read_shape(record, fail);
      } else if (field == "data_offsets") {
        first(has_offsets, "data_offsets");
        scanner_.expect('[');
        begin = scanner_.integer();
        scanner_.expect(',');
        end = scanner_.integer();
        scanner_.expect(']');
      } else {
        fail("has the unknown field ", quote_for_message(field));
      }
    } while (scanner_.more('}'));
    if (!has_dtype || !has_shape || !has_offsets) fail("lacks its dtype, shape or data_offsets");

    const auto data = static_cast<int64_t>(file_.file_bytes_ - data_at_);
    if (begin > end || end > data) fail("has the bytes ", begin, " to ", end, " of ", data, " bytes of data");
    const int64_t item = dtype_bytes(record.dtype);
    const bool is_known = record.dtype != Dtype::OTHER;
    if (is_known &&
        (elements > std::numeric_limits<int64_t>::max() / item || end - begin != elements * item)) {
      fail("has ", end - begin, " bytes, but its shape has ", elements, " elements of ", item, " bytes");
    }
    record.data_at = data_at_ + static_cast<uint64_t>(begin);
    record.data_bytes = static_cast<uint64_t>(end - begin);
    if (record.data_at % static_cast<uint64_t>(item) != 0) {
      fail("starts at byte ", record.data_at, " of the file, which is no multiple of its element's ", item,
           " bytes");
    }
    if (!is_known) {
      record.shape_at = unknown.at;
      record.dtype_length = static_cast<uint8_t>(std::min<uint32_t>(unknown.size, UINT8_MAX));
    }
    file_.records_.push_back(record);
  }

  // The number of elements. Sizes must have a product even where one of them is 0.
  template <class Fail>
  int64_t read_shape(Record& record, const Fail& fail) {
    scanner_.expect('[');
    record.shape_at = static_cast<uint32_t>(kLengthBytes + scanner_.position() - 1);
    int64_t product = 1;
    bool empty = false;
    size_t dimensions = 0;
    if (!scanner_.take(']')) {
      do {
        if (++dimensions > kMaxSafetensorsDimensions) {
          fail("has more than ", kMaxSafetensorsDimensions, " dimensions");
        }
        const int64_t size = scanner_.integer();
        empty = empty || size == 0;
        if (size > 0 && product > std::numeric_limits<int64_t>::max() / size) {
          fail("has a shape of more than 2^63 - 1 elements");
        }
        product *= std::max<int64_t>(size, 1);
      } while (scanner_.more(']'));
    }
    return empty ? 0 : product;
  }

  // The tensors lie one after the other, the first at the start of the data and the last up to the end.
  void check_places() {
    auto& records = file_.records_;
    const auto by_place = [](const Record& a, const Record& b) {
      return a.data_at != b.data_at ? a.data_at < b.data_at : a.data_bytes < b.data_bytes;
    };
    if (!std::is_sorted(records.begin(), records.end(), by_place)) {
      std::sort(records.begin(), records.end(), by_place);
    }
    uint64_t end = data_at_;
    for (const Record& record : records) {
      if (record.data_at != end) {
        fail_in(record,
                record.data_at < end ? "overlaps another one at byte " : "leaves a gap before it at byte ",
                std::min(end, record.data_at));
      }
      end += record.data_bytes;
    }
    require<FileError>(end == file_.file_bytes_, path_, ", byte ", end, ": ", file_.file_bytes_ - end,
                       " bytes follow the last tensor");
  }

  // Equal names have equal hashes.
  void check_names() {
    auto& hashed = file_.hashed_;
    hashed.reserve(file_.records_.size());
    for (const Record& record : file_.records_) {
      hashed.push_back({name_hash(file_.view(record.name)), static_cast<uint32_t>(hashed.size())});
    }
    sort_by_hash(hashed);
    for (size_t begin = 0, end = 0; begin < hashed.size(); begin = end) {
      while (end < hashed.size() && hashed[end].hash == hashed[begin].hash) ++end;
      if (end - begin > 1) check_names_of_one_hash(hashed.data() + begin, hashed.data() + end);
    }
  }

  void check_names_of_one_hash(HashedName* begin, HashedName* end) {
    const auto text_of = [&](const HashedName& each) { return file_.records_[each.number].name; };
    std::sort(begin, end, [&](const HashedName& a, const HashedName& b) {
      const int order = file_.view(text_of(a)).compare(file_.view(text_of(b)));
      return order != 0 ? order < 0 : text_of(a).at < text_of(b).at;
    });
    for (const HashedName* each = begin + 1; each < end; ++each) {
      if (file_.view(text_of(each[-1])) == file_.view(text_of(*each))) {
        fail_in(file_.records_[each->number], "occurs twice");
      }
    }
  }

  template <class... Parts>
  [[noreturn]] void fail_in(const Record& record, const Parts&... parts) {
    scanner_.fail_at(record.name.at - kLengthBytes, "the tensor ", quote_for_message(file_.view(record.name)),
                     ' ', parts...);
  }

  SafetensorsFile& file_;
  const std::string& path_;
  uint64_t data_at_;
  JsonScanner scanner_;
};

SafetensorsFile SafetensorsFile::parse(std::vector<char> bytes, const std::string& path) {
  const size_t header = header_size(bytes.data(), bytes.size(), path);
  SafetensorsFile file;
  file.file_bytes_ = bytes.size();
  file.bytes_ = std::move(bytes);
  Parser(file, header, path).run();
  return file;
}

SafetensorsFile SafetensorsFile::read_header(FileReader& reader, const std::string& path) {
  SafetensorsFile file;
  file.file_bytes_ = static_cast<uint64_t>(reader.size());
  file.bytes_.resize(kLengthBytes);
  if (file.file_bytes_ >= kLengthBytes) reader.read_next(file.bytes_.data(), kLengthBytes);
  const size_t header = header_size(file.bytes_.data(), file.file_bytes_, path);
  file.bytes_.resize(kLengthBytes + header);
  reader.read_next(file.bytes_.data() + kLengthBytes, header);
  Parser(file, header, path).run();
  return file;
}

std::vector<std::string_view> SafetensorsFile::names_in_file_order() const {
  std::vector<std::string_view> names;
  names.reserve(records_.size());
  for (const Record& record : records_) names.push_back(view(record.name));
  return names;
}

std::vector<std::string_view> SafetensorsFile::names() const {
  std::vector<std::string_view> names = names_in_file_order();
  if (!std::is_sorted(names.begin(), names.end())) std::sort(names.begin(), names.end());
  return names;
}

std::optional<TensorView> SafetensorsFile::find(std::string_view name) const {
  const uint32_t hash = name_hash(name);
  const auto is_before = [&](const HashedName& each, std::string_view wanted) {
    return each.hash != hash ? each.hash < hash : view(records_[each.number].name) < wanted;
  };
  const auto found = std::lower_bound(hashed_.begin(), hashed_.end(), name, is_before);
  if (found == hashed_.end() || view(records_[found->number].name) != name) return std::nullopt;
  const Record* const record = &records_[found->number];
  TensorView tensor;
  tensor.dtype = record->dtype;
  if (bytes_.size() == file_bytes_) tensor.data = bytes_.data() + record->data_at;
  tensor.bytes = static_cast<size_t>(record->data_bytes);
  if (record->dtype == Dtype::OTHER) {
    tensor.dtype_text = {bytes_.data() + record->shape_at, record->dtype_length};
    return tensor;
  }
  tensor.dtype_text = dtype_name(record->dtype);
  // The shape was read once already: digits, commas and white space up to the bracket.
  const char* const end = bytes_.data() + bytes_.size();
  for (const char* at = bytes_.data() + record->shape_at + 1; *at != ']';) {
    int64_t size = 0;
    const auto number = std::from_chars(at, end, size);
    if (number.ec == std::errc()) tensor.shape.push_back(size);
    at = number.ec == std::errc() ? number.ptr : at + 1;
  }
  return tensor;
}

std::map<std::string_view, std::string_view> SafetensorsFile::metadata() const {
  std::map<std::string_view, std::string_view> entries;
  for (const auto& [key, value] : metadata_) entries.emplace(view(key), view(value));
  return entries;
}

}  // namespace pacer
