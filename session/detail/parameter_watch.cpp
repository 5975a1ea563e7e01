#include <pacer/session/detail/parameter_watch.h>

#include <algorithm>
#include <map>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include <pacer/core/error.h>
#include <pacer/hooks/detail/model_facts.h>
#include <pacer/modules/detail/model_modules.h>
#include <pacer/modules/nf4_weight.h>

namespace pacer::detail {
namespace {

using Addresses = std::unordered_set<const void*>;  // of TensorImpl

// The parameters of a module itself. What Module::named_parameters() returns is a copy with all names.
class OwnParameters : public torch::nn::Module {
 public:
  static const torch::OrderedDict<std::string, at::Tensor>& of(const torch::nn::Module& module) {
    return module.*(&OwnParameters::parameters_);
  }
};

// Calls f(parameter), which returns whether to go on, for all that the module has, in an order of its own.
// False where f ended it. Module::apply, unlike children(), makes no list of each module's children.
template <class F>
bool each_parameter(const torch::nn::Module& model, const F& f) {
  bool goes_on = true;
  const torch::nn::Module::ConstModuleApplyFunction look = [&](const torch::nn::Module& module) {
    for (const auto& item : OwnParameters::of(module)) {
      goes_on = goes_on && (!item.value().defined() || f(item.value()));
    }
  };
  model.apply(look);
  return goes_on;
}

Addresses addresses_in_model(const SessionParts& parts) {
  Addresses all;
  each_parameter(parts.model(), [&](const at::Tensor& parameter) {
    all.insert(parameter.unsafeGetTensorImpl());
    return true;
  });
  return all;
}

Addresses addresses_in_optimizer(const SessionParts& parts) {
  Addresses all;
  for (const at::Tensor& parameter : all_optimizer_parameters(parts)) {
    all.insert(parameter.unsafeGetTensorImpl());
  }
  return all;
}

// The optimizer would keep a weight that quantize() has replaced, and its state, for nothing.
void check_replaced(const SessionParts& parts) {
  std::map<std::vector<int64_t>, std::string> in_4_bits;  // the first layer of each shape
  for (const auto& item : named_modules_of(parts.model())) {
    const auto* weight = item.value()->as<modules::Nf4WeightImpl>();
    if (weight != nullptr)
      in_4_bits.emplace(std::vector{weight->out_features, weight->in_features}, item.key());
  }
  if (in_4_bits.empty()) return;
  const Addresses of_model = addresses_in_model(parts);
  for (const at::Tensor& parameter : all_optimizer_parameters(parts)) {
    if (parameter.requires_grad() || of_model.count(parameter.unsafeGetTensorImpl()) != 0) continue;
    const auto found = in_4_bits.find(parameter.sizes().vec());
    require(found == in_4_bits.end(), "a parameter of the optimizer, of shape ", parameter.sizes(),
            ", is no longer the model's, because ", found == in_4_bits.end() ? "" : found->second,
            " is in 4 bits now; call quantize() before the optimizer is made");
  }
}

// Parameters of the model that need a gradient and are in no group.
std::vector<std::pair<std::string, at::Tensor>> left_out(const SessionParts& parts) {
  const Addresses trained = addresses_in_optimizer(parts);
  std::vector<std::pair<std::string, at::Tensor>> all;
  for (const auto& item : parts.model().named_parameters()) {
    if (!item.value().requires_grad() || trained.count(item.value().unsafeGetTensorImpl()) > 0) continue;
    all.emplace_back(item.key(), item.value());
  }
  return all;
}

// Parameters of the optimizer that are not the model's.
std::vector<at::Tensor> strangers(const SessionParts& parts) {
  const Addresses of_model = addresses_in_model(parts);
  std::vector<at::Tensor> all = all_optimizer_parameters(parts);
  const auto is_models = [&](const at::Tensor& p) { return of_model.count(p.unsafeGetTensorImpl()) != 0; };
  all.erase(std::remove_if(all.begin(), all.end(), is_models), all.end());
  return all;
}

void warn_of_left_out(size_t count, const std::string& first) {
  TORCH_WARN(
      concatenate(count,
                  " parameters of the model need a gradient, but no group of the optimizer has them (the "
                  "first: ",
                  first, "), so they are not trained; add them, or call requires_grad_(false) on them"));
}

void warn_of_strangers(size_t count) {
  TORCH_WARN(concatenate(
      "the optimizer has ", count,
      " parameters that are not the model's; they are trained, but checkpoints do not hold their values"));
}

}  // namespace

void check_parameters(const SessionParts& parts) {
  if (all_optimizer_parameters(parts).empty()) {
    require(parts.replicas != nullptr, "a Session needs an optimizer with at least one parameter");
    return;  // other stages of the pipeline have some
  }
  check_replaced(parts);
  const auto not_models = strangers(parts);
  const size_t trained = addresses_in_optimizer(parts).size();
  require(
      not_models.size() < trained, "none of the optimizer's ", trained,
      " parameters belongs to the model that this Session was given, so the model would not be trained; make "
      "the optimizer from this model's parameters()");
  if (!parts.is_first_rank()) return;
  if (!not_models.empty()) warn_of_strangers(not_models.size());
  const auto not_trained = left_out(parts);
  if (!not_trained.empty()) warn_of_left_out(not_trained.size(), not_trained.front().first);
}

ParameterWatch::ParameterWatch(const SessionParts& parts) : model_(parts.model().weak_from_this().lock()) {}

void ParameterWatch::remember(const SessionParts& parts) {
  of_optimizer_.clear();
  of_model_.clear();
  for (const at::Tensor& parameter : all_optimizer_parameters(parts)) of_optimizer_.emplace_back(parameter);
  each_parameter(parts.model(), [&](const at::Tensor& parameter) {
    of_model_.emplace_back(parameter);
    return true;
  });
}

// It is called before each pass, and mostly nothing has changed.
bool ParameterWatch::is_as_seen(const SessionParts& parts) const {
  const auto is_same = [](const SeenParameter& seen, const at::Tensor& now, size_t) { return seen.is(now); };
  if (!is_list(of_optimizer_, parts.optimizer().param_groups(), is_same)) return false;
  size_t place = 0;
  return each_parameter(
             parts.model(),
             [&](const at::Tensor& now) { return place < of_model_.size() && of_model_[place++].is(now); }) &&
         place == of_model_.size();
}

// What check_parameters would warn of and was not so before.
struct ParameterWatch::Change {
  std::vector<std::pair<std::string, at::Tensor>> left_out;
  std::vector<at::Tensor> strangers;
};

ParameterWatch::Change ParameterWatch::change(const SessionParts& parts) const {
  std::unordered_map<const void*, bool> in_model;  // whether it needed a gradient
  Addresses in_optimizer;
  for (const SeenParameter& seen : of_model_) in_model.emplace(seen.key(), seen.requires_grad);
  for (const SeenParameter& seen : of_optimizer_) in_optimizer.insert(seen.key());
  Change change{left_out(parts), strangers(parts)};
  const auto was_left_out = [&](const auto& item) {
    const void* tensor = item.second.unsafeGetTensorImpl();
    const auto found = in_model.find(tensor);
    return found != in_model.end() && found->second && in_optimizer.count(tensor) == 0;
  };
  const auto was_stranger = [&](const at::Tensor& parameter) {
    const void* tensor = parameter.unsafeGetTensorImpl();
    return in_optimizer.count(tensor) != 0 && in_model.count(tensor) == 0;
  };
  auto& others = change.left_out;
  others.erase(std::remove_if(others.begin(), others.end(), was_left_out), others.end());
  auto& own = change.strangers;
  own.erase(std::remove_if(own.begin(), own.end(), was_stranger), own.end());
  return change;
}

void ParameterWatch::check(const SessionParts& parts) {
  if (is_as_seen(parts)) return;
  check_replaced(parts);
  const auto [not_trained, not_models] = change(parts);
  if (!not_trained.empty() && !not_models.empty()) {
    const auto& [name, parameter] = not_trained.front();
    throw InvalidArgument(concatenate(
        "parameter ", name, " of the model, of shape ", parameter.sizes(),
        ", is not the optimizer's, which has one of shape ", not_models.front().sizes(),
        " that is not the model's: it was replaced in one of the two since the last step; put the new tensor "
        "into both, the module and optimizer.param_groups(), or make a new optimizer and Session"));
  }
  remember(parts);
  if (!parts.is_first_rank()) return;
  if (!not_models.empty()) warn_of_strangers(not_models.size());
  if (!not_trained.empty()) warn_of_left_out(not_trained.size(), not_trained.front().first);
}

}  // namespace pacer::detail
