#include <pacer/schedulers/sequence_length.h>

#include <algorithm>
#include <cstdio>
#include <optional>
#include <utility>

#include <pacer/core/error.h>
#include <pacer/hooks/session_parts.h>
#include <pacer/hooks/step_report.h>

namespace pacer {
namespace {

// How many sequences a tensor holds: the size of its first dimension that is not along them, [B, S] and
// [S, B] alike.
int64_t count_sequences(const at::Tensor& tensor, const std::vector<int64_t>& dimensions) {
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (std::find(dimensions.begin(), dimensions.end(), d) == dimensions.end()) return tensor.size(d);
  }
  return 1;
}

}  // namespace

at::Tensor truncate_sequence(const at::Tensor& tensor, const std::vector<int64_t>& dimensions,
                             int64_t length) {
  at::Tensor cut = tensor;
  for (const int64_t dimension : dimensions) cut = cut.narrow(dimension, 0, length);
  return cut.contiguous();
}

at::Tensor reshape_sequence(const at::Tensor& tensor, int64_t length) {
  const int64_t pieces = tensor.size(0) * tensor.size(1) / length;
  at::Tensor flat = tensor.flatten(0, 1).narrow(0, 0, pieces * length);
  return flat.unflatten(0, {pieces, length}).contiguous();
}

SequenceLength::SequenceLength(SequenceLengthOptions options) : options_(std::move(options)) {
  options_.schedule().validate();
}

std::vector<int64_t> SequenceLength::dimensions_of(size_t index, const at::Tensor& tensor) const {
  std::vector<int64_t> dimensions;
  if (!options_.dimensions().empty()) {
    dimensions = options_.dimensions()[index];
    for (int64_t& dimension : dimensions) {
      require(dimension >= -tensor.dim() && dimension < tensor.dim(), "SequenceLength: tensor ", index,
              " of the batch has shape ", tensor.sizes(), " and no dimension ", dimension);
      if (dimension < 0) dimension += tensor.dim();
    }
    return dimensions;
  }
  switch (tensor.dim()) {
    case 0:
    case 1:
      return {};
    case 2:
    case 3:
      return {1};
    case 4:
      return {2, 3};
    default:
      throw InvalidArgument(detail::concatenate("SequenceLength cannot tell which dimension of tensor ",
                                                index, " of the batch, of shape ", tensor.sizes(),
                                                ", is the sequence; name it with dimensions()"));
  }
}

std::string SequenceLength::agreement() const {
  std::string text = options_.mode() == LengthMode::truncate ? "truncated, " : "reshaped, ";
  text += options_.schedule().describe();
  if (!options_.dimensions().empty()) text += ", dimensions";
  for (const std::vector<int64_t>& of_tensor : options_.dimensions()) {
    text += detail::concatenate(" {", at::IntArrayRef(of_tensor), "}");
  }
  return text + (options_.allow_shorter() ? ", shorter batches allowed" : "");
}

void SequenceLength::attach(SessionParts& parts) { describes_ = OnceOnFirstRank(parts.is_first_rank()); }

// The shapes that are cut are the first that anybody can look at to see that it is the wrong dimension.
void SequenceLength::describe_cuts(const MicroBatch& batch,
                                   const std::vector<std::vector<int64_t>>& dimensions, int64_t full,
                                   int64_t length) const {
  std::string cuts, masks;
  for (size_t i = 0; i < dimensions.size(); ++i) {
    const std::vector<int64_t>& of_tensor = dimensions[i];
    if (of_tensor.empty()) continue;
    const at::IntArrayRef sizes = batch.tensors[i].sizes();
    cuts += detail::concatenate(cuts.empty() ? "" : ", ", of_tensor.size() > 1 ? "dimensions " : "dimension ",
                                of_tensor.front());
    for (size_t d = 1; d < of_tensor.size(); ++d) cuts += detail::concatenate(" and ", of_tensor[d]);
    cuts += detail::concatenate(" of tensor ", i, ", of shape ", sizes);
    const auto sides = std::count(sizes.begin(), sizes.end(), full);
    if (i > 0 && options_.dimensions().empty() && sides > static_cast<int64_t>(of_tensor.size())) {
      masks += detail::concatenate("; if tensor ", i, " is a mask, name both of its sides with dimensions()");
    }
  }
  const std::string text = detail::concatenate(
      "pacer: SequenceLength ", options_.mode() == LengthMode::truncate ? "cuts " : "reshapes ", cuts,
      ", to ", length, ", and later to up to ", options_.schedule().last(), masks, "\n");
  std::fputs(text.c_str(), stderr);
}

void SequenceLength::begin(const Progress& progress, MicroBatch& batch) {
  const size_t count = batch.tensors.size();
  require(options_.dimensions().empty() || options_.dimensions().size() == count,
          "SequenceLength was told the ", "dimensions of ", options_.dimensions().size(),
          " tensors, but the batch has ", count);
  std::vector<std::vector<int64_t>> dimensions;
  std::optional<int64_t> full;  // L
  int64_t sequences = 0;        // B
  for (size_t i = 0; i < count; ++i) {
    const at::Tensor& tensor = batch.tensors[i];
    dimensions.push_back(dimensions_of(i, tensor));
    for (const int64_t dimension : dimensions.back()) {
      if (!full) sequences = count_sequences(tensor, dimensions.back());
      if (!full) full = tensor.size(dimension);
      require(tensor.size(dimension) == *full, "SequenceLength: dimension ", dimension, " of tensor ", i,
              " of the batch, of shape ", tensor.sizes(), ", is not ", *full,
              " long as the sequences before it; name the sequence dimensions with dimensions()");
    }
    const bool left_alone =
        dimensions.back().empty() && (!options_.dimensions().empty() || tensor.dim() == 0);
    require(
        options_.mode() == LengthMode::truncate || left_alone || dimensions.back() == std::vector<int64_t>{1},
        "SequenceLength cannot reshape tensor ", i, " of the batch, of shape ", tensor.sizes(),
        "; reshape needs [batch, sequence, ...], so build the mask in the model, or truncate");
  }
  require(full.has_value(),
          "SequenceLength finds no sequence in the batch; name the dimensions with dimensions()");
  int64_t length = options_.schedule().length(progress);
  require(length <= *full || options_.allow_shorter(), "SequenceLength wants sequences of ", length,
          " tokens, but the batch has ", *full, "; end the curriculum at ", *full,
          " or set allow_shorter(true)");
  length = std::min(length, *full);
  if (length != *full && describes_.take()) describe_cuts(batch, dimensions, *full, length);
  for (size_t i = 0; i < count; ++i) {
    if (dimensions[i].empty() || length == *full) continue;
    at::Tensor& tensor = batch.tensors[i];
    tensor = options_.mode() == LengthMode::truncate ? truncate_sequence(tensor, dimensions[i], length)
                                                     : reshape_sequence(tensor, length);
  }
  const bool reshaped = options_.mode() == LengthMode::reshape;
  batch.tokens = reshaped ? sequences * *full / length * length : sequences * length;
  length_ = length;
}

void SequenceLength::after_step(StepReport& report) {
  report.add("sequence_length", static_cast<double>(length_));
}

}  // namespace pacer
