#include <pacer/schedulers/detail/tensor_file.h>

#include <cstring>
#include <utility>

#include <ATen/ops/empty.h>

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

at::ScalarType tensor_dtype(Dtype dtype) {
  for (const auto& [type, candidate] : kDtypes) {
    if (candidate == dtype) return type;
  }
  throw Error("a dtype of safetensors without a LibTorch dtype");
}

}  // namespace

void write_tensors(ByteSink& sink, const NamedTensors& tensors,
                   const std::map<std::string, std::string>& metadata) {
  std::vector<at::Tensor> held;  // until everything is written
  std::vector<TensorBytes> records;
  for (const auto& [name, tensor] : tensors) {
    held.push_back(tensor.detach().cpu().contiguous());
    const at::Tensor& host = held.back();
    records.push_back({name, file_dtype(host, name), host.sizes().vec(),
                       host.numel() == 0 ? nullptr : host.const_data_ptr()});
  }
  write_safetensors(sink, std::move(records), metadata);
}

NamedTensors read_tensors(std::vector<char> bytes, const std::string& path) {
  const SafetensorsFile file = SafetensorsFile::parse(std::move(bytes), path);
  NamedTensors tensors;
  for (const std::string_view name : file.names()) {
    const TensorView view = *file.find(name);
    at::Tensor tensor = at::empty(view.shape, tensor_dtype(view.dtype));
    if (view.bytes > 0) std::memcpy(tensor.mutable_data_ptr(), view.data, view.bytes);
    tensors.emplace(std::string(name), std::move(tensor));
  }
  return tensors;
}

}  // namespace pacer::detail
