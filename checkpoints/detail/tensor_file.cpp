#include <pacer/checkpoints/detail/tensor_file.h>

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <new>
#include <utility>
#include <vector>

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <pacer/core/error.h>

namespace pacer::detail {
namespace {

constexpr std::pair<at::ScalarType, Dtype> kDtypes[] = {{at::kDouble, Dtype::F64},
                                                        {at::kFloat, Dtype::F32},
                                                        {at::kHalf, Dtype::F16},
                                                        {at::kBFloat16, Dtype::BF16},
                                                        {at::kLong, Dtype::I64},
                                                        {at::kInt, Dtype::I32},
                                                        {at::kShort, Dtype::I16},
                                                        {at::kChar, Dtype::I8},
                                                        {at::kByte, Dtype::U8},
                                                        {at::kBool, Dtype::BOOL},
                                                        {at::kUInt64, Dtype::U64},
                                                        {at::kUInt32, Dtype::U32},
                                                        {at::kUInt16, Dtype::U16},
                                                        {at::kComplexFloat, Dtype::C64},
                                                        {at::kFloat8_e4m3fn, Dtype::F8_E4M3},
                                                        {at::kFloat8_e5m2, Dtype::F8_E5M2},
                                                        {at::kFloat8_e4m3fnuz, Dtype::F8_E4M3FNUZ},
                                                        {at::kFloat8_e5m2fnuz, Dtype::F8_E5M2FNUZ},
                                                        {at::kFloat8_e8m0fnu, Dtype::F8_E8M0}};

Dtype file_dtype(const at::Tensor& tensor, const std::string& name) {
  constexpr const char* kAdvice =
      ", which no safetensors file can hold; convert it, or keep it out of the model";
  require(tensor.layout() == at::kStrided, "tensor ", name, " has the layout ", tensor.layout(), kAdvice);
  for (const auto& [type, dtype] : kDtypes) {
    if (type == tensor.scalar_type()) return dtype;
  }
  throw InvalidArgument(concatenate("tensor ", name, " has dtype ", tensor.scalar_type(), kAdvice));
}

// Whether none of the numbers has all bits of its exponent set: those that are infinite or NaN have.
template <class Bits>
bool are_finite(const char* data, size_t bytes, Bits exponent) {
  bool found = false;
  for (size_t at = 0; at + sizeof(Bits) <= bytes; at += sizeof(Bits)) {
    Bits bits;
    std::memcpy(&bits, data + at, sizeof bits);
    found |= (bits & exponent) == exponent;
  }
  return !found;
}

// Passes on what is written to it, whole numbers at a time, and looks whether they are finite.
class FiniteSink final : public ByteSink {
 public:
  FiniteSink(ByteSink& under, Dtype dtype) : under_(under), dtype_(dtype) {}
  void write(const void* data, size_t bytes) override {
    const char* const begin = static_cast<const char*>(data);
    switch (dtype_) {
      case Dtype::F64:
        is_finite &= are_finite(begin, bytes, uint64_t{0x7FF0'0000'0000'0000});
        break;
      case Dtype::F32:
      case Dtype::C64:
        is_finite &= are_finite(begin, bytes, uint32_t{0x7F80'0000});
        break;
      case Dtype::F16:
        is_finite &= are_finite(begin, bytes, uint16_t{0x7C00});
        break;
      case Dtype::BF16:
        is_finite &= are_finite(begin, bytes, uint16_t{0x7F80});
        break;
      default:
        break;
    }
    under_.write(data, bytes);
  }
  bool is_finite = true;

 private:
  ByteSink& under_;
  Dtype dtype_;
};

void write_elements(ByteSink& sink, const at::Tensor& tensor) {
  const int64_t bytes = tensor.numel() * static_cast<int64_t>(tensor.element_size());
  const bool lies_ready = tensor.is_cpu() && tensor.is_contiguous();
  if (lies_ready || bytes <= kHostPiece) {
    const at::Tensor host = lies_ready ? tensor : tensor.contiguous().cpu();
    sink.write(host.const_data_ptr(), static_cast<size_t>(bytes));
    return;
  }
  // Rows that fit into a piece go together; larger ones are cut again. A tensor without dimensions fits.
  const int64_t rows = tensor.size(0), step = std::max<int64_t>(kHostPiece / (bytes / rows), 1);
  for (int64_t row = 0; row < rows; row += step) {
    write_elements(sink, rows == 1 || step == 1 ? tensor.select(0, row)
                                                : tensor.narrow(0, row, std::min(step, rows - row)));
  }
}

// The next bytes of the file to a tensor of bytes on a GPU, by way of `piece`; without one to nowhere.
void read_in_pieces(FileReader& reader, size_t bytes, std::vector<char>& piece, const at::Tensor* to) {
  for (size_t at = 0; at < bytes;) {
    const size_t count = std::min(bytes - at, static_cast<size_t>(kHostPiece));
    if (piece.size() < count) piece.resize(count);
    reader.read_next(piece.data(), count);
    if (to != nullptr) {
      const auto length = static_cast<int64_t>(count);
      to->narrow(0, static_cast<int64_t>(at), length).copy_(at::from_blob(piece.data(), {length}, at::kByte));
    }
    at += count;
  }
}

// Pages take memory once something is written to them.
at::Tensor untouched_zeros(at::IntArrayRef sizes, at::ScalarType dtype, size_t bytes) {
  void* const memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, /*fd=*/-1, /*offset=*/0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  return at::from_blob(
      memory, sizes, [bytes](void* at) { ::munmap(at, bytes); }, at::TensorOptions(dtype));
}

// The next bytes of the file, which are those of the tensor: some of its elements.
at::Tensor read_piece(FileReader& reader, const TensorView& view, const TensorPiece& piece,
                      std::vector<char>& buffer) {
  at::Tensor tensor = untouched_zeros(view.shape, tensor_dtype(view.dtype), view.bytes);
  const size_t size = tensor.element_size(), begin = static_cast<size_t>(piece.first) * size,
               bytes = static_cast<size_t>(piece.count) * size;
  read_in_pieces(reader, begin, buffer, nullptr);
  if (bytes > 0) reader.read_next(static_cast<char*>(tensor.mutable_data_ptr()) + begin, bytes);
  read_in_pieces(reader, view.bytes - begin - bytes, buffer, nullptr);
  return tensor;
}

}  // namespace

at::ScalarType tensor_dtype(Dtype dtype) {
  for (const auto& [type, candidate] : kDtypes) {
    if (candidate == dtype) return type;
  }
  throw Error("a dtype of safetensors without a LibTorch dtype");
}

void check_storable(const NamedTensors& tensors) {
  for (const auto& [name, tensor] : tensors) file_dtype(tensor, name);
}

void write_tensors(ByteSink& sink, const NamedTensors& tensors,
                   const std::map<std::string, std::string>& metadata, FiniteCheck* check) {
  std::vector<TensorRecord> records;
  std::vector<at::Tensor> values;
  for (const auto& [name, tensor] : tensors) {
    records.push_back({name, file_dtype(tensor, name), tensor.sizes().vec()});
    values.push_back(tensor.detach().resolve_conj().resolve_neg());
  }
  const auto write = [&](size_t i, ByteSink& out) {
    if (check == nullptr || !check->wants(records[i].name)) return write_elements(out, values[i]);
    FiniteSink looking(out, records[i].dtype);
    write_elements(looking, values[i]);
    check->is_finite &= looking.is_finite;
  };
  write_safetensors(sink, records, write, metadata);
}

NamedTensors read_tensors(FileReader& reader, const std::string& path, const TensorPlace& place_of,
                          Unwanted unwanted, const TensorPieces& pieces) {
  const SafetensorsFile file = SafetensorsFile::read_header(reader, path);
  NamedTensors tensors;
  std::vector<char> piece;
  for (const std::string_view view_of_name : file.names_in_file_order()) {
    std::string name(view_of_name);
    const TensorView view = *file.find(name);
    const std::optional<at::Device> place = place_of ? place_of(name, view.shape) : at::kCPU;
    if (!place && unwanted == Unwanted::skip) {
      reader.skip_next(view.bytes);
      continue;
    }
    if (!place) {
      read_in_pieces(reader, view.bytes, piece, nullptr);
      continue;
    }
    require<FileError>(view.dtype != Dtype::OTHER, path, ": the tensor ", name, " has the dtype ",
                       view.dtype_text, ", which pacer does not know");
    const auto wanted = pieces && view.bytes > 0 ? pieces(name, view.shape) : std::nullopt;
    if (wanted && place->is_cpu()) {
      tensors.emplace(std::move(name), read_piece(reader, view, *wanted, piece));
      continue;
    }
    at::Tensor tensor = at::empty(view.shape, at::TensorOptions(tensor_dtype(view.dtype)).device(*place));
    if (place->is_cpu()) {
      if (view.bytes > 0) reader.read_next(tensor.mutable_data_ptr(), view.bytes);
    } else {
      const at::Tensor bytes = tensor.view({-1}).view(at::kByte);
      read_in_pieces(reader, view.bytes, piece, &bytes);
    }
    tensors.emplace(std::move(name), std::move(tensor));
  }
  return tensors;
}

}  // namespace pacer::detail
