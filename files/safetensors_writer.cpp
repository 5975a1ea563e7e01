// The writing half of files/safetensors.h, and its table of dtypes.
#include <algorithm>
#include <array>
#include <limits>
#include <numeric>
#include <tuple>

#include <pacer/core/error.h>
#include <pacer/files/json_scanner.h>
#include <pacer/files/json_writer.h>
#include <pacer/files/safetensors.h>
#include <pacer/files/utf8.h>

namespace pacer {
namespace {

struct DtypeFacts {
  std::string_view name;
  int64_t bytes;
};
constexpr std::array<DtypeFacts, 20> kDtypeFacts = {
    {{"F64", 8},     {"F32", 4},         {"F16", 2},         {"BF16", 2},    {"I64", 8},
     {"I32", 4},     {"I16", 2},         {"I8", 1},          {"U8", 1},      {"BOOL", 1},
     {"U64", 8},     {"U32", 4},         {"U16", 2},         {"C64", 8},     {"F8_E4M3", 1},
     {"F8_E5M2", 1}, {"F8_E4M3FNUZ", 1}, {"F8_E5M2FNUZ", 1}, {"F8_E8M0", 1}, {"OTHER", 1}}};

const DtypeFacts& facts_of(Dtype dtype) {
  const auto index = static_cast<size_t>(dtype);
  require(index < kDtypeFacts.size(), "a dtype has the value ", index, ", which is none of pacer::Dtype");
  return kDtypeFacts[index];
}

void require_name(const std::string& name) {
  require(is_utf8(name) && name.find('\0') == std::string::npos && name != "__metadata__", "the name ",
          quote_for_message(name),
          " cannot be written as safetensors: a name is UTF-8 without NUL, and not \"__metadata__\"");
}

// Bytes of a tensor, which was checked.
int64_t size_to_write(const TensorRecord& tensor) {
  require_name(tensor.name);
  const std::string name = quote_for_message(tensor.name);
  require(tensor.shape.size() <= kMaxSafetensorsDimensions, "the tensor ", name, " has ", tensor.shape.size(),
          " dimensions; the limit is ", kMaxSafetensorsDimensions);
  int64_t bytes = dtype_bytes(tensor.dtype);
  bool empty = false;
  for (const int64_t size : tensor.shape) {
    require(size >= 0, "the tensor ", name, " has a dimension of size ", size, "; sizes start at 0");
    require(size == 0 || bytes <= std::numeric_limits<int64_t>::max() / size, "the tensor ", name,
            " is larger than 2^63 - 1 bytes");
    empty = empty || size == 0;
    bytes *= std::max<int64_t>(size, 1);
  }
  return empty ? 0 : bytes;
}

void add_metadata(JsonWriter& header, const std::map<std::string, std::string>& metadata) {
  if (metadata.empty()) return;
  require(metadata.size() <= kMaxSafetensorsMetadata, "a safetensors file takes ", kMaxSafetensorsMetadata,
          " entries of metadata, not ", metadata.size());
  header.key("__metadata__").object();
  for (const auto& [key, value] : metadata) {
    require(is_utf8(key) && is_utf8(value), "the metadata ", quote_for_message(key),
            " cannot be written as safetensors: keys and values are UTF-8");
    header.add(key, value);
  }
  header.end();
}

void add_entry(JsonWriter& header, const TensorRecord& tensor, int64_t begin, int64_t end) {
  header.key(tensor.name).object().add("dtype", dtype_name(tensor.dtype)).key("shape").list();
  for (const int64_t size : tensor.shape) header.value(size);
  header.end().key("data_offsets").list().value(begin).value(end).end().end();
}

class CountingSink final : public ByteSink {
 public:
  explicit CountingSink(ByteSink& under) : under_(under) {}
  void write(const void* data, size_t bytes) override {
    under_.write(data, bytes);
    bytes_ += static_cast<int64_t>(bytes);
  }
  int64_t bytes() const { return bytes_; }

 private:
  ByteSink& under_;
  int64_t bytes_ = 0;
};

// How a file will look.
struct FilePlan {
  std::vector<size_t> order;   // of tensors in the file
  std::vector<int64_t> sizes;  // in bytes, in that order
  std::string header;          // padded
};

// Checks everything.
FilePlan plan_file(const std::vector<TensorRecord>& tensors,
                   const std::map<std::string, std::string>& metadata) {
  for (const TensorRecord& tensor : tensors) {
    dtype_bytes(tensor.dtype);  // refuses what is none
    require(tensor.dtype != Dtype::OTHER, "the tensor ", quote_for_message(tensor.name),
            " has no dtype that could be written");
  }
  FilePlan plan;
  std::vector<size_t>& order = plan.order;
  order.resize(tensors.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return std::make_tuple(-dtype_bytes(tensors[a].dtype), std::string_view(tensors[a].name)) <
           std::make_tuple(-dtype_bytes(tensors[b].dtype), std::string_view(tensors[b].name));
  });
  std::vector<std::string_view> names;
  for (const TensorRecord& tensor : tensors) names.emplace_back(tensor.name);
  std::sort(names.begin(), names.end());
  const auto twice = std::adjacent_find(names.begin(), names.end());
  if (twice != names.end()) {
    throw InvalidArgument("two tensors have the name " + quote_for_message(*twice) +
                          "; each needs a name of its own");
  }

  JsonWriter json;
  json.object();
  add_metadata(json, metadata);
  int64_t begin = 0;
  for (const size_t index : order) {
    const TensorRecord& tensor = tensors[index];
    const int64_t bytes = size_to_write(tensor);
    // The rest of the line: room for the header and its length.
    constexpr int64_t kLargest = std::numeric_limits<int64_t>::max() - kMaxSafetensorsHeader - 8;
    require(bytes <= kLargest - begin, "the tensor ", quote_for_message(tensor.name),
            " makes the file larger than 2^63 - 1 bytes");
    add_entry(json, tensor, begin, begin + bytes);
    begin += bytes;
    plan.sizes.push_back(bytes);
  }
  std::string& header = plan.header;
  header = json.end().text();
  header.resize((header.size() + 7) / 8 * 8, ' ');
  require(header.size() <= static_cast<size_t>(kMaxSafetensorsHeader), "the names and shapes of ",
          tensors.size(), " tensors take ", header.size(), " bytes as safetensors; the limit is ",
          kMaxSafetensorsHeader);
  return plan;
}

void write_file(ByteSink& sink, const FilePlan& plan, const std::vector<TensorRecord>& tensors,
                const TensorProducer& produce) {
  std::array<char, 8> length;
  for (size_t i = 0; i < length.size(); ++i) {
    length[i] = static_cast<char>((plan.header.size() >> (8 * i)) & 0xFF);
  }
  sink.write(length.data(), length.size());
  sink.write(plan.header.data(), plan.header.size());
  for (size_t i = 0; i < plan.order.size(); ++i) {
    if (plan.sizes[i] == 0) continue;
    CountingSink counted(sink);
    produce(plan.order[i], counted);
    require<Error>(counted.bytes() == plan.sizes[i], "the tensor ",
                   quote_for_message(tensors[plan.order[i]].name), " wrote ", counted.bytes(),
                   " bytes of the ", plan.sizes[i], " that its dtype and shape have");
  }
}

}  // namespace

const char* dtype_name(Dtype dtype) { return facts_of(dtype).name.data(); }
std::optional<Dtype> dtype_named(std::string_view name) {
  for (size_t i = 0; i < static_cast<size_t>(Dtype::OTHER); ++i) {
    if (kDtypeFacts[i].name == name) return static_cast<Dtype>(i);
  }
  return std::nullopt;
}
int64_t dtype_bytes(Dtype dtype) { return facts_of(dtype).bytes; }

void write_safetensors(ByteSink& sink, const std::vector<TensorRecord>& tensors,
                       const TensorProducer& produce, const std::map<std::string, std::string>& metadata) {
  write_file(sink, plan_file(tensors, metadata), tensors, produce);
}

void write_safetensors(ByteSink& sink, std::vector<TensorBytes> tensors,
                       const std::map<std::string, std::string>& metadata) {
  std::vector<TensorRecord> records;
  for (const TensorBytes& tensor : tensors) records.push_back({tensor.name, tensor.dtype, tensor.shape});
  const FilePlan plan = plan_file(records, metadata);
  std::vector<size_t> bytes(tensors.size());
  for (size_t i = 0; i < plan.order.size(); ++i) {
    const TensorBytes& tensor = tensors[plan.order[i]];
    bytes[plan.order[i]] = static_cast<size_t>(plan.sizes[i]);
    require(plan.sizes[i] == 0 || tensor.data != nullptr, "the tensor ", quote_for_message(tensor.name),
            " has elements but its data is null");
  }
  write_file(sink, plan, records, [&](size_t i, ByteSink& out) { out.write(tensors[i].data, bytes[i]); });
}

}  // namespace pacer
