// Gradients between the step of a Pipeline and that of its Session: each rank has those of a stage, so that a norm
// of them is not the model's.
#include <functional>
#include <string>
#include <vector>

#include <torch/nn/utils/clip_grad.h>

#include <pacer/pacer.h>

#include "support/catch.h"
#include "support/message_of.h"
#include "support/parallel/pipeline_runs.h"

namespace pacer::testing::pipelines {
namespace {

// Those that are here, in the order of the model.
std::vector<Tensor> with_gradients(const LanguageModel& model) {
  std::vector<Tensor> found;
  for (const Tensor& parameter : model->parameters()) {
    if (parameter.grad().defined()) found.push_back(parameter);
  }
  return found;
}

void touch_all(LanguageModel& model) {
  const std::vector<Tensor> parameters = with_gradients(model);
  require<Error>(!parameters.empty(), "no rank of this pipeline is without gradients");
  const std::vector<std::function<void(const Tensor&)>> lines = {
      [&](const Tensor&) { torch::nn::utils::clip_grad_norm_(parameters, 0.01); },
      [](const Tensor& parameter) { parameter.grad().mul_(2); },
      [](const Tensor& parameter) { (void)parameter.grad().clone(); },
      [](const Tensor& parameter) { (void)parameter.grad().norm().item<double>(); },
  };
  for (const Tensor& parameter : {parameters.front(), parameters.back()}) {
    for (const auto& line : lines) {
      const std::string message = message_of([&] { line(parameter); });
      for (const char* part : {"the gradient of parameter ", "GradientClipping", "gradients_ready"}) {
        require<Error>(message.find(part) != std::string::npos, "no \"", part, "\" in: ", message);
      }
    }
  }
}

}  // namespace

TEST_CASE("the gradients of a pipeline are not touched before the Session's step, which goes on without harm",
          "[pipeline][gradients]") {
  for (const bool is_tied : {false, true}) {
    for (const int replicas : {1, 2}) {
      CAPTURE(is_tied, replicas);
      Setup setup;
      setup.is_tied = is_tied;
      if (is_tied) setup.options.last({"norm", "embedding"});
      setup.steps = 2;
      const Result untouched = run_piped(setup, one_f_one_b(4), 2, replicas);
      setup.between = touch_all;
      require_same(untouched, run_piped(setup, one_f_one_b(4), 2, replicas));
    }
  }
}

TEST_CASE("a gradient of a pipeline that is cleared or replaced before the Session's step is refused by name",
          "[pipeline][gradients]") {
  const std::vector<std::function<void(LanguageModel&)>> lines = {
      [](LanguageModel& model) { model->zero_grad(); },
      [](LanguageModel& model) {
        for (Tensor& parameter : with_gradients(model)) parameter.mutable_grad() = at::ones_like(parameter);
      }};
  for (size_t i = 0; i < lines.size(); ++i) {
    CAPTURE(i);
    const auto worlds = Communicator::in_process(2, CommunicatorOptions().timeout(std::chrono::seconds(60)));
    std::vector<LanguageModel> models;
    for (int rank = 0; rank < 2; ++rank) models.push_back(make_model(Setup()));
    const auto messages = run_ranks(2, [&](int rank) {
      const auto at = static_cast<size_t>(rank);
      PipelineRank own(Setup(), one_f_one_b(4), 2, worlds[at], models[at]);
      const auto [x, y] = own.batch(0);
      own.pass(x, y);
      lines[i](own.model);
      own.session->step();
    });
    for (const std::string& message : messages) {
      CHECK(message.find("parameter ") != std::string::npos);
      CHECK(message.find(i == 0 ? "was cleared" : "was given a gradient of its own") != std::string::npos);
    }
  }
}

TEST_CASE("the gradients of a pipeline are there again where its Session ends before its step",
          "[pipeline][gradients]") {
  const auto worlds = Communicator::in_process(2);
  std::vector<LanguageModel> models;
  for (int rank = 0; rank < 2; ++rank) models.push_back(make_model(Setup()));
  const auto messages = run_ranks(2, [&](int rank) {
    const auto at = static_cast<size_t>(rank);
    {
      PipelineRank own(Setup(), one_f_one_b(4), 2, worlds[at], models[at]);
      const auto [x, y] = own.batch(0);
      own.pass(x, y);
    }
    for (const Tensor& parameter : with_gradients(models[at])) {
      require<Error>(parameter.grad().isfinite().all().item<bool>(), "a gradient that is no number");
    }
  });
  CHECK(first_of(messages) == "");
}

}  // namespace pacer::testing::pipelines
