#include <pacer/optimizers/detail/direction_exchange.h>

#include <algorithm>
#include <utility>

#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <pacer/core/error.h>
#include <pacer/optimizers/detail/joint_look.h>
#include <pacer/optimizers/detail/onebit_errors.h>
#include <pacer/optimizers/detail/parameter_check.h>

namespace pacer::detail {
namespace {

// Where each begins, and behind the last the size of all.
std::vector<int64_t> offsets_of(const std::vector<OneBitTensor>& matrices) {
  std::vector<int64_t> offsets = {0};
  for (const OneBitTensor& matrix : matrices) offsets.push_back(offsets.back() + matrix.count);
  return offsets;
}

}  // namespace

bool send_alike(const CompressionOptions& a, const CompressionOptions& b) {
  return a.scale() == b.scale() && a.block_scales() == b.block_scales() &&
         a.compress_alone() == b.compress_alone() && a.hierarchical() == b.hierarchical();
}

std::vector<OneBitTensor> exchanged_matrices(const OptimizerView& optimizer,
                                             const std::vector<GroupSettings>& settings) {
  std::vector<OneBitTensor> matrices;
  for (const auto& [tensor, group, index, name] : optimizer.parameters()) {
    if (!settings[group].muon) continue;
    matrices.push_back(
        {name, group, tensor.sizes().vec(), dense_strides(tensor), tensor.numel(),
         storage_for(tensor.scalar_type(), settings[group].master_weights, settings[group].rounding, name)});
  }
  return matrices;
}

DirectionExchange::DirectionExchange(std::vector<OneBitTensor> matrices, std::shared_ptr<Communicator> world,
                                     const CompressionOptions& options)
    : matrices_(std::move(matrices)),
      offsets_(offsets_of(matrices_)),
      route_(world, options.hierarchical()),
      options_(options),
      mean_(world, offsets_.back(), options, CompressedAllReduce::Unagreed()),
      buffer_(at::zeros({offsets_.back()}, at::TensorOptions().dtype(at::kFloat).device(world->device()))),
      sums_(at::zeros({3}, buffer_.options().dtype(at::kDouble))) {}

void DirectionExchange::check_fits(const std::vector<const ParameterEntry*>& entries) const {
  std::vector<const OneBitTensor*> tensors;
  for (const OneBitTensor& matrix : matrices_) tensors.push_back(&matrix);
  check_same(entries, tensors, " after the first step",
             "add it before, or to a group with orthogonalize(false)");
}

void DirectionExchange::begin(double local_weight) {
  if (!has_agreed_) mean_.agree();
  has_agreed_ = true;
  mean_.check(/*wait=*/false);
  local_weight_ = local_weight;
}

void DirectionExchange::look(GradientGuard& guard, const double* own, int64_t own_count,
                             const double* averaged, int64_t count) {
  add_partials(sums_.device(), own, own_count, sums_.mutable_data_ptr<double>() + 2);
  look_jointly(guard, sums_, &route_, local_weight_, averaged, count);
}

at::Tensor DirectionExchange::direction(size_t matrix) const {
  return matrices_[matrix].view(buffer_, offsets_[matrix]);
}

void DirectionExchange::average(const kernels::GradientCheck* check) {
  is_under_way_ = true;
  has_errors_ = true;
  mean_.reduce(buffer_, check);
}

kernels::OneBitLayout::Part DirectionExchange::served_part(size_t matrix) const {
  const CompressedAllReduce::Range served = mean_.served();
  const int64_t first = offsets_[matrix], end = offsets_[matrix + 1];
  const int64_t from = std::clamp(served.begin, first, end), to = std::clamp(served.end, from, end);
  return {from - first, to - first};
}

NamedViews DirectionExchange::views(const at::Tensor& worker, const at::Tensor& server) const {
  NamedViews views;
  for (size_t i = 0; i < matrices_.size(); ++i) {
    const std::string& name = matrices_[i].name;
    views.emplace_back(name + "/worker_error", matrices_[i].view(worker, offsets_[i]));
    const auto part = served_part(i);
    if (part.begin == part.end) continue;
    const int64_t first = offsets_[i] + part.begin - mean_.served().begin;
    views.emplace_back(name + "/server_error", server.narrow(0, first, part.end - part.begin));
  }
  return views;
}

void DirectionExchange::export_errors(NamedTensors& state) const {
  mean_.check(/*wait=*/true);
  save_views(views(mean_.worker_error(), mean_.server_error()), state);
  for (const OneBitTensor& matrix : matrices_) add_strides(matrix.name, matrix.sizes, matrix.strides, state);
}

void DirectionExchange::load_errors(NamedTensors& state, int64_t version) {
  const CompressedAllReduce::Range served = mean_.served();
  const at::Tensor worker = at::zeros_like(buffer_);
  const at::Tensor server = at::zeros({served.end - served.begin}, buffer_.options());
  load_views(views(worker, server), state,
             {"the state to load has no \"", "\"; resume with the state that this rank has saved",
              "; resume with as many ranks and the same parameters"});
  for (const OneBitTensor& matrix : matrices_) require_same_order(state, matrix, version);
  mean_.set_errors(worker, server);
  has_errors_ = true;
}

void DirectionExchange::rename(const std::vector<std::string>& names) {
  for (size_t i = 0; i < matrices_.size(); ++i) matrices_[i].name = names[i];
}

}  // namespace pacer::detail
