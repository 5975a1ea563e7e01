// Choice of ticks: 1-2-5 steps on linear axes, familiar numbers on the logarithmic one.
#include "scale.h"

#include <algorithm>
#include <cmath>

#include "convergence/format.h"
#include "support/round_numbers.h"

namespace convergence {
namespace {

constexpr double kMinute = 60.0;
constexpr double kHour = 3600.0;
constexpr double kSmallestLoss =
    1e-3;  // below it the logarithm is of no use; losses of real text stay far above

std::vector<double> linear_ticks(double low, double high, double pieces) {
  const double step = examples::round_interval(high - low, pieces);
  std::vector<double> ticks;
  for (double k = std::ceil(low / step - 1e-9); k * step <= high + 1e-9 * step; ++k)
    ticks.push_back(k * step + 0.0);  // + 0.0 turns -0 into 0
  return ticks;
}

// Coarse familiar numbers where the range is wide, 1-2-5 steps where it is narrow.
std::vector<double> logarithmic_ticks(double low, double high) {
  std::vector<double> ticks;
  for (int exponent = -3; exponent < 3; ++exponent) {
    const double power = std::pow(10.0, exponent);
    for (const double digit : {1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0}) {
      if (power * digit >= low && power * digit <= high) ticks.push_back(power * digit);
    }
  }
  return ticks.size() < 4 ? linear_ticks(low, high, 6.0) : ticks;
}

int decimals_for(const std::vector<double>& ticks) {
  if (ticks.size() < 2) return 2;
  return std::max(0, -static_cast<int>(std::floor(std::log10(ticks[1] - ticks[0]) + 1e-9)));
}

}  // namespace

Scale::Scale(Axis axis, double low, double high, double from, double to)
    : axis_(axis), low_(low), high_(high), from_(from), to_(to) {
  if (!std::isfinite(low_) || !std::isfinite(high_)) low_ = 0.0, high_ = 1.0;
  if (axis_ == Axis::time) unit_ = high_ < 2.0 * kMinute ? 1.0 : high_ < 2.0 * kHour ? kMinute : kHour;
  if (axis_ == Axis::loss) {
    low_ = std::max(low_, kSmallestLoss) * 0.97;
    high_ = std::max(high_ * 1.03, low_ * 1.1);
    for (const double tick : logarithmic_ticks(low_, high_)) ticks_.push_back({tick, ""});
  } else if (axis_ == Axis::difference) {
    const double reach = 1.15 * std::max({std::fabs(low_), std::fabs(high_), 1e-3});
    low_ = -reach;
    high_ = reach;
    for (const double tick : linear_ticks(low_, high_, 6.0)) ticks_.push_back({tick, ""});
  } else {
    if (axis_ == Axis::plain) {
      low_ = std::min(low_, 0.0);
      high_ *= 1.05;
    }
    if (high_ <= low_) high_ = low_ + 1.0;
    for (const double tick : linear_ticks(low_ / unit_, high_ / unit_, 6.0))
      ticks_.push_back({tick * unit_, ""});
  }
  std::vector<double> shown;
  for (const Tick& tick : ticks_) shown.push_back(tick.value / unit_);
  const int decimals =
      axis_ == Axis::loss && shown.size() > 1 ? std::max(1, decimals_for(shown)) : decimals_for(shown);
  for (Tick& tick : ticks_) {
    if (axis_ == Axis::tokens) tick.label = short_count(tick.value);
    if (axis_ == Axis::plain) tick.label = fixed_text(tick.value, decimals);
    if (axis_ == Axis::time) tick.label = fixed_text(tick.value / unit_, decimals);
    if (axis_ == Axis::loss) tick.label = fixed_text(tick.value, decimals);
    if (axis_ == Axis::difference) tick.label = signed_fixed(tick.value, decimals);
  }
}

double Scale::position(double value) const {
  return axis_ == Axis::loss ? std::log(std::max(value, kSmallestLoss)) : value;
}

double Scale::pixel(double value) const {
  const double share = (position(value) - position(low_)) / (position(high_) - position(low_));
  return from_ + share * (to_ - from_);
}

std::string Scale::title() const {
  switch (axis_) {
    case Axis::tokens:
      return "tokens";
    case Axis::time:
      return unit_ == kHour     ? "training time, hours"
             : unit_ == kMinute ? "training time, minutes"
                                : "training time, seconds";
    case Axis::loss:
      return "nats per byte";
    case Axis::difference:
      return "difference, nats per byte";
    case Axis::plain:
      return {};
  }
  return {};
}

std::string Scale::exact_label(double value) const {
  switch (axis_) {
    case Axis::tokens:
      return with_thousands(std::llround(value)) + " tokens";
    case Axis::time:
      return duration_text(value);
    case Axis::loss:
      return fixed_text(value, 4);
    case Axis::difference:
      return signed_fixed(value, 4);
    case Axis::plain:
      return significant(value, 4);
  }
  return {};
}

}  // namespace convergence
