// Named tensors as a safetensors file, and back, one tensor at a time: beside the tensors themselves neither
// direction holds more than kHostPiece bytes in host memory.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>

#include <pacer/files/safetensors.h>
#include <pacer/optimizers/named_tensors.h>

namespace pacer::detail {

constexpr int64_t kHostPiece = int64_t{64} << 20;

// Looks at the floating-point numbers of some tensors while they are written.
struct FiniteCheck {
  std::function<bool(const std::string& name)> wants;
  bool is_finite = true;
};

// Throws InvalidArgument that names the first tensor that write_tensors would refuse: of a dtype that the
// format lacks, or not dense.
void check_storable(const NamedTensors& tensors);

// Writes the values of all tensors. What is dense in host memory goes out as it lies; anything else, a tensor
// on a GPU above all, is copied in pieces of at most kHostPiece. Throws as check_storable, before the first
// byte.
void write_tensors(ByteSink& sink, const NamedTensors& tensors,
                   const std::map<std::string, std::string>& metadata = {}, FiniteCheck* check = nullptr);

// The LibTorch dtype of a tensor in a file; not of Dtype::OTHER.
at::ScalarType tensor_dtype(Dtype dtype);

// Where a tensor of a file is to go; nothing for one that nobody wants.
using TensorPlace = std::function<std::optional<at::Device>(const std::string& name, at::IntArrayRef sizes)>;

// Which elements of a tensor are wanted, in row-major order; nothing for all of them.
struct TensorPiece {
  int64_t first, count;
};
using TensorPieces =
    std::function<std::optional<TensorPiece>(const std::string& name, at::IntArrayRef sizes)>;

// The tensors of a file, each in memory of its own: all on the CPU, or those that `place_of` wants, where it
// wants them. Reads the whole file by FileReader::read_next, for a checksum, or passes over what nobody
// wants. Throws FileError where the file is not sound, or a tensor that is wanted has a dtype that pacer does
// not know; `path` is for messages. Of a tensor on the CPU of which `pieces` wants some elements only, the others
// are 0 and take no memory.
enum class Unwanted { read, skip };
NamedTensors read_tensors(FileReader& reader, const std::string& path, const TensorPlace& place_of = nullptr,
                          Unwanted unwanted = Unwanted::read, const TensorPieces& pieces = nullptr);

}  // namespace pacer::detail
