#include <pacer/modules/linear_cross_entropy.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>

#include <pacer/core/error.h>
#include <pacer/device/detail/stream.h>
#include <pacer/kernels/cross_entropy.h>
#include <pacer/modules/detail/head_products.h>
#include <pacer/modules/detail/matrix.h>
#include <pacer/modules/detail/product.h>

namespace pacer::modules {
namespace {

using Options = LinearCrossEntropyOptions;

// What a loss knows of rows beside their hidden states.
struct Rows {
  at::Tensor targets;  // Long [rows]
  at::Tensor weights;  // fp32 [rows], undefined: ones

  Rows narrow(int64_t first, int64_t count) const {
    return {targets.narrow(0, first, count), weights.defined() ? weights.narrow(0, first, count) : weights};
  }
  // How much counts, fp32 [].
  at::Tensor count(int64_t ignore_index) const {
    const at::Tensor counted = targets.ne(ignore_index);
    return (weights.defined() ? counted * weights : counted).sum().to(at::kFloat);
  }
};

// Of all rows: the sum of their losses, and its gradients, where they are wanted.
struct LossSum {
  at::Tensor losses;  // fp32 [rows]
  at::Tensor hidden;  // [rows, in], of the dtype of computing
  at::Tensor weight;  // [columns, in], fp32 where several chunks of 16 bits were added up
};

// `logits` become their gradients, and `codes`, where they are defined, the same in e5m2.
void make_losses(const at::Tensor& logits, const Rows& rows, const Options& options, bool wants_gradient,
                 const at::Tensor& losses, const at::Tensor& codes) {
  kernels::CrossEntropy work;
  work.type = detail::element_type(logits.scalar_type());
  work.rows = logits.size(0);
  work.columns = logits.size(1);
  work.logits = logits.mutable_data_ptr();
  work.targets = rows.targets.const_data_ptr<int64_t>();
  if (rows.weights.defined()) work.weights = rows.weights.const_data_ptr<float>();
  work.ignore_index = options.ignore_index();
  work.smoothing = static_cast<float>(options.label_smoothing());
  work.z_loss = static_cast<float>(options.z_loss());
  work.soft_cap = static_cast<float>(options.soft_cap());
  work.wants_gradient = wants_gradient;
  work.losses = losses.mutable_data_ptr<float>();
  if (codes.defined()) work.codes = codes.mutable_data_ptr<uint8_t>();
  if (logits.device().is_cuda()) {
    const c10::DeviceGuard guard(logits.device());
    kernels::cross_entropy_cuda(work, detail::current_stream(logits.device()));
  } else {
    at::parallel_for(0, work.rows, 1,
                     [&](int64_t begin, int64_t end) { kernels::cross_entropy_cpu(work, begin, end); });
  }
}

// Products have whole tiles where rows are many. Each chunk reads and writes the fp32 sum of the weight's gradient, which
// its products hide from about a thousand rows on.
int64_t rows_of_chunk(int64_t row_bytes, const std::optional<int64_t>& chunk_bytes) {
  constexpr int64_t kTile = 128, kRows = 12 * kTile, kBytes = int64_t{128} << 20;
  const int64_t bytes = chunk_bytes.value_or(std::max(kBytes, kRows * row_bytes));
  const int64_t rows = std::max<int64_t>(1, bytes / std::max<int64_t>(1, row_bytes));
  return rows < kTile ? rows : rows / kTile * kTile;
}

LossSum loss_sum(const at::Tensor& hidden, const at::Tensor& weight, const Rows& of_rows,
                 const Options& options, bool for_hidden, bool for_weight) {
  const int64_t rows = hidden.size(0), columns = weight.size(0);
  const int64_t chunk_rows =
      rows_of_chunk(columns * static_cast<int64_t>(hidden.element_size()), options.chunk_bytes());
  const detail::HeadProducts products(hidden, weight, options.fp8() && rows > 0, for_hidden);
  LossSum sum;
  sum.losses = at::empty({rows}, hidden.options().dtype(at::kFloat));
  if (for_hidden) sum.hidden = at::empty_like(hidden);
  if (for_weight && rows == 0) sum.weight = at::zeros(weight.sizes(), weight.options());
  for (int64_t first = 0; first < rows; first += chunk_rows) {
    const int64_t count = std::min(chunk_rows, rows - first);
    const Rows of_chunk = of_rows.narrow(first, count);
    const at::Tensor logits = products.logits(first, count);
    at::Tensor codes;
    if (for_hidden && products.are_in_8_bits()) codes = at::empty_like(logits, at::kByte);
    make_losses(logits, of_chunk, options, for_hidden || for_weight, sum.losses.narrow(0, first, count),
                codes);
    if (for_hidden) {
      const at::Tensor gradient = sum.hidden.narrow(0, first, count);
      products.write_hidden_gradient(logits, codes, gradient);
      if (codes.defined() && of_chunk.weights.defined()) gradient.mul_(of_chunk.weights.unsqueeze(1));
    }
    if (for_weight) products.add_weight_gradient(logits, first, sum.weight);
  }
  return sum;
}

struct LinearCrossEntropyNode : torch::autograd::Function<LinearCrossEntropyNode> {
  using Context = torch::autograd::AutogradContext;
  using Tensors = torch::autograd::variable_list;

  static at::Tensor forward(Context* context, const at::Tensor& hidden, const at::Tensor& weight,
                            const Rows& rows, const Options& options, bool for_hidden, bool for_weight) {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    LossSum sum = loss_sum(hidden, weight, rows, options, for_hidden, for_weight);
    const at::Tensor counted = rows.count(options.ignore_index());
    // Gradients of nothing are zero.
    const at::Tensor divisor = counted + counted.eq(0);
    context->save_for_backward({std::move(sum.hidden), std::move(sum.weight), divisor});
    context->saved_data["dtype"] = static_cast<int64_t>(weight.scalar_type());
    return sum.losses.sum() / counted;
  }

  // What was made in forward is that of the sum of the losses: with 1 / count, small numbers would leave the range of fp16.
  static Tensors backward(Context* context, const Tensors& gradients) {
    detail::refuse_second_derivative();
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const Tensors kept = context->get_saved_variables();
    const auto dtype = static_cast<at::ScalarType>(context->saved_data["dtype"].toInt());
    // A vector, so that 16-bit tensors are multiplied with it in fp32.
    const at::Tensor factor = (gradients[0] / kept[2]).reshape({1});
    const auto scaled = [&](const at::Tensor& gradient) {
      if (!gradient.defined()) return gradient;
      at::Tensor result = at::empty(gradient.sizes(), gradient.options().dtype(dtype));
      return at::mul_out(result, gradient, factor);
    };
    return {scaled(kept[0]), scaled(kept[1]), {}, {}, {}, {}};
  }
};

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

at::Tensor as_computed(const at::Tensor& x, at::ScalarType dtype) {
  return at::autocast::is_autocast_enabled(x.device().type())
             ? at::autocast::cached_cast(dtype, x, x.device().type())
             : x;
}

}  // namespace

at::Tensor linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& targets,
                                const Options& options, const at::Tensor& row_weights) {
  check_options(options);
  check_tensors(hidden, weight, targets);
  check_row_weights(row_weights, targets);
  const at::ScalarType dtype = detail::computing_type(hidden, /*in_8_bits=*/false);
  const at::Tensor x = detail::as_rows(as_computed(hidden, dtype)).contiguous(),
                   w = as_computed(weight, dtype);
  require(
      detail::is_castable(dtype) && x.scalar_type() == dtype && w.scalar_type() == dtype,
      "linear_cross_entropy computes in Float, BFloat16 or Half, where hidden and weight have the same, not ",
      x.scalar_type(), " and ", w.scalar_type(), "; cast one of them, or use autocast");
  if (options.fp8()) check_8_bits(dtype, w);
  Rows rows{targets.reshape({-1}).contiguous(), {}};
  if (row_weights.defined()) rows.weights = row_weights.reshape({-1}).contiguous();
  check_targets(rows.targets, w.size(0), options.ignore_index());
  const bool records = at::GradMode::is_enabled();
  return LinearCrossEntropyNode::apply(x, w, rows, options, records && x.requires_grad(),
                                       records && w.requires_grad());
}

}  // namespace pacer::modules
