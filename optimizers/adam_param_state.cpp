#include <pacer/optimizers/adam_param_state.h>

#include <algorithm>
#include <iterator>
#include <string_view>

#include <torch/optim/adam.h>
#include <torch/serialize/archive.h>

#include <pacer/core/error.h>
#include <pacer/optimizers/detail/option_fields.h>
#include <pacer/optimizers/detail/state_fields.h>
#include <pacer/optimizers/detail/step_groups.h>

namespace pacer {
namespace {

using detail::kAverageNumbers;
using detail::kStateFields;

// No LibTorch may have put more in between.
static_assert(sizeof(torch::optim::AdamParamState) ==
              sizeof(torch::optim::OptimizerParamState) + sizeof(int64_t) + 3 * sizeof(torch::Tensor));

bool same_tensor(const torch::Tensor& a, const torch::Tensor& b) {
  return a.defined() == b.defined() && (!a.defined() || a.equal(b));
}

}  // namespace

FusedAdamStateFields::FusedAdamStateFields(const FusedAdamStateFields& other)
    : step_(other.step()), average_(other.average()) {
  for (const auto& field : kStateFields) (this->*field.get)() = (other.*field.read)();
}

FusedAdamStateFields& FusedAdamStateFields::operator=(const FusedAdamStateFields& other) {
  if (this != &other) *this = FusedAdamStateFields(other);
  return *this;
}

std::shared_ptr<const detail::StepClock> FusedAdamStateFields::clock() const {
  return clock_ && clock_->host_steps() == step_ ? clock_ : nullptr;
}

void FusedAdamStateFields::follow(std::shared_ptr<const detail::StepClock> clock) {
  clock_ = std::move(clock);
  step_ = clock_->host_steps();
  note_average();
}

void FusedAdamStateFields::note_average() { average_ = clock_->host_count().average; }

int64_t FusedAdamStateFields::step() const {
  const auto clock = this->clock();
  return clock ? clock->read().steps : step_;
}

FusedAdamStateFields& FusedAdamStateFields::step(int64_t steps) {
  require(steps >= 0, "a step count must be >= 0, not ", steps);
  if (averages()) average_ = average();
  step_ = steps;
  clock_.reset();
  return *this;
}

const char* FusedSgdParamState::saved_name(const char* field) const {
  return field == std::string_view("exp_avg") ? "momentum_buffer" : field;
}

const char* FusedRmspropParamState::saved_name(const char* field) const {
  const std::string_view name = field;
  return name == "exp_avg"          ? "square_avg"
         : name == "exp_avg_sq"     ? "momentum_buffer"
         : name == "max_exp_avg_sq" ? "grad_avg"
                                    : field;
}

kernels::AverageWeights FusedAdamStateFields::average() const {
  const auto clock = averages() ? this->clock() : nullptr;
  return clock ? clock->read().average : average_;
}

FusedAdamStateFields& FusedAdamStateFields::average(const kernels::AverageWeights& average) {
  detail::check_average(average, "the average of a parameter");
  step_ = step();
  average_ = average;
  clock_.reset();
  return *this;
}

bool operator==(const FusedAdamStateFields& left, const FusedAdamStateFields& right) {
  return left.step() == right.step() && left.average() == right.average() &&
         std::all_of(std::begin(kStateFields), std::end(kStateFields), [&](const auto& field) {
           return same_tensor((left.*field.read)(), (right.*field.read)());
         });
}

// Undefined tensors are left out, as LibTorch's optimizers do. A state tensor is a view into a larger arena;
// the copy keeps the archive from storing the whole arena for each.
void FusedAdamStateFields::serialize(torch::serialize::OutputArchive& archive) const {
  archive.write("step", c10::IValue(step()));
  if (averages()) {
    const kernels::AverageWeights taken_in = average();
    for (const auto& number : kAverageNumbers)
      archive.write(number.name, c10::IValue(taken_in.*number.value));
  }
  for (const auto& field : kStateFields) {
    const torch::Tensor& tensor = (this->*field.read)();
    if (tensor.defined()) archive.write(saved_name(field.name), c10::IValue(tensor.clone()));
  }
}

void FusedAdamStateFields::serialize(torch::serialize::InputArchive& archive) {
  c10::IValue value;
  const bool has_step = archive.try_read("step", value);
  require(has_step ? value.isInt() : may_lack_step(), "the archive has no step count for a parameter");
  step(has_step ? value.toInt() : archive.keys().empty() ? 0 : 1);
  const auto counts = [&](const std::string& key) {
    return averages() && std::any_of(std::begin(kAverageNumbers), std::end(kAverageNumbers),
                                     [&](const auto& number) { return key == number.name; });
  };
  if (averages()) {
    kernels::AverageWeights taken_in;
    for (const auto& number : kAverageNumbers) {
      require(archive.try_read(number.name, value) && value.isDouble(), "the archive has no ", number.name,
              " for a parameter");
      taken_in.*number.value = value.toDouble();
    }
    average(taken_in);
  }
  for (const auto& field : kStateFields) {
    (this->*field.get)() =
        archive.try_read(saved_name(field.name), value) ? value.toTensor() : torch::Tensor();
  }
  for (const std::string& key : archive.keys()) {
    const bool known = key == "step" || counts(key) ||
                       std::any_of(std::begin(kStateFields), std::end(kStateFields),
                                   [&](const auto& field) { return key == saved_name(field.name); });
    require(known, "the archive has \"", key,
            "\" of a parameter, which this pacer does not know; it was written by a newer one");
  }
}

}  // namespace pacer
