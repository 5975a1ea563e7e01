// What compiles for torch's Adam and AdamW compiles for ours: every way to call a constructor, and
// comparisons.
#include "support/catch.h"

#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>

#include "support/optimizers/optimizers.h"

namespace pacer::testing {
namespace {

// One way to call the constructor: does it compile for optimizer O with options S?
#define PACER_CONSTRUCTOR_CALL(name, ...)   \
  template <class O, class S, class = void> \
  struct name : std::false_type {};         \
  template <class O, class S>               \
  struct name<O, S, std::void_t<decltype(O(__VA_ARGS__))>> : std::true_type {}

using Group = torch::optim::OptimizerParamGroup;
template <class T>
T& some();  // an lvalue, never evaluated
PACER_CONSTRUCTOR_CALL(FromNothing, {});
PACER_CONSTRUCTOR_CALL(FromOne, {some<Tensor>()});
PACER_CONSTRUCTOR_CALL(FromTwo, {some<Tensor>(), some<Tensor>()});
PACER_CONSTRUCTOR_CALL(FromTwoOptions, {some<Tensor>(), some<Tensor>()}, some<S>());
PACER_CONSTRUCTOR_CALL(FromTwoRate, {some<Tensor>(), some<Tensor>()}, 1e-3);
PACER_CONSTRUCTOR_CALL(FromTwoBracedRate, {some<Tensor>(), some<Tensor>()}, {1e-3});
PACER_CONSTRUCTOR_CALL(FromTwoDefaults, {some<Tensor>(), some<Tensor>()}, {});
PACER_CONSTRUCTOR_CALL(FromBracedTwo, {{some<Tensor>(), some<Tensor>()}});
PACER_CONSTRUCTOR_CALL(FromBracedTwoOptions, {{some<Tensor>(), some<Tensor>()}}, some<S>());
PACER_CONSTRUCTOR_CALL(FromBracedOnes, {{some<Tensor>()}, {some<Tensor>()}});
PACER_CONSTRUCTOR_CALL(FromTwiceBracedOnes, {{{some<Tensor>()}}, {{some<Tensor>()}}});
PACER_CONSTRUCTOR_CALL(FromVector, some<std::vector<Tensor>>());
PACER_CONSTRUCTOR_CALL(FromVectorRate, some<std::vector<Tensor>>(), 1e-3);
PACER_CONSTRUCTOR_CALL(FromVectorBraces, some<std::vector<Tensor>>(), {});
PACER_CONSTRUCTOR_CALL(FromBracedVector, {some<std::vector<Tensor>>()});
PACER_CONSTRUCTOR_CALL(FromVectors, {some<std::vector<Tensor>>(), some<std::vector<Tensor>>()});
PACER_CONSTRUCTOR_CALL(FromVectorsOptions, {some<std::vector<Tensor>>(), some<std::vector<Tensor>>()},
                       some<S>());
PACER_CONSTRUCTOR_CALL(FromGroup, {some<Group>()});
PACER_CONSTRUCTOR_CALL(FromGroupOptions, {some<Group>()}, some<S>());
PACER_CONSTRUCTOR_CALL(FromGroups, {some<Group>(), some<Group>()});
PACER_CONSTRUCTOR_CALL(FromGroupVector, some<std::vector<Group>>(), some<S>());
PACER_CONSTRUCTOR_CALL(FromBracedGroup, {{some<std::vector<Tensor>>(), std::make_unique<S>()}});
PACER_CONSTRUCTOR_CALL(FromBracedGroups,
                       {{some<std::vector<Tensor>>(), std::make_unique<S>()},
                        {some<std::vector<Tensor>>(), std::make_unique<S>()}},
                       some<S>());
PACER_CONSTRUCTOR_CALL(FromModel, some<torch::nn::Linear>()->parameters(), some<S>());
#undef PACER_CONSTRUCTOR_CALL

// Counts the forms that compile for torch, and returns those that do not for ours.
template <template <class, class, class> class... Forms>
std::vector<size_t> forms_only_torch_takes(int& taken_by_torch) {
  const bool torchs[] = {Forms<torch::optim::AdamW, torch::optim::AdamWOptions, void>::value...};
  const bool ours[] = {Forms<FusedAdamW, FusedAdamWOptions, void>::value...};
  std::vector<size_t> missing;
  for (size_t i = 0; i < sizeof...(Forms); ++i) {
    taken_by_torch += torchs[i];
    if (torchs[i] && !ours[i]) missing.push_back(i);
  }
  return missing;
}

TEST_CASE("every constructor call that compiles for torch's AdamW compiles for FusedAdamW", "[fused_adam]") {
  int taken_by_torch = 0;
  const auto missing =
      forms_only_torch_takes<FromNothing, FromOne, FromTwo, FromTwoOptions, FromTwoRate, FromTwoBracedRate,
                             FromTwoDefaults, FromBracedTwo, FromBracedTwoOptions, FromBracedOnes,
                             FromTwiceBracedOnes, FromVector, FromVectorRate, FromVectorBraces,
                             FromBracedVector, FromVectors, FromVectorsOptions, FromGroup, FromGroupOptions,
                             FromGroups, FromGroupVector, FromBracedGroup, FromBracedGroups, FromModel>(
          taken_by_torch);
  CHECK(missing == std::vector<size_t>{});
  CHECK(taken_by_torch >= 15);
}

// x == y for two parameter states, which torch's have.
template <class State, class = void>
struct CanCompare : std::false_type {};
template <class State>
struct CanCompare<State, std::void_t<decltype(some<const State>() == some<const State>())>> : std::true_type {
};

TEST_CASE("parameter states can be compared, like torch's", "[fused_adam]") {
  CHECK(CanCompare<torch::optim::AdamParamState>::value);
  CHECK(CanCompare<FusedAdamParamState>::value);
  CHECK(CanCompare<FusedAdamWParamState>::value);
}

}  // namespace
}  // namespace pacer::testing
