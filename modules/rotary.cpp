#include <pacer/modules/rotary.h>

#include <algorithm>
#include <cmath>
#include <mutex>
#include <optional>

#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>

#include <pacer/core/error.h>
#include <pacer/device/detail/stream.h>
#include <pacer/modules/detail/head_rows.h>
#include <pacer/modules/detail/node_state.h>
#include <pacer/modules/detail/product.h>
#include <pacer/modules/replayed.h>

namespace pacer::modules {

struct Rotary::State {
  // Angles of positions from 0 on, on one device.
  struct Table {
    int64_t head_dim;
    at::Device device;
    at::Tensor cosines, sines;  // [positions, head_dim / 2]
  };
  double theta = 0;
  std::optional<RotaryScaling> scaling;
  std::vector<double> frequencies;  // none: they follow from theta and scaling
  int64_t offset = 0;
  std::mutex mutex;
  std::vector<Table> tables;
};

namespace {

double scaled(double frequency, const RotaryScaling& scaling) {
  constexpr double kTurn = 6.283185307179586;  // radians
  const double low = scaling.low_frequency_factor(), high = scaling.high_frequency_factor();
  const double turns = static_cast<double>(scaling.original_length()) * frequency / kTurn;
  const double kept = std::clamp((turns - low) / (high - low), 0.0, 1.0);
  return frequency * (kept + (1 - kept) / scaling.factor());
}

std::vector<double> frequencies_of(double theta, const std::optional<RotaryScaling>& scaling,
                                   int64_t head_dim) {
  std::vector<double> frequencies;
  for (int64_t i = 0; i < head_dim / 2; ++i) {
    const double frequency = std::pow(theta, -2.0 * static_cast<double>(i) / static_cast<double>(head_dim));
    frequencies.push_back(scaling ? scaled(frequency, *scaling) : frequency);
  }
  return frequencies;
}

// Fills [positions, frequencies.size()].
template <class F>
at::Tensor table_of(const std::vector<double>& frequencies, int64_t positions, const F& function) {
  const auto half = static_cast<int64_t>(frequencies.size());
  at::Tensor table = at::empty({positions, half}, at::TensorOptions().dtype(at::kFloat).device(at::kCPU));
  float* values = table.mutable_data_ptr<float>();
  for (int64_t position = 0; position < positions; ++position) {
    for (int64_t i = 0; i < half; ++i) {
      const double angle = static_cast<double>(position) * frequencies[static_cast<size_t>(i)];
      values[position * half + i] = static_cast<float>(function(angle));
    }
  }
  return table;
}

}  // namespace

Rotary::Rotary(double theta) : state_(std::make_shared<State>()) {
  require(std::isfinite(theta) && theta > 0, "Rotary needs a theta above 0, not ", theta);
  state_->theta = theta;
}

Rotary::Rotary(double theta, const RotaryScaling& scaling) : Rotary(theta) {
  require(std::isfinite(scaling.factor()) && scaling.factor() >= 1,
          "RotaryScaling::factor must be a number from 1 on, not ", scaling.factor());
  require(scaling.low_frequency_factor() > 0 && std::isfinite(scaling.high_frequency_factor()) &&
              scaling.high_frequency_factor() > scaling.low_frequency_factor(),
          "RotaryScaling::high_frequency_factor must be above low_frequency_factor, and both above 0, not ",
          scaling.high_frequency_factor(), " and ", scaling.low_frequency_factor());
  require(scaling.original_length() >= 1, "RotaryScaling::original_length must be at least 1, not ",
          scaling.original_length());
  state_->scaling = scaling;
}

Rotary::Rotary(std::vector<double> frequencies) : state_(std::make_shared<State>()) {
  require(!frequencies.empty(), "Rotary needs a frequency for each pair of channels; pass them");
  for (const double frequency : frequencies) {
    require(std::isfinite(frequency), "Rotary got a frequency of ", frequency, ", which is no number");
  }
  state_->frequencies = std::move(frequencies);
}

int64_t Rotary::offset() const { return replayed(state_.get(), state_->offset); }

void Rotary::set_offset(int64_t offset) {
  require(offset >= 0, "the offset of a Rotary must be 0 or more, not ", offset);
  state_->offset = offset;
}

Rotary::Angles Rotary::angles(int64_t sequence, int64_t head_dim, const at::Device& device) const {
  State& state = *state_;
  require(sequence >= 0, "Rotary was asked for a sequence of ", sequence, " tokens");
  require(head_dim >= 2 && head_dim % 2 == 0, "Rotary turns pairs of channels; a head of ", head_dim,
          " cannot be cut into these");
  require(state.frequencies.empty() || static_cast<int64_t>(state.frequencies.size()) * 2 == head_dim,
          "this Rotary has ", state.frequencies.size(), " frequencies, for heads of ",
          2 * state.frequencies.size(), " channels, but these have ", head_dim);
  const int64_t first = offset(), positions = first + sequence;
  const std::lock_guard<std::mutex> lock(state.mutex);
  auto found = std::find_if(state.tables.begin(), state.tables.end(), [&](const State::Table& table) {
    return table.head_dim == head_dim && table.device == device;
  });
  if (found == state.tables.end()) {
    found = state.tables.insert(found, {head_dim, device, {}, {}});
  }
  if (!found->cosines.defined() || found->cosines.size(0) < positions) {
    require<Error>(
        !device.is_cuda() || !detail::is_capturing(device), "a Rotary has to make the angles of ", positions,
        " positions, which a captured CUDA graph cannot; run a forward pass of that length before");
    const c10::InferenceMode no_inference(false);  // a training may use what an evaluation made
    const std::vector<double> frequencies =
        state.frequencies.empty() ? frequencies_of(state.theta, state.scaling, head_dim) : state.frequencies;
    const auto table = [&](double (*function)(double)) {
      return table_of(frequencies, positions, function).to(device);
    };
    at::Tensor cosines = table(&std::cos), sines = table(&std::sin);
    found->cosines = std::move(cosines);
    found->sines = std::move(sines);
  }
  return {found->cosines.narrow(0, first, sequence), found->sines.narrow(0, first, sequence)};
}

}  // namespace pacer::modules

namespace pacer::detail {
namespace {

struct RotaryState : torch::CustomClassHolder {
  int64_t head_dim;
  at::Tensor cosines, sines;
};

// Turns rows of heads.
struct RotaryNode : torch::autograd::Function<RotaryNode>, FusedNode<RotaryState> {
  static at::Tensor forward(Context* context, StatePtr state, const at::Tensor& heads) {
    at::Tensor result = turned(heads, state->head_dim, state->cosines, state->sines, /*back=*/false);
    keep(context, std::move(state), {});
    return result;
  }

  static Tensors backward(Context* context, const Tensors& gradients) {
    refuse_second_derivative();
    const StatePtr state = state_of(context);
    at::Tensor result = gradients[0];
    if (result.defined()) {
      result = turned(result, state->head_dim, state->cosines, state->sines, /*back=*/true);
    }
    return {at::Tensor(), std::move(result)};
  }
};

}  // namespace
}  // namespace pacer::detail

namespace pacer::modules {

std::pair<at::Tensor, at::Tensor> rotary(const at::Tensor& q, const at::Tensor& k, const Rotary& positions) {
  require(q.dim() == 4 && k.dim() == 4 && q.size(0) == k.size(0) && q.size(2) == k.size(2) &&
              q.size(3) == k.size(3),
          "rotary takes queries and keys [batch, heads, sequence, head_dim] that differ in their heads "
          "alone, not ",
          q.sizes(), " and ", k.sizes());
  require(detail::is_castable(q) && k.scalar_type() == q.scalar_type() && k.device() == q.device(),
          "rotary takes queries and keys of one dtype, Float, BFloat16 or Half, on one device, not ",
          q.scalar_type(), " on ", q.device(), " and ", k.scalar_type(), " on ", k.device());
  const Rotary::Angles angles = positions.angles(q.size(2), q.size(3), q.device());
  const auto turned = [&](const at::Tensor& x) {
    auto state = c10::make_intrusive<detail::RotaryState>();
    state->head_dim = x.size(3);
    state->cosines = angles.cosines;
    state->sines = angles.sines;
    const at::Tensor rows = x.transpose(1, 2).reshape({x.size(0) * x.size(2), x.size(1) * x.size(3)});
    return detail::RotaryNode::apply(std::move(state), rows)
        .view({x.size(0), x.size(2), x.size(1), x.size(3)})
        .transpose(1, 2);
  };
  return {turned(q), turned(k)};
}

}  // namespace pacer::modules
