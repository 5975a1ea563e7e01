#include <pacer/modules/detail/batch_statistics.h>

#include <cmath>
#include <optional>
#include <tuple>
#include <vector>

#include <ATen/TensorAccessor.h>
#include <ATen/ops/batch_norm_backward_elemt.h>
#include <ATen/ops/batch_norm_backward_reduce.h>
#include <ATen/ops/batch_norm_elemt.h>
#include <ATen/ops/batch_norm_gather_stats_with_counts.h>
#include <ATen/ops/batch_norm_stats.h>
#include <ATen/ops/batch_norm_update_stats.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/native_batch_norm_backward.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>

namespace pacer::detail {
namespace {

using c10::DeviceGuard;

// What a part without values gives for their number on a GPU: LibTorch's kernel divides by the sum of the first ones,
// and to sums of whole numbers it adds nothing.
constexpr double kNoValues = 1e-30;

std::optional<at::Tensor> given(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional<at::Tensor>(tensor) : std::nullopt;
}

// A vector [C] beside an x [N, C, ...].
at::Tensor beside(const at::Tensor& vector, const at::Tensor& x) {
  std::vector<int64_t> sizes(static_cast<size_t>(x.dim()), 1);
  sizes[1] = vector.numel();
  return vector.view(sizes);
}

// A gradient in the memory order of x: some of LibTorch's kernels look at that of one of them alone.
at::Tensor in_order_of(const at::Tensor& x, const at::Tensor& dy) {
  return dy.contiguous(x.suggest_memory_format());
}

// x or its gradient where sums over it are to be exact: LibTorch's kernel for planes rounds what its threads have added up
// to 16 bits where x has as many, that for channels last does not.
at::Tensor for_sums(const at::Tensor& x) {
  if (x.element_size() > 2 || x.dim() == 2) return x;
  return x.flatten(2).unsqueeze(3).contiguous(at::MemoryFormat::ChannelsLast);
}

at::Tensor doubles(int64_t count) { return at::empty({count}, at::kDouble); }

BatchMoments join_on_cpu(const at::Tensor& moments, at::ScalarType type, const RunningStatistics& running,
                         double eps) {
  const auto parts = moments.accessor<double, 2>();
  const int64_t channels = moments.size(1) / 2;
  const at::Tensor mean = doubles(channels), variance = doubles(channels), inverse = doubles(channels);
  BatchMoments joined;
  for (int64_t part = 0; part < parts.size(0); ++part) joined.values += parts[part][2 * channels];
  for (int64_t c = 0; c < channels; ++c) {
    double sum = 0, squares = 0;
    for (int64_t part = 0; part < parts.size(0); ++part) sum += parts[part][2 * channels] * parts[part][c];
    const double middle = sum / joined.values;
    for (int64_t part = 0; part < parts.size(0); ++part) {
      const double distance = parts[part][c] - middle;
      squares += parts[part][2 * channels] * (parts[part][channels + c] + distance * distance);
    }
    mean.mutable_data_ptr<double>()[c] = middle;
    variance.mutable_data_ptr<double>()[c] = squares / joined.values;
    inverse.mutable_data_ptr<double>()[c] = 1 / std::sqrt(squares / joined.values + eps);
  }
  if (running.mean.defined()) {
    const double unbiased = joined.values / (joined.values - 1);
    running.mean.mul_(1 - running.momentum).add_(mean.to(type), running.momentum);
    running.variance.mul_(1 - running.momentum).add_(variance.to(type), running.momentum * unbiased);
  }
  joined.mean = mean.to(type);
  joined.variance = variance.to(type);
  joined.inverse = inverse.to(type);
  return joined;
}

}  // namespace

at::ScalarType statistics_type(const at::Tensor& x) {
  return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

int64_t values_per_channel(const at::Tensor& x) { return x.numel() / x.size(1); }

at::Tensor part_moments(const at::Tensor& x, double eps) {
  const DeviceGuard guard(x.device());
  const int64_t channels = x.size(1), values = values_per_channel(x);
  if (x.is_cuda()) {
    const auto options = x.options().dtype(statistics_type(x));
    if (values == 0) {
      return at::cat({at::zeros({channels}, options), at::full({channels}, 1, options),
                      at::full({1}, kNoValues, options)});
    }
    const auto [mean, inverse] = at::batch_norm_stats(x, eps);
    return at::cat({mean, inverse, at::full({1}, static_cast<double>(values), options)});
  }
  if (values == 0) return at::zeros({2 * channels + 1}, at::kDouble);
  const auto [mean, variance] =
      at::batch_norm_update_stats(x.to(statistics_type(x)), std::nullopt, std::nullopt, /*momentum=*/0);
  return at::cat({mean.to(at::kDouble), variance.to(at::kDouble),
                  at::full({1}, static_cast<double>(values), at::kDouble)});
}

double values_of_all(const at::Tensor& moments) {
  return moments.select(1, moments.size(1) - 1).sum(at::kDouble).item<double>();
}

BatchMoments join_moments(const at::Tensor& moments, const at::Tensor& x, const RunningStatistics& running,
                          double eps) {
  if (!x.is_cuda()) return join_on_cpu(moments, statistics_type(x), running, eps);
  const DeviceGuard guard(x.device());
  const int64_t channels = x.size(1);
  const at::Tensor counts = moments.select(1, 2 * channels).contiguous();
  BatchMoments joined;
  // Where nothing runs along, the kernel asks its first argument for the dtype of all the others, and x may have another.
  std::tie(joined.mean, joined.inverse) = at::batch_norm_gather_stats_with_counts(
      moments, moments.narrow(1, 0, channels).contiguous(),
      moments.narrow(1, channels, channels).contiguous(), given(running.mean), given(running.variance),
      running.momentum, eps, counts);
  joined.counts = counts.to(at::kInt);
  return joined;
}

at::Tensor normalize_part(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                          const BatchMoments& moments, double eps) {
  const DeviceGuard guard(x.device());
  if (x.numel() == 0) return at::empty_like(x);
  if (x.is_cuda()) {
    return at::batch_norm_elemt(x, given(weight), given(bias), moments.mean, moments.inverse, eps);
  }
  return std::get<0>(at::native_batch_norm(x, given(weight), given(bias), moments.mean, moments.variance,
                                           /*training=*/false, /*momentum=*/0, eps));
}

PartSums part_sums(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& weight,
                   const BatchMoments& moments, double eps) {
  const DeviceGuard guard(x.device());
  const int64_t channels = x.size(1);
  PartSums part;
  if (x.numel() == 0) {
    part.weight = at::zeros({channels}, moments.mean.options());
    part.bias = at::zeros({channels}, moments.mean.options());
    part.sums = at::zeros({2 * channels}, x.is_cuda() ? moments.mean.options() : at::kDouble);
    return part;
  }
  if (x.is_cuda()) {
    const auto [sum, products, no_weight, no_bias] = at::batch_norm_backward_reduce(
        for_sums(in_order_of(x, dy)), for_sums(x), moments.mean, moments.inverse, given(weight),
        /*input_g=*/true, /*weight_g=*/false, /*bias_g=*/false);
    if (weight.defined()) {
      part.weight = products.mul(moments.inverse);
      part.bias = sum;
    }
    part.sums = at::cat({sum, products});
    return part;
  }
  // In its evaluating form it takes the moments that it is given for granted.
  std::tie(std::ignore, part.weight, part.bias) = at::native_batch_norm_backward(
      in_order_of(x, dy), x, given(weight), moments.mean, moments.variance, std::nullopt, std::nullopt,
      /*train=*/false, eps, {false, true, true});
  part.sums = at::cat({part.bias, part.weight}).to(at::kDouble);
  return part;
}

at::Tensor input_gradient(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& weight,
                          const BatchMoments& moments, const at::Tensor& sums) {
  const DeviceGuard guard(x.device());
  const int64_t channels = x.size(1);
  if (x.numel() == 0) return at::empty_like(x);
  const at::Tensor sum = sums.narrow(0, 0, channels), products = sums.narrow(0, channels, channels);
  if (x.is_cuda()) {
    return at::batch_norm_backward_elemt(in_order_of(x, dy), x, moments.mean, moments.inverse, given(weight),
                                         sum, products, moments.counts);
  }
  // dx = weight / sqrt(variance + eps) * (dy - mean(dy) - normalised x * mean(dy * normalised x)).
  const at::ScalarType type = statistics_type(x);
  const at::Tensor slope = products.div(moments.values).to(type).mul_(moments.inverse);
  const at::Tensor factor = weight.defined() ? moments.inverse.mul(weight) : moments.inverse;
  at::Tensor dx = x.to(type).sub(beside(moments.mean, x));
  dx.mul_(beside(slope, x)).add_(beside(sum.div(moments.values).to(type), x));
  dx.neg_().add_(in_order_of(x, dy)).mul_(beside(factor, x));
  return dx.to(x.scalar_type());
}

}  // namespace pacer::detail
