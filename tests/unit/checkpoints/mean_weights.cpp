// load_mean_weights beside means in fp64 of the weights that a run had.
#include <pacer/checkpoints/mean_weights.h>

#include <torch/nn/modules/linear.h>

#include "support/catch.h"
#include "support/message_of.h"
#include "support/session/small_run.h"
#include "support/temporary_folder.h"

namespace pacer::testing::mean_weights {
namespace {

using Catch::Matchers::ContainsSubstring;

NamedTensors values_of(const torch::nn::Module& model) {
  NamedTensors values;
  for (const auto& [name, tensor] : detail::model_tensors(model)) values[name] = tensor.detach().clone();
  return values;
}

// A run of five steps with a checkpoint of each; what the model had after each.
std::vector<NamedTensors> run_in(const std::string& folder, const RegisteredOptimizer& form) {
  SmallRun run(form, {});
  run.session->use(Checkpoints(CheckpointsOptions(folder).every(1).keep(5)));
  std::vector<NamedTensors> after;
  for (int step = 0; step < 5; ++step) {
    run.step();
    after.push_back(values_of(*run.model));
  }
  run.finish();
  return after;
}

}  // namespace

TEST_CASE("a model gets the mean of the weights of a run's last checkpoints", "[load_weights][average]") {
  int compared = 0;
  for (const RegisteredOptimizer& form : all_optimizers()) {
    if (form.has_ranks || (form.dtype != at::kFloat && form.dtype != at::kBFloat16) || compared == 6)
      continue;
    CAPTURE(form.name);
    ++compared;
    const TemporaryFolder folder;
    const std::vector<NamedTensors> after = run_in(folder.path(), form);
    SmallModel model = small_model();
    model->to(form.dtype);
    CHECK(load_mean_weights(*model, folder.path(), 3) == std::vector<int64_t>{3, 4, 5});
    for (const auto& item : model->named_parameters()) {
      const std::string& name = item.key();
      const Tensor exact = (after[2].at(name).to(at::kDouble) + after[3].at(name).to(at::kDouble) +
                            after[4].at(name).to(at::kDouble)) /
                           3;
      CAPTURE(name);
      // Three roundings of fp32, and one to the parameter's dtype.
      const double bound = form.dtype == at::kFloat ? 4e-7 : 4e-3;
      CHECK(torch::allclose(item.value().detach().to(at::kDouble), exact, bound, bound * 1e-3));
      CHECK(item.value().requires_grad());
    }
    for (const auto& item : model->named_buffers()) CHECK(same_bits(item.value(), after[4].at(item.key())));
    CHECK(load_mean_weights(*model, folder.path(), 1) == std::vector<int64_t>{5});
    CHECK(first_difference(values_of(*model), after[4]) == "");
  }
  CHECK(compared == 6);
}

TEST_CASE("a mean of checkpoints that cannot be is refused and changes nothing",
          "[load_weights][average][mistakes]") {
  const TemporaryFolder folder;
  (void)run_in(folder.path(), all_optimizers().front());
  SmallModel model = small_model();
  const NamedTensors before = values_of(*model);
  const auto message = [&](torch::nn::Module& into, const std::string& path, int64_t count) {
    return message_of([&] { (void)load_mean_weights(into, path, count); });
  };
  CHECK_THAT(message(*model, folder.path(), 0), ContainsSubstring("at least 1 checkpoint, not of 0"));
  CHECK_THAT(message(*model, folder.path("nowhere"), 1), ContainsSubstring("there is no folder"));
  CHECK_THAT(message(*model, folder.path(), 6), ContainsSubstring("has 5 checkpoints that verify"));
  torch::nn::Linear other(2, 2);
  const NamedTensors of_other = values_of(*other);
  CHECK(message(*other, folder.path(), 2) != "");
  CHECK(first_difference(values_of(*other), of_other) == "");
  // What is damaged does not count.
  std::string damaged = content_of(folder.path("step-0000000004") + "/model.safetensors");
  damaged.back() ^= 1;
  put_content(folder.path("step-0000000004") + "/model.safetensors", damaged);
  const CapturedStderr captured;
  CHECK_THAT(message(*model, folder.path(), 5), ContainsSubstring("has 4 checkpoints that verify"));
  CHECK(first_difference(values_of(*model), before) == "");
  CHECK(load_mean_weights(*model, folder.path(), 2) == std::vector<int64_t>{3, 5});
}

}  // namespace pacer::testing::mean_weights
