#include <pacer/optimizers/detail/onebit_adam_engine.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <utility>

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>

#include <pacer/core/error.h>
#include <pacer/kernels/cpu/target.h>
#include <pacer/kernels/norm.h>
#include <pacer/optimizers/detail/parameter_check.h>
#include <pacer/optimizers/detail/tile_loop.h>

namespace pacer::detail {
namespace {

std::vector<int64_t> counts_of(const std::vector<AdamEntry>& entries) {
  std::vector<int64_t> counts;
  for (const AdamEntry& entry : entries) counts.push_back(entry.parameter.numel());
  return counts;
}

}  // namespace

OneBitAdamEngine::OneBitAdamEngine(std::vector<AdamEntry> entries, std::unique_ptr<OneBitExchange> exchange,
                                   double variance_floor)
    : entries_(std::move(entries)),
      exchange_(std::move(exchange)),
      variance_floor_(variance_floor),
      layout_(exchange_ ? exchange_->layout() : kernels::OneBitLayout(counts_of(entries_), 1)),
      rows_(layout_.rows()),
      units_(make_tiles(counts_of(entries_), kReductionUnit)),
      tensors_(entries_.size()),
      variance_(at::zeros({layout_.length()}, at::kFloat)),
      momentum_(at::zeros({layout_.length()}, at::kFloat)) {}

// Of the entry's elements, in its parameter's shape and memory order.
at::Tensor OneBitAdamEngine::view(const at::Tensor& flat, size_t i) const {
  const at::Tensor& parameter = entries_[i].parameter;
  return flat.as_strided(parameter.sizes(), parameter.strides(), layout_.offset(i));
}

bool OneBitAdamEngine::freeze(const std::vector<AdamGroupSettings>& settings) {
  const kernels::FullDenormals full_denormals;
  settings_ = settings;
  for (size_t i = 0; i < entries_.size(); ++i) {
    const AdamEntry& entry = entries_[i];
    const double c2 = bias_corrections(settings_[entry.group].kernel, entry.state->step()).c2;
    const at::Tensor corrected = entry.state->exp_avg_sq().to(at::kDouble);
    if (entry.state->step() > 0) corrected.div_(c2);
    view(variance_, i).copy_(corrected);
    view(momentum_, i).copy_(entry.state->exp_avg());
  }
  if (!set_floors() && layout_.length() > 0) return false;
  for (size_t i = 0; i < entries_.size(); ++i) {
    entries_[i].state->exp_avg_sq(view(variance_, i));
    entries_[i].state->exp_avg(at::Tensor());
  }
  return true;
}

void OneBitAdamEngine::go_on(const NamedTensors& errors) {
  for (size_t i = 0; i < entries_.size(); ++i) {
    FusedAdamStateFields& state = *entries_[i].state;
    view(variance_, i).copy_(state.exp_avg_sq());
    view(momentum_, i).copy_(state.exp_avg());
    state.exp_avg_sq(view(variance_, i));
    state.exp_avg(at::Tensor());
  }
  set_floors();
  if (errors.empty()) return;
  if (!exchange_) {
    momentum_error_ = at::zeros({layout_.length()}, at::kFloat);
    for (size_t i = 0; i < entries_.size(); ++i) {
      view(momentum_error_, i).copy_(errors.at(entries_[i].name + "/momentum_error"));
    }
    return;
  }
  const at::Tensor worker = at::zeros({layout_.length()}, at::kFloat);
  const at::Tensor server = at::zeros({exchange_->served_rows().extent}, at::kFloat);
  for (size_t i = 0; i < entries_.size(); ++i) {
    view(worker, i).copy_(errors.at(entries_[i].name + "/worker_error"));
    const auto part = served_part(i);
    if (part.begin == part.end) continue;
    server.narrow(0, served_offset(i, part), part.end - part.begin)
        .copy_(errors.at(entries_[i].name + "/server_error"));
  }
  exchange_->set_errors(worker, server);
}

kernels::OneBitLayout::Part OneBitAdamEngine::served_part(size_t i) const {
  return layout_.served_part(i, exchange_->world().rank());
}

int64_t OneBitAdamEngine::served_offset(size_t i, const kernels::OneBitLayout::Part& part) const {
  return layout_.offset(i) + part.begin - exchange_->world().rank() * layout_.chunk();
}

void OneBitAdamEngine::check_errors(const NamedTensors& errors) const {
  std::set<std::string> expected;
  const auto check = [&](const std::string& key, at::IntArrayRef sizes) {
    require(errors.count(key) != 0, "the state to load has no \"", key,
            "\"; resume with the state that this rank has saved");
    const at::Tensor& tensor = errors.at(key);
    require(tensor.scalar_type() == at::kFloat && tensor.sizes() == sizes, "\"", key,
            "\" of the state to load is ", tensor.scalar_type(), " of shape ", tensor.sizes(),
            ", but it must be Float of shape ", sizes, "; resume with as many ranks and the same parameters");
    expected.insert(key);
  };
  for (size_t i = 0; i < entries_.size(); ++i) {
    const AdamEntry& entry = entries_[i];
    if (!exchange_) {
      if (!errors.empty()) check(entry.name + "/momentum_error", entry.parameter.sizes());
      continue;
    }
    check(entry.name + "/worker_error", entry.parameter.sizes());
    const auto part = served_part(i);
    if (part.begin != part.end) check(entry.name + "/server_error", {part.end - part.begin});
  }
  for (const auto& item : errors) {
    require(expected.count(item.first) != 0, "the state to load has \"", item.first,
            "\", which this rank does not need; resume with as many ranks, the same parameters and options");
  }
}

// A share of each tensor's mean variance; of the whole buffer's where a tensor's is zero. False where that
// is, too.
bool OneBitAdamEngine::set_floors() {
  const kernels::FullDenormals full_denormals;
  std::vector<double> sums(entries_.size(), 0.0), partials(units_.size());
  const auto* variance = variance_.const_data_ptr<float>();
  for_each_tile(units_, [&](int64_t u) {
    const Tile& unit = units_[static_cast<size_t>(u)];
    partials[static_cast<size_t>(u)] =
        kernels::sum_of_magnitudes_cpu(variance + layout_.offset(unit.tensor) + unit.offset, unit.count);
  });
  double total = 0;
  int64_t elements = 0;
  for (size_t u = 0; u < units_.size();) {
    const size_t tensor = units_[u].tensor, begin = u;
    while (u < units_.size() && units_[u].tensor == tensor) ++u;
    sums[tensor] = sum_partials(partials.data() + begin, static_cast<int64_t>(u - begin));
  }
  for (size_t i = 0; i < entries_.size(); ++i) {
    total += sums[i];
    elements += layout_.counts()[i];
  }
  for (size_t i = 0; i < entries_.size(); ++i) {
    const double mean = sums[i] > 0 ? sums[i] / static_cast<double>(layout_.counts()[i])
                                    : total / static_cast<double>(std::max<int64_t>(elements, 1));
    tensors_[i].floor = static_cast<float>(variance_floor_ * mean);
  }
  return total > 0;
}

void OneBitAdamEngine::prepare(const std::vector<AdamGroupSettings>& settings) {
  if (exchange_) exchange_->check();
  for (const AdamEntry& entry : entries_) {
    const at::Tensor& parameter = entry.parameter;
    const auto storage = storage_for(parameter.scalar_type(), settings[entry.group].master_weights,
                                     Rounding::nearest, entry.name);
    require(storage == entry.storage && same_layout(parameter, entry.state->exp_avg_sq()), "parameter ",
            entry.name, " changed its dtype, shape or memory order after the freeze; load a checkpoint");
    if (parameter.grad().defined()) check_gradient(parameter, parameter.grad(), entry.name);
  }
  settings_ = settings;
  for (size_t i = 0; i < entries_.size(); ++i) {
    AdamEntry& entry = entries_[i];
    if (entry.was_written()) follow_parameter(entry);
    kernels::OneBitAdamTensor& tensor = tensors_[i];
    tensor.parameter = pointer_of(entry.parameter);
    tensor.extra =
        pointer_of(entry.state->master().defined() ? entry.state->master() : entry.state->remainder());
    tensor.storage = entry.storage;
    tensor.gradient = nullptr;
    const at::Tensor& gradient = entry.parameter.grad();
    if (!gradient.defined()) continue;
    if (needs_dense_gradient(entry, gradient)) {
      if (!entry.dense_gradient.defined()) {
        entry.dense_gradient =
            at::empty_strided(entry.parameter.sizes(), entry.parameter.strides(), gradient.options());
      }
      entry.dense_gradient.copy_(gradient);
      tensor.gradient = entry.dense_gradient.const_data_ptr();
    } else {
      tensor.gradient = gradient.const_data_ptr();
    }
  }
}

double OneBitAdamEngine::sum_of_squares() {
  std::vector<double> partials(units_.size());
  for_each_tile(units_, [&](int64_t u) {
    const Tile& unit = units_[static_cast<size_t>(u)];
    const kernels::OneBitAdamTensor& tensor = tensors_[unit.tensor];
    const kernels::GradientType type = gradient_type(tensor.storage);
    const int64_t size = type == kernels::GradientType::f32 ? 4 : 2;
    partials[static_cast<size_t>(u)] =
        tensor.gradient == nullptr
            ? 0.0
            : kernels::sum_of_squares_cpu(
                  type, static_cast<const char*>(tensor.gradient) + unit.offset * size, unit.count);
  });
  return sum_partials(partials.data(), static_cast<int64_t>(partials.size()));
}

void OneBitAdamEngine::set_scalars(double factor) {
  for (size_t i = 0; i < entries_.size(); ++i) {
    const AdamEntry& entry = entries_[i];
    kernels::AdamSlot slot{settings_[entry.group].kernel, /*is_double=*/0, /*active=*/1};
    slot.settings.factor = factor;
    adam_scalars_cpu(slot, entry.state->step() + 1, &tensors_[i].scalars);
  }
}

kernels::OneBitAdamWork OneBitAdamEngine::work() const {
  kernels::OneBitAdamWork work{};
  work.pieces = rows_.pieces.data();
  work.first = rows_.first.data();
  work.rows = rows_.count();
  work.extent = rows_.extent;
  work.tensors = tensors_.data();
  work.variance = variance_.mutable_data_ptr<float>();
  work.dense_momentum = momentum_.defined() ? momentum_.const_data_ptr<float>() : nullptr;
  if (exchange_) work.bits = exchange_->mean();
  return work;
}

void OneBitAdamEngine::for_units(const std::function<void(int64_t)>& f) const {
  at::parallel_for(0, rows_.units(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t unit = begin; unit < end; ++unit) f(unit);
  });
}

void OneBitAdamEngine::exchange_step(double factor, int64_t step) {
  set_scalars(factor);
  const kernels::OneBitAdamWork before = work();
  exchange_->run(kernels::onebit_momentum_row, &before, step);
  momentum_ = at::Tensor();
  update();
}

void OneBitAdamEngine::dense_step(double factor, std::optional<int64_t> refresh_after) {
  set_scalars(factor);
  const at::Tensor momentum = momentum_.defined() ? momentum_ : at::empty({layout_.length()}, at::kFloat);
  auto* values = momentum.mutable_data_ptr<float>();
  const kernels::OneBitAdamWork before = work();
  for_units([&](int64_t unit) { onebit_dense_momentum_cpu(before, unit, values); });
  momentum_ = momentum;
  if (momentum_error_.defined()) momentum_.add_(std::exchange(momentum_error_, at::Tensor()));
  if (refresh_after) {
    for (size_t i = 0; i < entries_.size(); ++i) {
      tensors_[i].refresh =
          kernels::variance_refresh(settings_[entries_[i].group].kernel.beta2, *refresh_after);
    }
    for_units([&](int64_t unit) { onebit_refresh_cpu(before, unit); });
    set_floors();
  }
  update();
}

void OneBitAdamEngine::update() {
  const kernels::OneBitAdamWork now = work();
  for_units([&](int64_t unit) { onebit_update_cpu(now, unit); });
  for (AdamEntry& entry : entries_) {
    entry.state->step(entry.state->step() + 1);
    entry.parameter.unsafeGetTensorImpl()->bump_version();
    entry.remember_version();
  }
}

double OneBitAdamEngine::compression_error() const {
  if (!exchange_) return 0;
  const at::Tensor lost = exchange_->worker_errors().to(at::kDouble);
  const at::Tensor sent = exchange_->worker_carried().to(at::kDouble);
  const double norm = sent.square().sum().item<double>();
  return norm == 0 ? 0 : std::sqrt(lost.square().sum().item<double>() / norm);
}

void OneBitAdamEngine::export_momentum(NamedTensors& state) const {
  at::Tensor momentum = momentum_;
  if (!momentum.defined()) {
    momentum = at::zeros({layout_.length()}, at::kFloat);
    auto* to = momentum.mutable_data_ptr<float>();
    const kernels::OneBitAdamWork now = work();
    float values[kernels::kOneBitRow];
    for (int64_t row = 0; row < rows_.count(); ++row) {
      const int64_t begin = row * kernels::kOneBitRow;
      onebit_read_momentum(now, row, std::min(kernels::kOneBitRow, rows_.extent - begin), values);
      for (int64_t p = rows_.first[static_cast<size_t>(row)]; p < rows_.first[static_cast<size_t>(row) + 1];
           ++p) {
        const kernels::OneBitPiece& piece = rows_.pieces[static_cast<size_t>(p)];
        std::copy_n(values + (piece.position - begin), piece.count, to + piece.position);
      }
    }
  }
  for (size_t i = 0; i < entries_.size(); ++i) state[entries_[i].name + "/exp_avg"] = view(momentum, i);
}

void OneBitAdamEngine::export_errors(NamedTensors& state) const {
  if (!exchange_) {
    for (size_t i = 0; momentum_error_.defined() && i < entries_.size(); ++i) {
      state[entries_[i].name + "/momentum_error"] = view(momentum_error_, i);
    }
    return;
  }
  exchange_->check();
  const at::Tensor worker = exchange_->worker_errors(), server = exchange_->server_errors();
  for (size_t i = 0; i < entries_.size(); ++i) {
    state[entries_[i].name + "/worker_error"] = view(worker, i);
    const auto part = served_part(i);
    if (part.begin == part.end) continue;
    state[entries_[i].name + "/server_error"] =
        server.narrow(0, served_offset(i, part), part.end - part.begin);
  }
}

std::string OneBitAdamEngine::describe_floors() const {
  int64_t all = 0, floored = 0;
  double worst = 0;
  size_t which = 0;
  for (size_t i = 0; i < entries_.size(); ++i) {
    const int64_t count = layout_.counts()[i];
    if (count == 0) continue;
    const auto* variance = variance_.const_data_ptr<float>() + layout_.offset(i);
    const int64_t below =
        std::count_if(variance, variance + count, [&](float value) { return value < tensors_[i].floor; });
    all += count;
    floored += below;
    const double share = static_cast<double>(below) / static_cast<double>(count);
    if (share > worst) {
      worst = share;
      which = i;
    }
  }
  const auto percent = [](double share) { return static_cast<int64_t>(share * 100 + 0.5); };
  if (percent(worst) == 0) return "";
  return concatenate(percent(static_cast<double>(floored) / static_cast<double>(all)),
                     " % of the elements have less variance than their tensor's floor (most in ",
                     entries_[which].name, ": ", percent(worst), " %)");
}

}  // namespace pacer::detail
