#include <pacer/modules/detail/head_loss.h>

#include <algorithm>
#include <cmath>
#include <optional>

#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <pacer/core/error.h>
#include <pacer/device/detail/stream.h>
#include <pacer/modules/detail/head_products.h>
#include <pacer/modules/detail/matrix.h>
#include <pacer/modules/detail/operator_list.h>
#include <pacer/modules/detail/product.h>

namespace pacer::detail {
namespace {

using Options = modules::LinearCrossEntropyOptions;

void check_options(const Options& options) {
  require(options.label_smoothing() >= 0 && options.label_smoothing() < 1,
          "LinearCrossEntropyOptions::label_smoothing must be in [0, 1), not ", options.label_smoothing());
  require(options.z_loss() >= 0, "LinearCrossEntropyOptions::z_loss must be at least 0, not ",
          options.z_loss());
  require(options.soft_cap() >= 0 && std::isfinite(options.soft_cap()),
          "LinearCrossEntropyOptions::soft_cap must be a number from 0 on, not ", options.soft_cap());
  const int64_t chunk_bytes = options.chunk_bytes().value_or(1);
  require(chunk_bytes >= 1, "LinearCrossEntropyOptions::chunk_bytes must be at least 1, not ", chunk_bytes);
}

void check_tensors(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& targets) {
  require(weight.dim() == 2 && hidden.dim() >= 1 && hidden.size(-1) == weight.size(1),
          "linear_cross_entropy takes hidden [..., in] and weight [columns, in], not ", hidden.sizes(),
          " and ", weight.sizes());
  require(targets.sizes() == hidden.sizes().slice(0, hidden.dim() - 1) && targets.scalar_type() == at::kLong,
          "linear_cross_entropy takes targets in Long, one for each row of hidden ", hidden.sizes(), ", not ",
          targets.scalar_type(), " ", targets.sizes());
  require(weight.device() == hidden.device() && targets.device() == hidden.device(),
          "linear_cross_entropy takes tensors on one device, not hidden on ", hidden.device(), ", weight on ",
          weight.device(), " and targets on ", targets.device());
}

void check_row_weights(const at::Tensor& weights, const at::Tensor& targets) {
  if (!weights.defined()) return;
  require(weights.sizes() == targets.sizes() && weights.scalar_type() == at::kFloat,
          "linear_cross_entropy takes weights of rows in Float, one for each target ", targets.sizes(),
          ", not ", weights.scalar_type(), " ", weights.sizes());
  require(weights.device() == targets.device() && !weights.requires_grad(),
          "linear_cross_entropy takes weights of rows that need no gradient, on the device of the targets, ",
          targets.device(), "; detach() them, or move them");
}

void check_8_bits(at::ScalarType dtype, const at::Tensor& weight) {
  constexpr int64_t kMultiple = 16;
  require(dtype != at::kFloat,
          "linear_cross_entropy in 8-bit floats is for hidden states of 16 bits, not Float; cast them, or "
          "use autocast");
  require(
      weight.size(0) % kMultiple == 0 && weight.size(1) % kMultiple == 0,
      "linear_cross_entropy in 8-bit floats needs a weight whose sides are multiples of 16, not ",
      weight.sizes(),
      "; pad the vocabulary with columns that no target names, or leave LinearCrossEntropyOptions::fp8 out");
}

// A look at the values, which on a GPU would have to be waited for.
void check_targets(const at::Tensor& targets, int64_t columns, int64_t ignore_index) {
  if (!targets.device().is_cpu()) return;
  const int64_t* values = targets.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < targets.numel(); ++i) {
    require((values[i] >= 0 && values[i] < columns) || values[i] == ignore_index, "target ", i,
            " of linear_cross_entropy is ", values[i], ", but the weight has columns 0 to ", columns - 1,
            ", and ignored is ", ignore_index);
  }
}

at::Tensor loss_operand(const at::Tensor& x, at::ScalarType dtype) {
  return at::autocast::is_autocast_enabled(x.device().type())
             ? at::autocast::cached_cast(dtype, x, x.device().type())
             : x;
}

// Products have whole tiles where rows are many. Each chunk reads and writes the fp32 sum of the weight's gradient, which
// its products hide from about a thousand rows on.
int64_t rows_of_chunk(int64_t row_bytes, const Options& options) {
  constexpr int64_t kTile = 128, kRows = 12 * kTile, kBytes = int64_t{128} << 20;
  const int64_t bytes = options.chunk_bytes().value_or(std::max(kBytes, kRows * row_bytes));
  const int64_t rows = std::max<int64_t>(1, bytes / std::max<int64_t>(1, row_bytes));
  return rows < kTile ? rows : rows / kTile * kTile;
}

}  // namespace

LossRows LossRows::narrow(int64_t first, int64_t count) const {
  return {targets.narrow(0, first, count), weights.defined() ? weights.narrow(0, first, count) : weights};
}

at::Tensor LossRows::count(int64_t ignore_index) const {
  const at::Tensor counted = targets.ne(ignore_index);
  return (weights.defined() ? counted * weights : counted).sum().to(at::kFloat);
}

LossInput checked_loss_input(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& columns,
                             const at::Tensor& targets, const Options& options,
                             const at::Tensor& row_weights) {
  check_options(options);
  check_tensors(hidden, weight, targets);
  check_row_weights(row_weights, targets);
  const at::ScalarType dtype = computing_type(hidden, /*in_8_bits=*/false);
  LossInput input{as_rows(loss_operand(hidden, dtype)).contiguous(), loss_operand(columns, dtype), {}};
  require(
      is_castable(dtype) && input.hidden.scalar_type() == dtype && input.columns.scalar_type() == dtype,
      "linear_cross_entropy computes in Float, BFloat16 or Half, where hidden and weight have the same, not ",
      input.hidden.scalar_type(), " and ", input.columns.scalar_type(),
      "; cast one of them, or use autocast");
  if (options.fp8()) check_8_bits(dtype, weight);
  input.rows.targets = targets.reshape({-1}).contiguous();
  if (row_weights.defined()) input.rows.weights = row_weights.reshape({-1}).contiguous();
  check_targets(input.rows.targets, weight.size(0), options.ignore_index());
  return input;
}

kernels::CrossEntropy cross_entropy_of(const at::Tensor& logits, const LossRows& rows,
                                       const Options& options) {
  kernels::CrossEntropy work;
  work.type = element_type(logits.scalar_type());
  work.rows = logits.size(0);
  work.columns = logits.size(1);
  work.logits = logits.mutable_data_ptr();
  work.targets = rows.targets.const_data_ptr<int64_t>();
  if (rows.weights.defined()) work.weights = rows.weights.const_data_ptr<float>();
  work.ignore_index = options.ignore_index();
  work.smoothing = static_cast<float>(options.label_smoothing());
  work.z_loss = static_cast<float>(options.z_loss());
  work.soft_cap = static_cast<float>(options.soft_cap());
  return work;
}

void run_cross_entropy(const kernels::CrossEntropy& work, at::Device device) {
  if (device.is_cuda()) {
    const c10::DeviceGuard guard(device);
    kernels::cross_entropy_cuda(work, current_stream(device));
  } else {
    at::parallel_for(0, work.rows, 1,
                     [&](int64_t begin, int64_t end) { kernels::cross_entropy_cpu(work, begin, end); });
  }
}

LossSum loss_sum(const at::Tensor& hidden, const at::Tensor& columns, const LossRows& of_rows,
                 const Options& options, int64_t chunk_columns, bool for_hidden, bool for_weight,
                 const MakeLosses& make) {
  const c10::impl::ExcludeDispatchKeyGuard nothing_is_kept(
      kKeepingKey);  // losses are made in the memory of products
  const int64_t rows = hidden.size(0);
  const int64_t chunk_rows =
      rows_of_chunk(chunk_columns * static_cast<int64_t>(hidden.element_size()), options);
  const HeadProducts products(hidden, columns, options.fp8() && rows > 0, for_hidden);
  LossSum sum;
  sum.losses = at::empty({rows}, hidden.options().dtype(at::kFloat));
  if (for_hidden) sum.hidden = at::empty_like(hidden);
  if (for_weight && rows == 0) sum.weight = at::zeros(columns.sizes(), columns.options());
  for (int64_t first = 0; first < rows; first += chunk_rows) {
    const int64_t count = std::min(chunk_rows, rows - first);
    const LossRows of_chunk = of_rows.narrow(first, count);
    const at::Tensor logits = products.logits(first, count);
    at::Tensor codes;
    if (for_hidden && products.are_in_8_bits()) codes = at::empty_like(logits, at::kByte);
    make(logits, of_chunk, sum.losses.narrow(0, first, count), codes);
    if (for_hidden) {
      const at::Tensor gradient = sum.hidden.narrow(0, first, count);
      products.write_hidden_gradient(logits, codes, gradient);
      if (codes.defined() && of_chunk.weights.defined()) gradient.mul_(of_chunk.weights.unsqueeze(1));
    }
    if (for_weight) products.add_weight_gradient(logits, first, sum.weight);
  }
  return sum;
}

at::Tensor scaled_gradient(const at::Tensor& gradient, const at::Tensor& factor, at::ScalarType dtype) {
  if (!gradient.defined()) return gradient;
  at::Tensor result = at::empty(gradient.sizes(), gradient.options().dtype(dtype));
  return at::mul_out(result, gradient, factor);
}

}  // namespace pacer::detail
