#include <pacer/checkpoints/detail/stage_state.h>

#include <sstream>

#include <ATen/ops/empty.h>

#include <pacer/core/error.h>

namespace pacer::detail {
namespace {

// Names may have any character in them, so their length comes before them.
std::string line_of(const char* part, const std::string& name, const at::Tensor& tensor) {
  std::string line =
      concatenate(part, ' ', static_cast<int>(tensor.scalar_type()), ' ', name.size(), ' ', tensor.dim());
  for (const int64_t size : tensor.sizes()) line += concatenate(' ', size);
  return line + ' ' + name + '\n';
}

}  // namespace

std::string listing_of(const TrainingState& state) {
  std::string lines;
  for (const auto& [name, tensor] : state.model) lines += line_of("model", name, tensor);
  for (const auto& [name, tensor] : state.optimizer) lines += line_of("optimizer", name, tensor);
  return lines;
}

WriterOfTensor complete_stages(TrainingState& state, const std::vector<std::string>& listings, int replicas) {
  const auto pipelines = static_cast<size_t>(replicas);
  WriterOfTensor writers;
  writers.model_is_dealt_out = listings.size() > 1;
  for (size_t rank = 0; rank < listings.size(); ++rank) {
    const size_t first = rank - rank % pipelines;
    require(listings[rank] == listings[first], "rank ", rank,
            " has state of other names, dtypes or shapes than rank ", first,
            ", which has the same stage, so that no checkpoint can hold both; give replicas the same model "
            "and the same steps");
    std::istringstream lines(listings[rank]);
    for (std::string part; lines >> part;) {
      int number = 0;
      size_t length = 0, dimensions = 0;
      lines >> number >> length >> dimensions;
      std::vector<int64_t> sizes(dimensions);
      for (int64_t& size : sizes) lines >> size;
      std::string name(length, ' ');
      lines.get();  // the space before it
      lines.read(name.data(), static_cast<std::streamsize>(length));
      const auto dtype = static_cast<at::ScalarType>(number);
      const bool is_model = part == "model";
      (is_model ? writers.model : writers.optimizer).emplace(name, static_cast<int>(rank));
      NamedTensors& tensors = is_model ? state.model : state.optimizer;
      if (tensors.count(name) == 0) {
        tensors.emplace(name, at::empty(sizes, at::TensorOptions().dtype(dtype).device(at::kMeta)));
      }
    }
  }
  return writers;
}

}  // namespace pacer::detail
