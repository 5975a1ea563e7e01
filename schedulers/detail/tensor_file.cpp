#include <pacer/schedulers/detail/tensor_file.h>

#include <algorithm>
#include <utility>
#include <vector>

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <pacer/core/error.h>

namespace pacer::detail {
namespace {

constexpr std::pair<at::ScalarType, Dtype> kDtypes[] = {
    {at::kDouble, Dtype::F64},    {at::kFloat, Dtype::F32}, {at::kHalf, Dtype::F16},
    {at::kBFloat16, Dtype::BF16}, {at::kLong, Dtype::I64},  {at::kInt, Dtype::I32},
    {at::kShort, Dtype::I16},     {at::kChar, Dtype::I8},   {at::kByte, Dtype::U8},
    {at::kBool, Dtype::BOOL}};

Dtype file_dtype(const at::Tensor& tensor, const std::string& name) {
  for (const auto& [type, dtype] : kDtypes) {
    if (type == tensor.scalar_type()) return dtype;
  }
  throw InvalidArgument(
      concatenate("tensor ", name, " has dtype ", tensor.scalar_type(),
                  ", which a checkpoint cannot hold; convert it, or keep it out of the model"));
}

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

}  // namespace

at::ScalarType tensor_dtype(Dtype dtype) {
  for (const auto& [type, candidate] : kDtypes) {
    if (candidate == dtype) return type;
  }
  throw Error("a dtype of safetensors without a LibTorch dtype");
}

void write_tensors(ByteSink& sink, const NamedTensors& tensors,
                   const std::map<std::string, std::string>& metadata) {
  std::vector<TensorRecord> records;
  std::vector<at::Tensor> values;
  for (const auto& [name, tensor] : tensors) {
    records.push_back({name, file_dtype(tensor, name), tensor.sizes().vec()});
    values.push_back(tensor.detach());
  }
  write_safetensors(
      sink, records, [&](size_t i, ByteSink& out) { write_elements(out, values[i]); }, metadata);
}

NamedTensors read_tensors(FileReader& reader, const std::string& path, const TensorPlace& place_of) {
  const SafetensorsFile file = SafetensorsFile::read_header(reader, path);
  NamedTensors tensors;
  std::vector<char> piece;
  for (const std::string_view view_of_name : file.names_in_file_order()) {
    std::string name(view_of_name);
    const TensorView view = *file.find(name);
    const std::optional<at::Device> place = place_of ? place_of(name, view.shape) : at::kCPU;
    if (!place) {
      read_in_pieces(reader, view.bytes, piece, nullptr);
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
