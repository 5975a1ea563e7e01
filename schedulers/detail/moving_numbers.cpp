#include <pacer/schedulers/detail/moving_numbers.h>

#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <tuple>
#include <type_traits>

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <pacer/core/error.h>
#include <pacer/optimizers/detail/optimizer_traits.h>
#include <pacer/optimizers/detail/option_visitors.h>

namespace pacer::detail {
namespace {

using torch::optim::OptimizerOptions;
using Numbers = std::vector<MovingNumber>;

constexpr const char* kSetsRate = "it is the learning rate, which the LearningRate hook sets";

constexpr const char* kLooksAhead = "Nesterov's momentum is defined for a dampening of 0 only";

bool is_one_of(const char* name, std::initializer_list<const char*> names) {
  return std::any_of(names.begin(), names.end(),
                     [&](const char* one) { return std::strcmp(one, name) == 0; });
}

// ---- pacer's. What may move is in the scalars of a step, which the device gets anew in each. ----

// Whether the rule of the group uses it at all.
template <class Options>
bool is_read(const Options& options, const char* name) {
  if constexpr (kIsMuon<Options>) {
    if (is_one_of(name, {"momentum", "row_beta"})) return options.orthogonalize();
    if (is_one_of(name, {"beta1", "beta2", "eps"})) return !options.orthogonalize();
  }
  if constexpr (kIsSgd<Options>) {
    if (is_one_of(name, {"momentum", "dampening"})) return options.momentum() > 0;
  }
  if constexpr (kIsRmsprop<Options>) {
    if (is_one_of(name, {"momentum"})) return options.momentum() > 0;
  }
  if constexpr (kIsLamb<Options>) {
    if (is_one_of(name, {"min_coeff", "max_coeff"})) return options.adapt();
  }
  if constexpr (kIs<OneBitLambOptions, Options>) {
    if (is_one_of(name, {"coeff_beta", "factor_min", "factor_max", "factor_threshold"}))
      return options.adapt() && options.compress();
  }
  return true;
}

template <class Options>
const char* why_fixed(const Options& options, const char* name) {
  if (is_one_of(name, {"lr"})) return kSetsRate;
  if constexpr (kIsSgd<Options>) {
    if (is_one_of(name, {"dampening"}) && options.nesterov()) return kLooksAhead;
  }
  if constexpr (kIsScheduleFree<Options>) {
    if (is_one_of(name, {"beta1"}))
      return "the average of the weights follows from it and the weights of training, and would jump";
    if (is_one_of(name, {"r", "weight_lr_power"}))
      return "the steps so far count in the average by its former value";
  }
  if constexpr (kIsMuon<Options>) {
    if (is_one_of(name, {"row_beta"}))
      return "the kernels of a step are planned with it, and each new value would have them planned anew";
  }
  if constexpr (kIsOneBit<Options>) {
    if (is_one_of(name, {"variance_floor"}))
      return "floors are set when the variance freezes, and it is the same from the first step on";
    if (!options.compress()) return nullptr;
    if (is_one_of(name, {"beta2"}))
      return "the variance of a compressed group freezes in the middle of a run, and what is computed from "
             "it "
             "supposes one beta2 for all of it";
    if (is_one_of(name, {"beta1"}) && options.overlap_backward())
      return "overlap_backward(true) sends the momentum of a step before the step begins";
    if (is_one_of(name, {"min_coeff", "max_coeff"}))
      return "the mean of the trust ratios that they bound is frozen with the variance";
    if (is_one_of(name, {"coeff_beta"}))
      return "the mean of the trust ratios is corrected as if it had been the same in all steps";
  }
  return nullptr;
}

// LAMB's trust ratio, whose mean is frozen with the variance, follows from all that the update follows from. The
// variance itself follows from gradients and beta2 alone.
template <class Options>
bool enters_freeze(const Options& options, const char* name) {
  if constexpr (kIs<OneBitLambOptions, Options>) {
    return options.compress() && options.adapt() && is_one_of(name, {"weight_decay", "beta1", "eps"});
  }
  return false;
}

template <class Options>
Numbers numbers_of(Options& options) {
  Numbers numbers;
  const auto add = [&](const char* name, double& value, Range range) {
    if (!is_read(options, name)) return;
    numbers.push_back({name, &value, range, why_fixed(options, name), enters_freeze(options, name)});
  };
  const auto visit = [&](const OptionField& field, auto& value) {
    using Value = std::decay_t<decltype(value)>;
    if constexpr (std::is_same_v<Value, Betas>) {
      add("beta1", std::get<0>(value), field.range);
      add("beta2", std::get<1>(value), field.range);
    } else if constexpr (std::is_same_v<Value, double>) {
      add(field.name, value, field.range);
    }
  };
  visit_options(visit, options);
  return numbers;
}

// ---- torch's, whose steps read all options anew. ----

template <class Options>
Numbers numbers_of_adam(Options& options) {
  return {{"lr", &options.lr(), Range::at_least_zero, kSetsRate},
          {"beta1", &std::get<0>(options.betas()), Range::below_one},
          {"beta2", &std::get<1>(options.betas()), Range::below_one},
          {"eps", &options.eps(), Range::at_least_zero},
          {"weight_decay", &options.weight_decay(), Range::at_least_zero}};
}
Numbers numbers_of(torch::optim::AdamOptions& options) { return numbers_of_adam(options); }
Numbers numbers_of(torch::optim::AdamWOptions& options) { return numbers_of_adam(options); }
Numbers numbers_of(torch::optim::SGDOptions& options) {
  return {{"lr", &options.lr(), Range::at_least_zero, kSetsRate},
          {"momentum", &options.momentum(), Range::below_one},
          {"dampening", &options.dampening(), Range::below_one, options.nesterov() ? kLooksAhead : nullptr},
          {"weight_decay", &options.weight_decay(), Range::at_least_zero}};
}
Numbers numbers_of(torch::optim::RMSpropOptions& options) {
  return {{"lr", &options.lr(), Range::at_least_zero, kSetsRate},
          {"alpha", &options.alpha(), Range::below_one},
          {"eps", &options.eps(), Range::at_least_zero},
          {"weight_decay", &options.weight_decay(), Range::at_least_zero},
          {"momentum", &options.momentum(), Range::below_one}};
}
Numbers numbers_of(torch::optim::AdagradOptions& options) {
  return {{"lr", &options.lr(), Range::at_least_zero, kSetsRate},
          {"lr_decay", &options.lr_decay(), Range::at_least_zero,
           "it is a schedule of the learning rate itself, which counts from the first step"},
          {"weight_decay", &options.weight_decay(), Range::at_least_zero},
          {"initial_accumulator_value", &options.initial_accumulator_value(), Range::at_least_zero,
           "only the constructor of the optimizer reads it"},
          {"eps", &options.eps(), Range::at_least_zero}};
}

// The numbers of the first of these types that the options are of.
template <class... Types>
Numbers numbers_of_one(OptimizerOptions& options) {
  Numbers numbers;
  const auto is = [&](auto* own) {
    if (own != nullptr) numbers = numbers_of(*own);
    return own != nullptr;
  };
  (is(dynamic_cast<Types*>(&options)) || ...);
  return numbers;
}

}  // namespace

Numbers moving_numbers(OptimizerOptions& options) {
  return numbers_of_one<FusedAdamWOptions, FusedAdamOptions, FusedLambOptions, FusedSgdOptions,
                        FusedRmspropOptions, MuonOptions, OneBitMuonOptions, OneBitAdamOptions,
                        OneBitLambOptions, ScheduleFreeAdamWOptions, OwnRuleOptions,
                        torch::optim::AdamWOptions, torch::optim::AdamOptions, torch::optim::SGDOptions,
                        torch::optim::RMSpropOptions, torch::optim::AdagradOptions>(options);
}

void check_moving_number(const std::string& where, const OptimizerOptions& options, const std::string& name,
                         double value) {
  const auto with_value = options.clone();
  for (const MovingNumber& number : moving_numbers(*with_value)) {
    if (name != number.name) continue;
    check_range(where.c_str(), number.name, number.range, value);
    // It makes the buffer of its momentum with the first state, or never.
    const bool must_stay =
        dynamic_cast<torch::optim::RMSpropOptions*>(with_value.get()) != nullptr && name == "momentum";
    require(!must_stay || value > 0, where,
            ": the momentum of torch::optim::RMSprop must stay above 0, because a state that began without "
            "one has no buffer for it; end at a small number instead");
    const bool is_sgd = dynamic_cast<FusedSgdOptions*>(with_value.get()) != nullptr;
    const bool has_buffer = is_sgd || dynamic_cast<FusedRmspropOptions*>(with_value.get()) != nullptr;
    require(!has_buffer || name != "momentum" || value > 0, where, ": the momentum of ",
            is_sgd ? "FusedSgd" : "FusedRmsprop",
            " must stay above 0, because without one its buffers are let go; end at a small number instead");
    *number.value = value;
  }
  const OptimizerTraits* const own = find_traits(*with_value);
  if (own != nullptr) own->settings(*with_value);  // what no range says
}

}  // namespace pacer::detail
