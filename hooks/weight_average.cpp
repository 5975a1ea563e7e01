#include <pacer/hooks/weight_average.h>

#include <algorithm>
#include <exception>
#include <unordered_map>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <c10/util/Exception.h>

#include <pacer/core/error.h>
#include <pacer/files/number_text.h>
#include <pacer/hooks/detail/add_to_averages.h>
#include <pacer/hooks/detail/model_facts.h>
#include <pacer/hooks/session_parts.h>
#include <pacer/hooks/sharded_state.h>
#include <pacer/hooks/step_report.h>
#include <pacer/modules/deferred.h>

namespace pacer {

struct WeightAverage::Averaged {
  std::string name;
  at::Tensor parameter;
  at::Tensor own;  // the parameter, or this rank's part of its values
  at::Tensor average;
  at::Tensor weights;  // of training, while the average is in the model
};

WeightAverageOptions ema(double decay) { return WeightAverageOptions().decay(decay); }

WeightAverageOptions tail_average(int64_t from_step) { return WeightAverageOptions().from_step(from_step); }

WeightAverage::WeightAverage(WeightAverageOptions options) : options_(options) {
  const std::optional<double>& decay = options_.decay();
  require(!decay || (*decay >= 0 && *decay < 1),
          "WeightAverage: decay is the share of the average that stays, in [0, 1), not ", decay.value_or(0));
  require(decay || !options_.warm_up(),
          "WeightAverage: warm_up belongs to an exponential average; give a decay, or leave warm_up out");
  require(options_.every() >= 1, "WeightAverage: every must be at least 1 step, not ", options_.every());
  require(options_.from_step() >= 0,
          "WeightAverage: from_step counts steps and must not be negative, but is ", options_.from_step());
}

WeightAverage::WeightAverage(WeightAverage&&) noexcept = default;
WeightAverage::~WeightAverage() = default;

void WeightAverage::attach(SessionParts& parts) {
  const SessionOptimizer* const optimizer = parts.session_optimizer();
  require(
      optimizer == nullptr || !optimizer->averages_weights(),
      "WeightAverage: the optimizer averages the weights itself, and evaluation sees that average; leave the "
      "hook out");
  parts_ = &parts;
}

std::string WeightAverage::agreement() const {
  const std::string rule =
      options_.decay() ? "decay " + exact_text(*options_.decay()) + (options_.warm_up() ? ", warm-up" : "")
                       : std::string("all alike");
  return detail::concatenate(rule, ", every ", options_.every(), " steps from ", options_.from_step(),
                             options_.in_evaluation() ? ", in evaluation" : "");
}

void WeightAverage::start(const Progress& progress) { seen_step_ = progress.step; }

void WeightAverage::finish(const Progress& /*progress*/) { catch_up(); }

NamedTensors WeightAverage::parameter_state() {
  catch_up();
  return averages();
}

void WeightAverage::begin(const Progress& /*progress*/, MicroBatch& /*batch*/) {
  require(in_model_ == 0,
          "Session::begin while the model has the average of its weights, which would be trained and then "
          "lost; end the scope of WeightAverage::in_model first");
  catch_up();
}

// ---- updates ----

// Whether each parameter to average is in its place in the list, as it mostly is.
bool WeightAverage::lists_all() const {
  size_t place = 0;
  for (const auto& group : parts_->optimizer().param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      if (place < averaged_.size() && averaged_[place].parameter.is_same(parameter)) {
        ++place;
      } else if (parameter.requires_grad()) {
        return false;
      }
    }
  }
  return place == averaged_.size();
}

bool WeightAverage::keeps_parts() const {
  return parts_->sharded_state != nullptr && parts_->sharded_state->keeps_parts();
}

// A parameter that joins begins with its value; one that is trained no longer stays. Once ranks keep parts,
// each has its part of the average.
void WeightAverage::list_parameters() {
  const bool of_parts = keeps_parts();
  if (of_parts == of_parts_ && lists_all()) return;
  const ParameterRanges parts = of_parts ? parts_->sharded_state->kept_parts() : ParameterRanges();
  std::unordered_map<const void*, const Averaged*> former;
  for (const Averaged& one : averaged_) former.emplace(one.parameter.unsafeGetTensorImpl(), &one);
  std::vector<Averaged> now;
  for (auto& [name, parameter] : detail::named_optimizer_parameters(*parts_)) {
    const auto part = parts.find(parameter.unsafeGetTensorImpl());
    const at::Tensor own = part == parts.end() ? parameter : part->second.values;
    const auto found = former.find(parameter.unsafeGetTensorImpl());
    if (found == former.end()) {
      if (parameter.requires_grad()) now.push_back(entry_for(name, parameter, own));
      continue;
    }
    now.push_back(*found->second);
    if (part == parts.end() || of_parts_) continue;
    now.back().own = own;
    now.back().average =
        found->second->average.view({-1}).narrow(0, part->second.first, part->second.count).clone();
  }
  averaged_ = std::move(now);
  of_parts_ = of_parts;
}

WeightAverage::Averaged WeightAverage::entry_for(const std::string& name, const at::Tensor& parameter,
                                                 const at::Tensor& own) const {
  const at::ScalarType dtype = own.scalar_type();
  const bool is_narrow = dtype == at::kHalf || dtype == at::kBFloat16;
  Averaged entry{name, parameter, own, {}, {}};
  entry.average = at::empty_like(own, own.options()
                                          .dtype(is_narrow ? at::kFloat : dtype)
                                          .device(options_.device().value_or(own.device()))
                                          .requires_grad(false));
  if (!is_deferred(own)) entry.average.copy_(own);  // else its average comes from a checkpoint
  return entry;
}

// Of the weights in the update that comes next.
double WeightAverage::share_of_update() const {
  const auto n = static_cast<double>(updates_);
  if (!options_.decay()) return 1 / (n + 1);
  return 1 - (options_.warm_up() ? std::min(*options_.decay(), (1 + n) / (10 + n)) : *options_.decay());
}

// Before anything is saved or measured after ranks began to keep parts.
void WeightAverage::forward_begin(const Progress& /*progress*/) {
  if (of_parts_ != keeps_parts() && !averaged_.empty()) list_parameters();
}

void WeightAverage::after_step(StepReport& report) { take_in(report.progress().step); }

// The weights that this step has left. Where it throws, because memory is short, it is tried again before
// anything reads the average or changes the weights.
void WeightAverage::take_in(int64_t step) {
  const at::NoGradGuard no_grad;
  const bool counts = step >= options_.from_step() && step % options_.every() == 0;
  // A parameter that joined has its average before anything is saved.
  if ((counts || updates_ > 0) && added_ == 0) list_parameters();
  if (counts && updates_ > 0) {
    std::vector<detail::AverageAndWeights> all;
    for (const Averaged& one : averaged_) all.push_back({one.average, one.own.detach()});
    detail::add_to_averages(all, share_of_update(), &added_);
  }
  if (counts) ++updates_;
  added_ = 0;
  seen_step_ = step;
}

// A hook may have thrown after a step, this one or one before it.
void WeightAverage::catch_up() {
  if (seen_step_ >= 0 && parts_->progress.step > seen_step_) take_in(parts_->progress.step);
}

NamedTensors WeightAverage::averages() const {
  NamedTensors all;
  for (const Averaged& one : averaged_) all.emplace(one.name, one.average);
  return all;
}

// ---- in the model ----

WeightAverage::InModel::InModel(WeightAverage& average) : average_(average) { average_.put_in_model(); }
WeightAverage::InModel::~InModel() { average_.take_from_model(); }

WeightAverage::InModel WeightAverage::in_model() {
  require(updates_ > 0,
          "WeightAverage::in_model before the first update: there is no average yet; the first "
          "step that counts is ",
          options_.from_step(), ", and then each multiple of ", options_.every());
  require(parts_->progress.micro_step == 0,
          "WeightAverage::in_model belongs between steps, not between begin and step");
  return InModel(*this);
}

void WeightAverage::evaluation_begin() {
  if (options_.in_evaluation()) put_in_model();
}

void WeightAverage::evaluation_end() noexcept {
  if (options_.in_evaluation()) take_from_model();
}

void WeightAverage::put_in_model() {
  require(
      in_model_ > 0 || !keeps_parts() || !parts_->sharded_state->all_are_whole(),
      "the average of the weights cannot come into the model while what Session::whole_parameters() returned "
      "exists; end its scope first, or begin it inside");
  if (in_model_ == 0) catch_up();
  if (++in_model_ > 1) return;
  const at::NoGradGuard no_grad;
  try {
    if (!averaged_.empty()) list_parameters();
    for (Averaged& one : averaged_) one.weights = one.own.clone();
    for (Averaged& one : averaged_) one.own.copy_(one.average);
  } catch (...) {
    take_from_model();
    throw;
  }
}

void WeightAverage::take_from_model() noexcept {
  if (--in_model_ > 0) return;
  const at::NoGradGuard no_grad;
  for (Averaged& one : averaged_) {
    try {
      if (one.weights.defined()) one.own.copy_(one.weights);
      one.weights.reset();
    } catch (const std::exception& error) {
      TORCH_WARN("the weights of training could not be put back into ", one.name,
                 " after an evaluation: ", error.what());
    }
  }
}

// ---- checkpoints ----

void WeightAverage::save(NamedTensors& state) const {
  require(in_model_ == 0,
          "a checkpoint would hold the average in place of the weights; end the scope of "
          "WeightAverage::in_model, or the evaluation, before saving");
  state["updates"] = number_tensor(updates_);
}

void WeightAverage::load(const NamedTensors& state) {
  const auto updates = require_number<int64_t>(state, "updates");
  require(updates >= 0, "\"updates\" of the state to load is ", updates, ", which is no count");
  require(updates == 0 || has_prepared_ || !averaged_.empty(), "the state to load has had ", updates,
          " updates of an average of weights, but no average is with it");
  updates_ = updates;
  added_ = 0;
  if (seen_step_ >= 0) seen_step_ = parts_->progress.step;
}

std::function<void()> WeightAverage::prepare_parameter_state(const NamedTensors& state) {
  const at::NoGradGuard no_grad;
  const auto loaded = std::make_shared<std::vector<Averaged>>();
  for (auto& [name, parameter] : detail::named_optimizer_parameters(*parts_)) {
    const auto found = state.find(name);
    require(found != state.end() || state.empty() || !parameter.requires_grad(), "the checkpoint has no \"",
            name, "/", kFieldOfHook, hook_name(),
            "\", the average of a parameter that is trained here; resume with the "
            "parameters that were trained when it was saved, and let others join then");
    if (found == state.end()) continue;
    const at::Tensor& saved = found->second;
    Averaged entry = entry_for(name, parameter, parameter);
    require(saved.sizes() == parameter.sizes() && saved.scalar_type() == entry.average.scalar_type(),
            "the average of ", name, " is ", saved.scalar_type(), " of shape ", saved.sizes(),
            " in the checkpoint, but here ", entry.average.scalar_type(), " of shape ", parameter.sizes());
    entry.average.copy_(saved);
    loaded->push_back(std::move(entry));
  }
  require(loaded->size() == state.size(), "the checkpoint has averages of ", state.size(),
          " parameters, of which this optimizer has ", loaded->size(),
          "; resume with the model that was saved");
  has_prepared_ = !loaded->empty();
  return [this, loaded] { averaged_.swap(*loaded); };
}

}  // namespace pacer
