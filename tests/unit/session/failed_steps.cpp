// A step that throws and is taken again.
#include <chrono>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <pacer/pacer.h>

#include "support/catch.h"
#include "support/collectives/ranks.h"
#include "support/message_of.h"
#include "support/session/two_layers.h"

namespace pacer::testing {
namespace {

using torch::Tensor;

// Halves gradients, and fails where it is asked to, before it changes anything.
class Halve : public Hook {
 public:
  Halve(std::string name, const torch::nn::Linear& model, const bool& fails)
      : name_(std::move(name)), model_(model), fails_(fails) {}
  std::string hook_name() const override { return name_; }
  Slot slot() const override { return Slot::clip; }
  void gradients_ready(const Progress&) override {
    if (fails_) throw std::runtime_error("the hook fails");
    const torch::NoGradGuard no_grad;
    for (const Tensor& parameter : model_->parameters()) parameter.mutable_grad().mul_(0.5);
  }

 private:
  std::string name_;
  torch::nn::Linear model_;
  const bool& fails_;
};

struct Run {
  explicit Run(std::shared_ptr<Communicator> world = Communicator::alone(at::kCPU))
      : session(model, optimizer, std::move(world)) {
    const torch::NoGradGuard no_grad;
    for (const Tensor& parameter : model->parameters()) parameter.fill_(0.5);
  }
  void backward() {
    auto [x] = session.begin(torch::ones({4, 3}));
    session.backward(model->forward(x).square().mean());
  }

  torch::nn::Linear model{3, 2};
  FailingSgd optimizer{model->parameters(), torch::optim::SGDOptions(0.5)};
  Session session;
};

std::vector<Tensor> trained(bool optimizer_fails, bool hook_fails) {
  bool fails = false;
  const bool never = false;
  Run run;
  run.session.use(Halve("first", run.model, never));
  run.session.use(Halve("second", run.model, fails));
  for (int step = 0; step < 3; ++step) {
    run.backward();
    if (step == 1) {
      run.optimizer.fails = optimizer_fails;
      fails = hook_fails;
      if (optimizer_fails || hook_fails) CHECK(message_of([&] { run.session.step(); }) != "");
      fails = false;
    }
    CHECK(run.session.step());
  }
  run.session.finish();
  return run.model->parameters();
}

}  // namespace

TEST_CASE("hooks make gradients ready once, however often a step is tried", "[session]") {
  const std::vector<Tensor> expected = trained(false, false);
  for (const auto& [optimizer_fails, hook_fails] : {std::pair{true, false}, {false, true}}) {
    const std::vector<Tensor> found = trained(optimizer_fails, hook_fails);
    for (size_t i = 0; i < expected.size(); ++i) CHECK(found[i].equal(expected[i]));
  }
}

TEST_CASE("a step that failed on one of several ranks is not taken again", "[session][data_parallel]") {
  const auto ranks = Communicator::in_process(2, CommunicatorOptions().timeout(std::chrono::minutes(1)));
  std::vector<std::string> again(2);
  const auto messages = run_ranks(2, [&](int rank) {
    Run run(ranks[static_cast<size_t>(rank)]);
    run.backward();
    run.optimizer.fails = rank == 1;
    const std::string first = message_of([&] { run.session.step(); });
    RANK_REQUIRE((first == "no memory is left") == (rank == 1));
    if (rank == 1) again[1] = message_of([&] { run.session.step(); });
    if (rank == 0) {
      again[0] = message_of([&] {
        run.backward();
        run.session.step();
      });
    }
  });
  CHECK(first_of(messages) == "");
  for (const std::string& message : again) {
    INFO(message);
    CHECK(message.find("its step failed: no memory is left") != std::string::npos);
  }
}

}  // namespace pacer::testing
