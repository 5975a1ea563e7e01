// The memory in which the gradients of a unit come together and travel, and what becomes of their sum.
#include <pacer/parallel/detail/parameter_shards_state.h>

#include <algorithm>
#include <utility>

#include <ATen/ops/zeros.h>

namespace pacer {

// Padding travels, too; whatever stands there reaches nobody's piece.
void ParameterShards::State::make_landing(Unit& unit) {
  if (unit.landing.defined()) return;
  if (!options_.reduce_every_backward()) {
    at::TensorOptions kind = unit.gradient.options();
    if (adds_up_wide(unit) && !pass_.is_last) kind = kind.dtype(at::kFloat);
    unit.landing = at::zeros({unit.layout.elements()}, kind);
  } else {
    unit.landing = group_count_ > 0 ? take_memory(unit) : take_landing_buffer(unit);
  }
}

// Two buffers are enough where units fill one after the other.
at::Tensor ParameterShards::State::take_landing_buffer(Unit& unit) {
  constexpr size_t kBuffers = 2;
  const auto dtype = unit.gradient.scalar_type();
  LandingBuffer* free = nullptr;
  size_t of_dtype = 0;
  for (LandingBuffer& buffer : landing_buffers_) {
    if (buffer.memory.scalar_type() != dtype) continue;
    ++of_dtype;
    if (buffer.user != nullptr && buffer.user->work.is_empty()) continue;  // it fills
    if (free == nullptr || buffer.user == nullptr) free = &buffer;
  }
  if (of_dtype < kBuffers && (free == nullptr || free->user != nullptr)) free = nullptr;
  if (free == nullptr) {
    int64_t elements = 0;
    for (const Unit& other : units_) {
      if (!other.is_trained || other.gradient.scalar_type() != dtype) continue;
      elements = std::max(elements, other.layout.elements());
    }
    landing_buffers_.push_back({at::zeros({elements}, unit.gradient.options()), nullptr});
    free = &landing_buffers_.back();
  }
  if (free->user != nullptr) finish(*free->user);
  free->user = &unit;
  return free->memory.narrow(0, 0, unit.layout.elements());
}

// One sum under way beside those that fill.
at::Tensor ParameterShards::State::take_memory(const Unit& unit) {
  for (Unit& other : units_) {
    if (!other.work.is_empty() && &other != newest_sent_) finish(other);
  }
  return memory_.take(unit.layout.elements(), unit.gradient);
}

// The sum has come; its memory is free again.
void ParameterShards::State::finish(Unit& unit) {
  if (!unit.work.is_empty()) {
    unit.work.wait();
    unit.work = {};  // it holds its tensors
    if (unit.sum.defined()) add_sum(unit);
    unit.sum.reset();
  }
  const bool is_reused = group_count_ > 0 && options_.reduce_every_backward();
  if (unit.landing.defined() && is_reused) memory_.give_back(unit.landing);
  unit.landing.reset();
  for (LandingBuffer& buffer : landing_buffers_) {
    if (buffer.user == &unit) buffer.user = nullptr;
  }
}

void ParameterShards::State::add_sum(Unit& unit) const {
  if (!adds_up_wide(unit)) {
    unit.gradient.add_(unit.sum);
    return;
  }
  if (!unit.wide.defined()) unit.wide = unit.gradient.to(at::kFloat);
  unit.wide.add_(unit.sum);
}

// Behind the last pass.
void ParameterShards::State::round_sum(Unit& unit) {
  if (unit.wide.defined()) unit.gradient.copy_(std::exchange(unit.wide, at::Tensor()));
}

}  // namespace pacer
