// Every pair of hooks with every optimizer: that the pair trains, that the order of `use` does not matter,
// that steps with non-finite gradients change nothing, that pacer's optimizers do what torch's do, and that a
// run that was interrupted goes on to the bit.
#include <algorithm>
#include <cmath>

#include "support/catch.h"
#include "support/samples.h"
#include "support/session/hook_pairs.h"
#include "support/session/small_run.h"

namespace pacer::testing {
namespace {

template <class F>
void for_each_pair(const F& f) {
  for (const auto& hooks : hooks_and_pairs()) f(hooks, names_of(hooks));
}

// Every rule with one in two hooks by itself, its other forms with one in 8, and one in 192 pairs of hooks with each
// optimizer, from another one on.
template <class F>
void for_each_optimizer_and_pair(const F& f) {
  int first = 0;
  for (const RegisteredOptimizer& optimizer : all_optimizers()) {
    const int apart = is_form(optimizer) ? 8 : 2;
    Turns alone(apart, first % apart), together(192, 5 * first % 192);
    ++first;
    for_each_pair([&](const std::vector<RegisteredHook>& hooks, const std::string& name) {
      if ((hooks.size() == 1 ? alone : together).is_next()) f(optimizer, hooks, name);
    });
  }
}

bool has_guard(const RegisteredOptimizer& optimizer, const std::vector<RegisteredHook>& hooks) {
  return optimizer.is_own ||
         std::any_of(hooks.begin(), hooks.end(), [](const auto& h) { return h.has_guard; });
}

bool uses(const std::vector<RegisteredHook>& hooks, const std::string& name) {
  return std::any_of(hooks.begin(), hooks.end(), [&](const auto& h) { return h.name == name; });
}

// Options of groups, among them the learning rate, how many attempts there were, and averages of the weights,
// to which every attempt adds those that it left.
bool goes_on_in_an_attempt(const std::string& key) {
  return key.compare(0, 6, "group/") == 0 || key.compare(0, 7, "onebit/") == 0 || contains(key, "/hook.");
}

// What a skipped attempt may change: the attempt counter, data position, learning rate, loss scale and the
// count of skipped steps. Everything else must not.
void forget_attempt(detail::TrainingState& state) {
  state.session.clear();
  for (auto item = state.optimizer.begin(); item != state.optimizer.end();) {
    item = goes_on_in_an_attempt(item->first) ? state.optimizer.erase(item) : std::next(item);
  }
}

}  // namespace

TEST_CASE("every pair of hooks trains with every optimizer, whatever the order of use", "[session][pairs]") {
  for_each_optimizer_and_pair([&](const RegisteredOptimizer& optimizer,
                                  const std::vector<RegisteredHook>& hooks, const std::string& name) {
    INFO(optimizer.name << ", " << name);
    SmallRun run(optimizer, hooks), reversed(optimizer, {hooks.rbegin(), hooks.rend()});
    for (int step = 0; step < 4; ++step) {
      run.step();
      reversed.step();
      REQUIRE(std::isfinite(run.loss));
    }
    REQUIRE(first_difference(run.state(), reversed.state()) == "");
    REQUIRE(run.session->progress().step == 4);
  });
}

TEST_CASE("with every pair of hooks, pacer's AdamW does what torch's does", "[session][pairs]") {
  const auto optimizers = all_optimizers();
  const auto find = [&](const std::string& name) {
    return *std::find_if(optimizers.begin(), optimizers.end(), [&](const auto& o) { return o.name == name; });
  };
  for_each_pair([&](const std::vector<RegisteredHook>& hooks, const std::string& name) {
    // Biases of keys change nothing, so their gradients are roundings, which Adam makes steps of.
    if (uses(hooks, "fused layers")) return;
    INFO(name);
    SmallRun ours(find("FusedAdamW"), hooks), theirs(find("AdamW"), hooks);
    for (int step = 0; step < 6; ++step) {
      ours.step();
      theirs.step();
    }
    // The same rule, gradients averaged and clipped before instead of inside: rounding of 6 steps of size
    // 0.01. Autocast rounds activations to 8 (11) bits, which carries such differences further.
    const double bound = uses(hooks, "bf16") || uses(hooks, "fp16") ? 2e-3 : 2e-5;
    // One element may be further apart: where the terms of all its gradients so far cancel (a mean of 2e-9 beside 2e-4
    // elsewhere was seen), they are roundings, which differ between processors, and Adam makes a part of a step of them.
    std::vector<Tensor> apart;
    const auto parameters = ours.model->parameters(), wanted = theirs.model->parameters();
    for (size_t i = 0; i < wanted.size(); ++i) {
      apart.push_back((parameters[i] - wanted[i]).detach().abs().flatten());
    }
    const Tensor furthest = std::get<0>(torch::cat(apart).topk(2));
    CHECK(furthest[0].item<double>() < std::max(bound, 2e-4));
    CHECK(furthest[1].item<double>() < bound);
  });
}

TEST_CASE("with every pair of hooks, a non-finite gradient changes nothing but the attempt",
          "[session][pairs]") {
  const auto bad_values = {std::nan(""), double(INFINITY), -double(INFINITY)};
  int64_t which = 0;
  for_each_optimizer_and_pair([&](const RegisteredOptimizer& optimizer,
                                  const std::vector<RegisteredHook>& hooks, const std::string& name) {
    if (!has_guard(optimizer, hooks)) return;
    const double bad = *(bad_values.begin() + which++ % 3);
    INFO(optimizer.name << ", " << name << ", " << bad);
    SmallRun run(optimizer, hooks);
    for (int step = 0; step < 2; ++step) run.step();
    auto before = run.state();
    run.step([&](SmallModel& model) { model->head->bias.mutable_grad()[kVocabulary - 1] = bad; });
    auto after = run.state();
    const auto whole = after;
    forget_attempt(before);
    forget_attempt(after);
    REQUIRE(first_difference(before, after) == "");
    REQUIRE(run.session->progress().step == 3);
    REQUIRE(run.session->skipped_steps() == 1);

    // A run that took no bad attempt, moved to where the attempt counter, data and loss scale are now.
    SmallRun calm(optimizer, hooks);
    for (int step = 0; step < 2; ++step) calm.step();
    detail::TrainingState there = calm.state();
    there.session = whole.session;
    for (const auto& item : whole.optimizer) {
      if (goes_on_in_an_attempt(item.first)) there.optimizer[item.first] = item.second;
    }
    calm.load(there);
    run.step();
    calm.step();
    auto expected = calm.state(), found = run.state();
    REQUIRE(first_difference(expected, found) == "");
  });
}

TEST_CASE("with every pair of hooks, a resumed run goes on to the bit", "[session][pairs]") {
  for_each_optimizer_and_pair([&](const RegisteredOptimizer& optimizer,
                                  const std::vector<RegisteredHook>& hooks, const std::string& name) {
    INFO(optimizer.name << ", " << name);
    SmallRun run(optimizer, hooks), resumed(optimizer, hooks);
    for (int step = 0; step < 3; ++step) run.step();
    resumed.step();
    resumed.load(run.state());
    REQUIRE(first_difference(run.state(), resumed.state()) == "");
    for (int step = 0; step < 3; ++step) {
      run.step();
      resumed.step();
      REQUIRE(first_difference(run.state(), resumed.state()) == "");
    }
  });
}

}  // namespace pacer::testing
