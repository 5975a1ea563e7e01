// 1-bit optimizers on small models of five kinds, beside those in full precision: they end where these do,
// and what has no true gradient moves no further.
#include "support/catch.h"
#include "support/heard_warnings.h"

#include <cstdio>

#include <pacer/optimizers/fused_lamb.h>
#include <pacer/optimizers/onebit_adam.h>
#include <pacer/optimizers/onebit_lamb.h>

#include "support/optimizers/onebit_models.h"
#include "support/optimizers/onebit_ranks.h"
#include "support/samples.h"

namespace pacer::testing::onebit_models_test {
namespace {

using Make = std::function<std::unique_ptr<torch::optim::Optimizer>(const std::vector<Tensor>&)>;

template <class Optimizer, class Options>
Make making(const Options& options) {
  return [options](const std::vector<Tensor>& parameters) {
    return std::make_unique<Optimizer>(parameters, options);
  };
}
// `change` sets options that both have.
template <class Change>
Make in_full(const OneBitModel& kind, bool lamb, const Change& change) {
  auto adam = FusedAdamWOptions(kind.rate);
  auto of_lamb = FusedLambOptions(kind.lamb_rate);
  change(adam);
  change(of_lamb);
  return lamb ? making<FusedLamb>(of_lamb) : making<FusedAdamW>(adam);
}
template <class Change>
Make in_signs(const OneBitModel& kind, bool lamb, int64_t freeze_step, const Change& change) {
  auto adam = OneBitAdamOptions(kind.rate).freeze_step(freeze_step).compress_alone(true);
  auto of_lamb = OneBitLambOptions(kind.lamb_rate).freeze_step(freeze_step).compress_alone(true);
  of_lamb.bias_correction(true);  // its variance has hardly grown when it freezes so early
  change(adam);
  change(of_lamb);
  return lamb ? making<OneBitLamb>(of_lamb) : making<OneBitAdam>(adam);
}

constexpr auto as_it_is = [](auto&) {};
// Without decay only gradients move a parameter.
constexpr auto without_decay = [](auto& options) { options.weight_decay(0); };

struct Arm {
  const char* name;
  Make make, without_decay;
};

}  // namespace

TEST_CASE("1-bit optimizers end where full precision does, on five kinds of model",
          "[onebit_adam][onebit_lamb]") {
  constexpr int64_t kSteps = 120, kFreeze = 50;
  std::string said;
  HeardWarnings ear(said);
  const c10::WarningUtils::WarningHandlerGuard guard(&ear);
  for (const OneBitModel& kind : all_onebit_models()) {
    for (const bool lamb : {false, true}) {
      CAPTURE(kind.name, lamb);
      const auto compare = [&](const auto& change, const auto& check) {
        const OneBitOutcome full = train_onebit_model(kind, in_full(kind, lamb, change), 1, kSteps);
        check(full, train_onebit_model(kind, in_signs(kind, lamb, kFreeze, change), 1, kSteps));
      };
      compare(as_it_is, [](const OneBitOutcome& full, const OneBitOutcome& own) {
        CAPTURE(full.loss, own.loss, full.accuracy, own.accuracy);
        CHECK(own.loss <= full.loss + 0.15);
        CHECK(own.accuracy >= full.accuracy - 0.05);
      });
      compare(without_decay, [](const OneBitOutcome& full, const OneBitOutcome& own) {
        CHECK(own.movement <= 2 * full.movement);  // noise; 0 where there is no gradient
      });
    }
  }
}

TEST_CASE("convolutions before batch norm survive signs for vectors, too", "[onebit_adam][onebit_lamb]") {
  const OneBitModel kind = all_onebit_models().front();
  std::string said;
  HeardWarnings ear(said);
  const c10::WarningUtils::WarningHandlerGuard guard(&ear);
  for (const bool lamb : {false, true}) {
    for (const bool blocks : {false, true}) {
      const OneBitOutcome full = train_onebit_model(kind, in_full(kind, lamb, as_it_is), 2, 120);
      const OneBitOutcome own = train_onebit_model(
          kind, in_signs(kind, lamb, 50, [&](auto& o) { o.compress_vectors(true).block_scales(blocks); }), 2,
          120);
      CAPTURE(lamb, blocks, full.loss, own.loss, full.accuracy, own.accuracy, full.movement, own.movement);
      CHECK(own.loss <= full.loss + 0.2);
      CHECK(own.accuracy >= full.accuracy - 0.05);
      CHECK(own.movement <= 0.5);
    }
  }
}

// Prints the table of docs/measurements/study-signs.md.
TEST_CASE("five kinds of model, three seeds", "[.][onebit_study]") {
  if (!wants_long_tests()) PACER_SKIP("the study of five models takes minutes; set PACER_TEST_LONG=1");
  constexpr int64_t kSteps = 600, kFreeze = 120;
  std::string said;
  HeardWarnings ear(said);
  const c10::WarningUtils::WarningHandlerGuard guard(&ear);
  std::printf("| model | optimizer | loss | accuracy | movement |\n| --- | --- | ---: | ---: | ---: |\n");
  for (const OneBitModel& kind : all_onebit_models()) {
    for (const bool lamb : {false, true}) {
      // OneBitAdam has scales for blocks, OneBitLamb one for the buffer.
      const auto other_scale = [&](auto& o) { o.block_scales(lamb); };
      const auto vectors = [](auto& o) { o.compress_vectors(true); };
      std::vector<Arm> arms;
      const auto add = [&](const char* name, const auto& change) {
        const auto make = [&](const auto& decay) {
          return in_signs(kind, lamb, kFreeze, [&](auto& o) { change(o), decay(o); });
        };
        arms.push_back({name, make(as_it_is), make(without_decay)});
      };
      arms.push_back(
          {lamb ? "LAMB" : "AdamW", in_full(kind, lamb, as_it_is), in_full(kind, lamb, without_decay)});
      add(lamb ? "1-bit LAMB" : "1-bit Adam", as_it_is);
      add(lamb ? "`block_scales(true)`" : "`block_scales(false)`", other_scale);
      add("`compress_vectors(true)`", vectors);
      add("both", [&](auto& o) { other_scale(o), vectors(o); });
      add("`variance_floor(0)`", [](auto& o) { o.variance_floor(0); });
      for (const Arm& one : arms) {
        OneBitOutcome mean{0, 0, 0};
        for (const uint64_t seed : {1, 2, 3}) {
          const OneBitOutcome outcome = train_onebit_model(kind, one.make, seed, kSteps);
          mean.loss += outcome.loss / 3, mean.accuracy += outcome.accuracy / 3;
          const OneBitOutcome moved = train_onebit_model(kind, one.without_decay, seed, kSteps);
          mean.movement = std::max(mean.movement, moved.movement);
        }
        std::printf("| %s | %s | %.4f | %.3f | %.4f |\n", kind.name.c_str(), one.name, mean.loss,
                    mean.accuracy, mean.movement);
        std::fflush(stdout);
      }
    }
  }
}

}  // namespace pacer::testing::onebit_models_test
