// Gradients that somebody touches while they travel between processes: what rank_gradients.cpp of the unit tests
// does to ranks that are threads, on the back-end and the devices of a real run.
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torch/nn/utils/clip_grad.h>

#include "replicas.h"
#include "scenario.h"
#include "support/message_of.h"
#include "support/parallel/rank_gradients.h"

namespace pacer::testing::touching {
namespace {

using rank_gradients::data_parallel;
using rank_gradients::MakeOptimizer;
using rank_gradients::Model;
using rank_gradients::Rank;
using rank_gradients::Use;

struct Form {
  std::string name;
  MakeOptimizer optimizer;
  Use use;
};

std::vector<Form> forms() {
  return {{"flat", rank_gradients::kSgd, data_parallel(/*in_place=*/false)},
          {"in place", rank_gradients::kFused, data_parallel(/*in_place=*/true)},
          {"shards of gradients", rank_gradients::kFused, [](Session& s, Model&) { s.use(Shards()); }},
          {"shards of parameters", rank_gradients::kFused,
           [](Session& s, Model& m) { s.use(Shards(m->blocks)); }},
          {"1-bit, warm-up", rank_gradients::onebit(/*overlap=*/false), data_parallel(/*in_place=*/false)}};
}

std::shared_ptr<Communicator> join(const Player& player, const std::string& suffix) {
  Player met = player;
  met.arguments["file"] += suffix;
  return std::make_shared<Communicator>(met.connect(), met.options());
}

void expect_says(const std::string& what, const std::string& text, const std::vector<std::string>& parts) {
  for (const std::string& part : parts) {
    expect(text.find(part) != std::string::npos, what, ": \"", part, "\", but heard: ", text);
  }
}

// Two steps, with lines of a user's between backward and step; the weights then.
std::vector<Tensor> train(Rank& r, const std::function<void(Rank&)>& between) {
  for (int64_t t = 0; t < 2; ++t) {
    r.backward(t * r.world->world_size() + r.world->rank());
    between(r);
    r.session->step();
  }
  std::vector<Tensor> values;
  {
    const auto whole = r.session->whole_parameters();
    for (const Tensor& parameter : r.model->parameters()) values.push_back(parameter.detach().clone());
  }
  r.session->finish();
  return values;
}

void read_and_write(const Form& form, const std::shared_ptr<Communicator>& world) {
  const std::vector<std::pair<std::string, std::function<void(Rank&)>>> lines = {
      {"clip", [](Rank& r) { torch::nn::utils::clip_grad_norm_(r.model->parameters(), 0.01); }},
      {"read", [](Rank& r) { (void)r.parameter(0).grad().norm().item<double>(); }},
      {"copy",
       [](Rank& r) {
         (void)r.parameter(0).grad().to(at::kCPU, at::kFloat, /*non_blocking=*/false, /*copy=*/true);
       }},
      {"clear", [](Rank& r) { r.parameter(0).grad().zero_(); }}};
  Rank touched(world, form.optimizer, form.use), twin(world, form.optimizer, form.use);
  const auto trained = train(touched, [&](Rank& r) {
    for (const auto& [name, line] : lines) {
      expect_says(form.name + ", " + name, message_of([&, run = line] { run(r); }),
                  {"gradient of parameter first.weight", "GradientClipping", "gradients_ready"});
    }
  });
  const auto wanted = train(twin, [](Rank&) {});
  if (world->world_size() == 2) {  // a sum of two has one order
    expect(same_bits(trained, wanted), form.name, ": the bits of a run that nobody touched");
  } else {
    expect(distance(trained, wanted) < 1e-6, form.name, ": the weights of a run that nobody touched");
  }
}

// Each of these ends its world.
void clear_or_replace(const Form& form, bool is_cleared, const std::shared_ptr<Communicator>& world) {
  Rank r(world, form.optimizer, form.use);
  r.micro_step(world->rank());
  const std::string message = message_of([&] {
    r.backward(world->world_size() + world->rank());
    if (is_cleared) {
      r.optimizer->zero_grad();
    } else {
      r.parameter(0).mutable_grad() = at::ones_like(r.parameter(0));
    }
    r.session->step();
  });
  expect_says(form.name, message,
              {"first.weight", is_cleared ? "delete zero_grad()" : "gradient of its own"});
}

void parameters_touch(const Player& player) {
  {
    const auto world = join(player, "");
    for (const Form& form : forms()) read_and_write(form, world);
  }
  int number = 0;
  for (const Form& form : forms()) {
    for (const bool is_cleared : {true, false}) {
      clear_or_replace(form, is_cleared, join(player, "-" + std::to_string(number++)));
    }
  }
}

const AddScenario kTouch("parameters_touch", parameters_touch);

}  // namespace
}  // namespace pacer::testing::touching
