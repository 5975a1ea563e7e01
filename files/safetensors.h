// The safetensors format: 8 bytes of little-endian header length, a JSON header that gives each tensor its
// dtype, shape and place, and the raw little-endian elements (github.com/huggingface/safetensors). Python's
// `safetensors` reads what is written here, and the other way round. Knows bytes and names, nothing of
// LibTorch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <pacer/files/file_system.h>
#include <pacer/files/name_hash.h>

namespace pacer {

// The dtypes of the safetensors format that pacer knows, and `OTHER` for those that it does not (of less than
// a byte, or of a later version of the format): a file may have such tensors, whose elements nobody looks at.
enum class Dtype : uint8_t {
  F64,
  F32,
  F16,
  BF16,
  I64,
  I32,
  I16,
  I8,
  U8,
  BOOL,
  U64,
  U32,
  U16,
  C64,
  F8_E4M3,
  F8_E5M2,
  F8_E4M3FNUZ,
  F8_E5M2FNUZ,
  F8_E8M0,
  OTHER
};

// Returns the dtype's name as the format spells it: "BF16".
const char* dtype_name(Dtype dtype);
// Nothing for a name that is none of them.
std::optional<Dtype> dtype_named(std::string_view name);
// The bytes of one element; 1 for OTHER, which cannot be written.
int64_t dtype_bytes(Dtype dtype);

// One tensor to be written: contiguous, in row-major order. The data stay the caller's; null where there are
// no elements. An empty shape is one element.
struct TensorBytes {
  std::string name;
  Dtype dtype = Dtype::F32;
  std::vector<int64_t> shape;
  const void* data = nullptr;
};

// Limits of both directions; the first is the one of the format's reference implementation.
constexpr int64_t kMaxSafetensorsHeader = 100'000'000;  // bytes
constexpr size_t kMaxSafetensorsMetadata = 10'000;      // entries
constexpr size_t kMaxSafetensorsDimensions = 1'000;     // of a tensor

// Writes a whole file. Larger elements come first and equally large ones by name, without gaps, and the
// header is padded with spaces, so that every tensor starts at a multiple of its element's size.
// InvalidArgument before the first byte for a repeated name, one that is not UTF-8, holds a NUL or is
// "__metadata__", a negative dimension, a size beyond 63 bits, missing data, and beyond the limits.
void write_safetensors(ByteSink& sink, std::vector<TensorBytes> tensors,
                       const std::map<std::string, std::string>& metadata = {});

// A tensor that is written when its turn comes.
struct TensorRecord {
  std::string name;
  Dtype dtype = Dtype::F32;
  std::vector<int64_t> shape;
};

// The same file, of tensors that are made one at a time: produce(i, out) is called once for each of `tensors`
// that has elements, in the order of the file, and writes the elements of number i to `out`, in as many
// pieces as it likes. Error where that is another number of bytes than dtype and shape say.
using TensorProducer = std::function<void(size_t index, ByteSink& out)>;
void write_safetensors(ByteSink& sink, const std::vector<TensorRecord>& tensors,
                       const TensorProducer& produce,
                       const std::map<std::string, std::string>& metadata = {});

// A tensor of a file that was parsed. `data` points into that SafetensorsFile and is aligned for the dtype;
// null where only the header was read.
struct TensorView {
  Dtype dtype = Dtype::F32;
  std::string_view dtype_text;  // as the file has it
  std::vector<int64_t> shape;
  const char* data = nullptr;
  size_t bytes = 0;
};

// A file in memory, or its header alone. Nothing in it is trusted: parse() and read_header() are safe for any
// bytes, and allocate less than the header's size and 1 MiB beyond the bytes they keep.
class SafetensorsFile {
 public:
  // `path` is for messages. FileError with the path, the byte and the tensor where anything is not as the
  // format has it: lengths and offsets outside the file, overlaps, gaps, trailing bytes, sizes that differ
  // from dtype times shape or exceed 63 bits, unknown fields, repeated names, a NUL in a name, elements that
  // are not aligned. A tensor of an unknown dtype may have any size and place, and its shape is not kept.
  static SafetensorsFile parse(std::vector<char> bytes, const std::string& path);
  // The same checks of a file that stays where it is: reads its header and no more. The elements come next,
  // tensor by tensor as names_in_file_order() has them, without gaps up to the file's end.
  static SafetensorsFile read_header(FileReader& reader, const std::string& path);

  // Sorted by bytes. The views point into this object, as those of metadata() and find() do.
  std::vector<std::string_view> names() const;
  std::vector<std::string_view> names_in_file_order() const;
  // Nothing where there is no tensor of that name.
  std::optional<TensorView> find(std::string_view name) const;
  std::map<std::string_view, std::string_view> metadata() const;

 private:
  struct Text {  // in bytes_
    uint32_t at, size;
  };
  // 32 bytes, fewer than any entry of a header has: a header of a million tensors is no way to fill the
  // memory.
  struct Record {
    uint64_t data_at, data_bytes;  // in the file
    Text name;
    uint32_t shape_at;  // of the '[', in bytes_; of an unknown dtype's name, which has no shape
    Dtype dtype;
    uint8_t dtype_length;  // of an unknown dtype's name; longer ones are cut
  };
  class Parser;

  SafetensorsFile() = default;
  std::string_view view(Text text) const { return {bytes_.data() + text.at, text.size}; }

  std::vector<char> bytes_;  // all, or those up to the end of the header
  uint64_t file_bytes_ = 0;
  std::vector<Record> records_;                  // in the file's order
  std::vector<HashedName> hashed_;               // by hash, then by name; numbers of records_
  std::vector<std::pair<Text, Text>> metadata_;  // by name
};

}  // namespace pacer
