#include <pacer/schedulers/vary.h>

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <set>
#include <typeinfo>
#include <utility>

#include <c10/util/Type.h>

#include <pacer/core/error.h>
#include <pacer/files/number_text.h>
#include <pacer/hooks/session_parts.h>
#include <pacer/hooks/step_report.h>
#include <pacer/schedulers/detail/moving_numbers.h>

namespace pacer {
namespace {

constexpr const char* kNextValue = "next_value";
constexpr double kTolerance = 1e-12;  // of a resumed run, times the larger end

std::string name_of(const torch::optim::Optimizer& optimizer) {
  return c10::demangle(typeid(optimizer).name());
}

std::string joined(const std::set<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

}  // namespace

Vary::Vary(VaryOptions options, const LearningRateSchedule& schedule)
    : options_(std::move(options)), schedule_(schedule) {
  check_options();
}

Vary::Vary(VaryOptions options, const LearningRateSchedule& schedule, Function function)
    : options_(std::move(options)), schedule_(schedule), function_(std::move(function)) {
  check_options();
  require(function_ != nullptr, said(),
          " was given an empty function; give one that takes the value, or leave it out for an option of the "
          "optimizer");
  require(
      options_.groups().empty(), said(),
      " was given a function and groups, which belong to an option of the optimizer; leave one of them out");
}

void Vary::check_options() const {
  const VaryOptions& o = options_;
  require(
      !o.name().empty() && o.name().find('/') == std::string::npos, said(),
      ": the name of what moves must not be empty and have no '/', which ends a hook's name in a checkpoint");
  require(o.at_one() && o.at_zero(), said(), " needs two values; give at_one and at_zero");
  const double one = *o.at_one(), zero = *o.at_zero();
  require(std::isfinite(one) && std::isfinite(zero) && std::isfinite(one - zero), said(),
          ": at_one and at_zero, and the way between them, must be finite, not ", one, " and ", zero);
  const std::set<int64_t> different(o.groups().begin(), o.groups().end());
  require(different.size() == o.groups().size(), said(),
          " was given a parameter group twice; name each once");
}

std::string Vary::said() const { return "Vary(\"" + options_.name() + "\")"; }

std::string Vary::full_name() const {
  std::string name = options_.name();
  for (size_t i = 0; i < options_.groups().size(); ++i) {
    name += (i == 0 ? "_of_" : "_") + std::to_string(options_.groups()[i]);
  }
  return name;
}

std::string Vary::hook_name() const { return "vary_" + full_name(); }

double Vary::value(const Progress& progress) const {
  const double one = *options_.at_one(), zero = *options_.at_zero();
  const double factor = schedule_.factor(progress);
  if (factor > 1) {
    throw InvalidArgument(
        detail::concatenate(said(), ": its schedule gave the factor ", factor, " at step ", progress.step,
                            ", which leads beyond at_one; give Vary a schedule from 0 to 1"));
  }
  // The formula may miss the end by a rounding.
  return factor == 1 ? one : zero + (one - zero) * factor;
}

void Vary::attach(SessionParts& parts) {
  check_others(parts);
  progress_ = &parts.progress;
  if (function_) return;
  optimizer_ = &parts.optimizer();
  check_optimizer();
  for (const Place& place : places()) enters_freeze_ = enters_freeze_ || place.enters_freeze;
}

// Another one of the same groups has the same name, which the Session refuses.
void Vary::check_others(const SessionParts& parts) const {
  for (const auto& hook : parts.hooks()) {
    const auto* other = dynamic_cast<const Vary*>(hook.get());
    if (function_ || other == nullptr || other->function_ || other->options_.name() != options_.name())
      continue;
    const auto& theirs = other->options_.groups();
    const bool overlap = theirs.empty() || std::any_of(theirs.begin(), theirs.end(),
                                                       [this](int64_t group) { return has_group(group); });
    require(!overlap, said(),
            " is there twice for the same parameter group; give each of them groups() of its own");
  }
}

bool Vary::has_group(int64_t group) const {
  const auto& groups = options_.groups();
  return groups.empty() || std::find(groups.begin(), groups.end(), group) != groups.end();
}

void Vary::check_optimizer() const {
  const std::string optimizer = name_of(*optimizer_);
  auto& groups = optimizer_->param_groups();
  std::set<std::string> all, may_move;
  for (auto& group : groups) {
    for (const detail::MovingNumber& number : detail::moving_numbers(group.options())) {
      all.insert(number.name);
      if (number.fixed == nullptr) may_move.insert(number.name);
    }
  }
  require(!all.empty(), said(), ": pacer does not know the options of ", optimizer,
          "; give a function that sets the number");
  require(all.count(options_.name()) != 0, said(), ": ", optimizer,
          " reads no number of this name; those that may move are ", joined(may_move));
  for (const int64_t group : options_.groups()) {
    require(group >= 0 && group < static_cast<int64_t>(groups.size()), said(),
            " was given the parameter group ", group, ", but ", optimizer, " has ", groups.size(),
            ", counted from 0; name one of them");
  }
  for (const Place& place : places()) {
    const std::string where = detail::concatenate(said(), ", parameter group ", place.group);
    for (const double end : {*options_.at_one(), *options_.at_zero()}) {
      detail::check_moving_number(where, groups[place.group].options(), options_.name(), end);
    }
  }
}

// Where the number is now: groups may have been added, and options replaced, between two steps.
std::vector<Vary::Place> Vary::places() const {
  auto& groups = optimizer_->param_groups();
  std::vector<Place> found;
  for (size_t g = 0; g < groups.size(); ++g) {
    if (!has_group(static_cast<int64_t>(g))) continue;
    const auto numbers = detail::moving_numbers(groups[g].options());
    const auto number = std::find_if(numbers.begin(), numbers.end(),
                                     [this](const auto& one) { return one.name == options_.name(); });
    if (number == numbers.end()) {
      require(options_.groups().empty(), said(), ": the rule of parameter group ", g,
              " does not read it; leave the group out of groups()");
      continue;
    }
    require(number->fixed == nullptr, said(), ": in parameter group ", g, " of ", name_of(*optimizer_),
            " it must not move, because ", number->fixed, "; leave the hook out, or give it other groups()");
    found.push_back({g, number->value, number->enters_freeze});
  }
  return found;
}

std::string Vary::agreement() const {
  return detail::concatenate(full_name(), function_ ? ", given to a function" : "", ", ",
                             exact_text(*options_.at_one()), " at 1, ", exact_text(*options_.at_zero()),
                             " at 0 of ", schedule_.describe());
}

bool Vary::settled(const Progress& progress) const {
  return !enters_freeze_ || schedule_.has_ended(progress);
}

void Vary::start(const Progress& progress) { forward_begin(progress); }

void Vary::forward_begin(const Progress& progress) {
  if (!function_) return;
  last_set_ = value(progress);
  function_(*last_set_);
}

void Vary::gradients_ready(const Progress& progress) {
  if (function_) return;
  const std::vector<Place> now = places();
  std::vector<size_t> groups;
  for (const Place& place : now) {
    const bool was_set =
        last_set_ && std::count(groups_of_last_.begin(), groups_of_last_.end(), place.group) != 0;
    require(!was_set || *place.value == *last_set_, options_.name(), " of parameter group ", place.group,
            " was changed from ", last_set_.value_or(0), " to ", *place.value,
            " although a Vary hook sets it; change the hook's values, or leave it out");
    groups.push_back(place.group);
  }
  const double to_set = value(progress);
  // From here on nothing throws, so that a step which is taken again finds all values or none.
  last_set_ = to_set;
  groups_of_last_ = std::move(groups);
  for (const Place& place : now) *place.value = *last_set_;
}

void Vary::after_step(StepReport& report) {
  if (last_set_) report.add(full_name(), *last_set_);
}

void Vary::save(NamedTensors& state) const { state[kNextValue] = number_tensor(value(*progress_)); }

void Vary::load(const NamedTensors& state) {
  const auto wanted = require_number<double>(state, kNextValue);
  const double next = value(*progress_);
  const double larger_end = std::max(std::abs(*options_.at_one()), std::abs(*options_.at_zero()));
  require(
      std::abs(next - wanted) <= kTolerance * larger_end, "the run to go on with would take step ",
      progress_->step + 1, " with ", full_name(), " at ", wanted, ", but this ", said(), " says ", next, " (",
      agreement(),
      "); values and schedule may only change in what has not begun, so give the former ones, or load the "
      "weights alone, with load_weights, and begin a new run");
  last_set_.reset();
}

}  // namespace pacer
