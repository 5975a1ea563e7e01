#include "textbook.h"

#include <cmath>
#include <utility>

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/bincount.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <pacer/core/error.h>

namespace scales {
namespace {

constexpr int64_t kAlignment = 128;  // elements, of tensors in the buffer that travels
constexpr int64_t kBlock = 2048;

int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

ScaleTable make_table(const at::Tensor& scale_of) {
  return {scale_of, at::bincount(scale_of).clamp_min(1).to(at::kFloat)};
}

}  // namespace

Tensors parameters_of(const torch::optim::Optimizer& optimizer) {
  Tensors parameters;
  for (const auto& group : optimizer.param_groups()) {
    parameters.insert(parameters.end(), group.params().begin(), group.params().end());
  }
  return parameters;
}

at::Tensor gradients_of(const Tensors& parameters) {
  Tensors flat;
  for (const at::Tensor& parameter : parameters) {
    pacer::require(parameter.grad().defined(),
                   "the textbook's optimizers need a gradient for each parameter");
    flat.push_back(parameter.grad().flatten());
  }
  return at::cat(flat);
}

Tensors views_of(const at::Tensor& row, const Tensors& parameters) {
  Tensors views;
  int64_t begin = 0;
  for (const at::Tensor& parameter : parameters) {
    views.push_back(row.narrow(0, begin, parameter.numel()).view_as(parameter));
    begin += parameter.numel();
  }
  return views;
}

double correction(double beta, int64_t t) { return 1 - std::pow(beta, static_cast<double>(t)); }

at::Tensor raise_to_floor(const at::Tensor& variance, const Tensors& parameters, double share) {
  Tensors raised;
  for (const at::Tensor& own : views_of(variance, parameters)) {
    const auto mean = own.mean();
    raised.push_back(at::maximum(own, share * at::where(mean > 0, mean, variance.mean())).flatten());
  }
  return at::cat(raised);
}

at::Tensor ScaleTable::round_to_signs(const at::Tensor& values) const {
  const auto squares = at::zeros({elements.size(0)}, at::kDouble);
  squares.index_add_(0, scale_of, values.to(at::kDouble).square());
  const auto scales = (squares.sqrt().to(at::kFloat) / elements.sqrt()).index_select(0, scale_of);
  return at::where(values < 0, -scales, scales);
}

OneBitMean::OneBitMean(const Tensors& parameters, std::shared_ptr<pacer::Communicator> world, ScaleUnit unit)
    : world_(std::move(world)) {
  Tensors positions, tensors;  // where an element is in the buffer that travels, and whose it is
  int64_t length = 0;
  for (size_t i = 0; i < parameters.size(); ++i) {
    positions.push_back(length + at::arange(parameters[i].numel(), at::kLong));
    tensors.push_back(at::full_like(positions.back(), static_cast<int64_t>(i)));
    length += round_up(parameters[i].numel(), kAlignment);
  }
  const auto position = at::cat(positions), tensor = at::cat(tensors);
  const int64_t ranks = world_->world_size();
  const int64_t share = (length + ranks - 1) / ranks;
  const int64_t chunk = round_up(share, unit == ScaleUnit::block ? kBlock : kAlignment);
  const auto unit_of = unit == ScaleUnit::buffer   ? at::zeros_like(tensor)
                       : unit == ScaleUnit::tensor ? tensor
                                                   : position.floor_divide(kBlock);
  worker_ = make_table(unit_of);
  server_ = make_table(unit_of * ranks + position.floor_divide(chunk));  // scales of a server's own chunk
  worker_error_ = at::zeros({position.size(0)}, at::kFloat);
  server_error_ = at::zeros_like(worker_error_);
}

at::Tensor OneBitMean::in_full_precision(const at::Tensor& row) const {
  const auto sum = row / world_->world_size();
  world_->all_reduce(sum).wait();
  return sum;
}

// Every rank computes what all servers do, and therefore the same.
at::Tensor OneBitMean::as_signs(const at::Tensor& row) {
  const auto carried = row + worker_error_;
  const auto sent = worker_.round_to_signs(carried);
  worker_error_ = carried - sent;
  const auto served = in_full_precision(sent) + server_error_;
  const auto received = server_.round_to_signs(served);
  server_error_ = served - received;
  return received;
}

}  // namespace scales
