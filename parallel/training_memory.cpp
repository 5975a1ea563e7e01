#include <pacer/parallel/training_memory.h>

#include <algorithm>

#include <c10/core/ScalarType.h>
#include <torch/nn/module.h>

#include <pacer/core/error.h>
#include <pacer/optimizers/detail/parameter_check.h>
#include <pacer/optimizers/detail/state_fields.h>

namespace pacer {
namespace {

// Elements of blocks that are there at a time: values of the one that runs and of those that are on their
// way, gradients of the one that fills and of the one before it, and both of what is in no block.
int64_t block_memory(const TrainingMemoryOptions& options) {
  const int64_t block = options.largest_block(), outside = options.outside_blocks();
  require(
      block >= 1 && outside >= 0 && options.prefetch() >= 0,
      "training_memory of Sharded::parameters needs largest_block, the elements of the largest block, >= 1, "
      "and outside_blocks and prefetch >= 0, not ",
      block, ", ", outside, " and ", options.prefetch());
  return (1 + options.prefetch() + 2) * block + 2 * outside;
}

}  // namespace

TrainingMemory training_memory(const TrainingMemoryOptions& options) {
  const int64_t parameters = options.parameters(), ranks = options.ranks();
  require(parameters >= 0 && ranks >= 1,
          "training_memory needs 0 parameters or more and 1 rank or more, not ", parameters, " and ", ranks);
  const at::ScalarType type = options.dtype();
  require(type == at::kDouble || type == at::kFloat || type == at::kBFloat16 || type == at::kHalf,
          "training_memory counts parameters in fp64, fp32, bf16 or fp16, not in ", c10::toString(type));
  const kernels::AdamStorage storage =
      detail::storage_for(type, options.master_weights(), options.rounding(), "of this dtype");
  detail::GroupSettings settings;
  settings.amsgrad = options.amsgrad();
  settings.state_bits = options.state_bits();
  require(
      settings.state_bits == 32 || (settings.state_bits == 8 && !options.amsgrad() && type != at::kDouble),
      "training_memory counts state in 32 bits, or in 8 without amsgrad and for parameters that are not "
      "fp64");
  const int64_t released = options.largest_released();
  require(released >= 0 && released <= parameters, "training_memory needs from 0 to ", parameters,
          " elements of the largest released gradient, not ", released);
  require(released == 0 || (ranks == 1 && !options.accumulates_in_fp32() && options.orthogonalized() == 0),
          "training_memory counts released gradients on one rank, without accumulation and Muon, as "
          "GradientRelease has them");
  const int64_t in_matrices = options.orthogonalized();
  require(in_matrices >= 0 && in_matrices <= parameters, "training_memory needs from 0 to ", parameters,
          " orthogonalized elements, all of the parameters, not ", in_matrices);
  require(in_matrices == 0 || !options.amsgrad(),
          "training_memory counts no amsgrad beside Muon, which does not have it");
  const bool is_shared = options.sharded().has_value() && ranks > 1;
  const auto part_of = [&](int64_t elements) {
    return is_shared ? (elements + ranks - 1) / ranks : elements;
  };
  const int64_t part = part_of(parameters);
  const auto width = static_cast<int64_t>(c10::elementSize(type));

  TrainingMemory memory;
  const bool shares_weights = is_shared && options.sharded() == Sharded::parameters;
  memory.weights = (shares_weights ? part : parameters) * width;
  for (const detail::StateField& field : detail::kStateFields) {
    const auto dtype = detail::field_dtype(field.kind, storage, settings);
    const bool is_scale = detail::is_scale(field.kind);
    if (!dtype || !(is_scale || detail::is_elementwise(field.kind))) continue;
    const bool is_exact =
        field.kind == detail::StateKind::master || field.kind == detail::StateKind::remainder;
    const bool is_second = field.kind == detail::StateKind::second_moment ||
                           field.kind == detail::StateKind::second_moment_scale;
    const int64_t elements = is_second ? part_of(parameters - in_matrices) : part;
    (is_exact ? memory.exact : memory.moments) +=
        (is_scale ? detail::scales_of(elements) : elements) * static_cast<int64_t>(c10::elementSize(*dtype));
  }
  const bool keeps_whole = !is_shared || options.sharded() == Sharded::state;
  constexpr int64_t kWide = 4;
  const bool is_wide = options.accumulates_in_fp32() && width < kWide;
  memory.gradients = (keeps_whole ? (released > 0 ? released : parameters) * (is_wide ? kWide : width) : 0) +
                     (is_shared ? part * width : 0);
  if (is_wide && !keeps_whole) memory.gradients += part * kWide;
  if (shares_weights) {
    memory.units = block_memory(options) * width;
  } else if (!keeps_whole) {
    memory.units = 2 * std::min(options.unit_bytes(), parameters * width);
  }
  return memory;
}

}  // namespace pacer
