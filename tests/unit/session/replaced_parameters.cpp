// Parameters that are replaced while a Session trains: in module and optimizer, as in densification and
// pruning, in one of the two alone, or with the whole model.
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>

#include "support/captured_stderr.h"
#include "support/catch.h"
#include "support/optimizers/optimizers.h"
#include "support/session/mistakes.h"
#include "support/temporary_folder.h"

#include <pacer/pacer.h>

namespace pacer::testing {
namespace {

using torch::optim::AdamParamState;

// Points with a mean and an opacity each, whose number changes.
struct CloudImpl : torch::nn::Module {
  explicit CloudImpl(int64_t points) {
    register_parameter("means", torch::linspace(-1, 1, points * 3).view({points, 3}));
    register_parameter("opacities", torch::linspace(0, 1, points));
  }
  const Tensor& get(const std::string& name) { return parameters_[name]; }
  void replace(const std::string& name, const Tensor& value) { parameters_[name] = value; }
  Tensor loss() {
    return (get("means").sum(1) * get("opacities")).square().mean() + get("means").square().sum();
  }
};
TORCH_MODULE(Cloud);

// What a program does with a parameter's rows: those of `kept`, then as many new ones as there are `more`.
void select_rows(Cloud& cloud, torch::optim::Optimizer& optimizer, size_t group, const std::string& name,
                 const Tensor& kept, int64_t more) {
  const torch::NoGradGuard no_grad;
  const Tensor old = cloud->get(name);
  const auto extended = [&](const Tensor& values) {
    std::vector<int64_t> shape = values.sizes().vec();
    shape[0] = more;
    return torch::cat({values.index_select(0, kept), torch::zeros(shape)});
  };
  const Tensor now = extended(old).requires_grad_();
  auto& states = optimizer.state();
  auto state = std::move(states[old.unsafeGetTensorImpl()]);
  states.erase(old.unsafeGetTensorImpl());
  auto& adam = static_cast<AdamParamState&>(*state);
  adam.exp_avg(extended(adam.exp_avg()));
  adam.exp_avg_sq(extended(adam.exp_avg_sq()));
  states[now.unsafeGetTensorImpl()] = std::move(state);
  optimizer.param_groups()[group].params()[0] = now;
  cloud->replace(name, now);
}

std::unique_ptr<torch::optim::Optimizer> make_optimizer(Cloud& cloud, bool fused, bool named) {
  if (!fused) {
    return std::make_unique<torch::optim::Adam>(
        std::vector<torch::optim::OptimizerParamGroup>{{{cloud->get("means")}}, {{cloud->get("opacities")}}},
        torch::optim::AdamOptions(0.01));
  }
  if (!named) {
    return std::make_unique<FusedAdam>(
        std::vector<torch::optim::OptimizerParamGroup>{{{cloud->get("means")}}, {{cloud->get("opacities")}}},
        FusedAdamOptions(0.01));
  }
  std::vector<NamedParamGroup> groups;
  for (const char* name : {"means", "opacities"}) {
    NamedParameters of_group;
    of_group.insert(name, cloud->get(name));
    groups.emplace_back(of_group);
  }
  return std::make_unique<FusedAdam>(groups, FusedAdamOptions(0.01));
}

// Steps `from` ... `to` - 1, with more points after every second step and fewer after every third.
void train(Session& session, Cloud& cloud, torch::optim::Optimizer& optimizer, int from, int to) {
  for (int step = from; step < to; ++step) {
    (void)session.begin(torch::zeros({1}));
    session.backward(cloud->loss());
    session.step();
    const int64_t points = cloud->get("means").size(0);
    const bool grows = step % 2 == 1, shrinks = step % 3 == 2;
    if (!grows && !shrinks) continue;
    const Tensor kept = torch::arange(shrinks ? points - 1 : points);
    select_rows(cloud, optimizer, 0, "means", kept, grows ? 2 : 0);
    select_rows(cloud, optimizer, 1, "opacities", kept, grows ? 2 : 0);
  }
}

std::map<std::string, Tensor> cloud_after(bool fused, bool named, bool interrupted) {
  const TemporaryFolder folder;
  const CapturedStderr quiet;
  const auto options = CheckpointsOptions(folder.path("c")).every(100);
  int64_t points = 5;
  if (interrupted) {
    Cloud cloud(points);
    const auto optimizer = make_optimizer(cloud, fused, named);
    auto checkpoints = std::make_shared<Checkpoints>(options);
    Session session(cloud, *optimizer);
    session.use(checkpoints);
    train(session, cloud, *optimizer, 0, 7);
    checkpoints->save_now();
    points = cloud->get("means").size(0);
    session.finish();
  }
  Cloud cloud(points);
  const auto optimizer = make_optimizer(cloud, fused, named);
  Session session(cloud, *optimizer);
  session.use(Checkpoints(options));
  REQUIRE(session.resume().value_or(0) == (interrupted ? 7 : 0));
  train(session, cloud, *optimizer, interrupted ? 7 : 0, 14);
  session.finish();
  return {{"means", cloud->get("means").detach()}, {"opacities", cloud->get("opacities").detach()}};
}

struct TwoLayersImpl : torch::nn::Module {
  torch::nn::Linear a = register_module("a", torch::nn::Linear(3, 3));
  torch::nn::Linear b = register_module("b", torch::nn::Linear(3, 2));
  Tensor forward(Tensor x) { return b(torch::relu(a(x))); }
};
TORCH_MODULE(TwoLayers);

struct Loop {
  TwoLayers model;
  FusedAdamW optimizer{model->parameters(), FusedAdamWOptions(0.1)};
  Session session{model, optimizer};

  void steps(int count) {
    for (int step = 0; step < count; ++step) {
      auto [x] = session.begin(torch::ones({4, 3}));
      session.backward(model->forward(x).square().mean());
      session.step();
    }
  }
};

}  // namespace

TEST_CASE("a program that adds and removes points resumes, with FusedAdam as with torch's Adam", "[resume]") {
  const auto wanted = cloud_after(/*fused=*/false, /*named=*/false, /*interrupted=*/false);
  for (const bool interrupted : {false, true}) {
    for (const bool fused : {false, true}) {
      for (const bool named : {false, true}) {
        if (named && !fused) continue;
        CAPTURE(fused, named, interrupted);
        const auto found = cloud_after(fused, named, interrupted);
        for (const char* name : {"means", "opacities"}) {
          CHECK((found.at(name) - wanted.at(name)).abs().max().item<double>() <= 2e-6);
        }
      }
    }
  }
}

TEST_CASE("a new tensor never has the name of one that is gone", "[names]") {
  Cloud cloud(4);
  const auto optimizer = make_optimizer(cloud, /*fused=*/true, /*named=*/true);
  auto& own = dynamic_cast<FusedAdam&>(*optimizer);
  int wrong = 0;
  for (int round = 0; round < 1000; ++round) {
    // The tensor of one group takes the place of the other's, which has just gone.
    for (size_t g = 0; g < 2; ++g) optimizer->param_groups()[g].params()[0] = Tensor();
    for (const char* name : {"means", "opacities"}) cloud->replace(name, Tensor());
    for (const size_t g : round % 2 ? std::vector<size_t>{0, 1} : std::vector<size_t>{1, 0}) {
      const std::string name = g == 0 ? "means" : "opacities";
      const Tensor now = torch::ones({4}).requires_grad_();
      cloud->replace(name, now);
      optimizer->param_groups()[g].params()[0] = now;
    }
    for (size_t g = 0; g < 2; ++g) {
      const std::string unnamed = own.parameter_name(optimizer->param_groups()[g].params()[0]);
      wrong += unnamed != std::to_string(g) + ".0";
    }
    own.name_parameters(cloud->named_parameters());
    wrong += own.parameter_name(cloud->get("means")) != "means";
    wrong += own.parameter_name(cloud->get("opacities")) != "opacities";
  }
  CHECK(wrong == 0);
}

TEST_CASE("a parameter replaced in the model alone, or in the optimizer alone, is noticed", "[mistakes]") {
  const std::vector<Mistake> mistakes = {
      {"a layer replaced",
       {"parameter b.weight of the model, of shape [2, 3], is not the optimizer's", "one of shape [2, 3]",
        "replaced in one of the two", "put the new tensor into both"},
       [] {
         Loop loop;
         loop.steps(2);
         loop.model->b = loop.model->replace_module("b", torch::nn::Linear(3, 2));
         loop.steps(1);
       }},
      {"a layer replaced within a window",
       {"parameter b.weight of the model", "replaced in one of the two"},
       [] {
         TwoLayers model;
         FusedAdamW optimizer(model->parameters());
         Session session(model, optimizer);
         session.use(GradientAccumulation(2));
         for (int pass = 0; pass < 4; ++pass) {
           if (pass == 1) model->b = model->replace_module("b", torch::nn::Linear(3, 2));
           auto [x] = session.begin(torch::ones({4, 3}));
           session.backward(model->forward(x).square().mean());
           session.step();
         }
       }},
      {"a layer added",
       {"2 parameters of the model need a gradient, but no group of the optimizer has them", "c.weight"},
       [] {
         Loop loop;
         loop.steps(2);
         loop.model->register_module("c", torch::nn::Linear(3, 2));
         loop.steps(1);
       }},
      {"a parameter replaced in the optimizer",
       {"parameter a.weight of the model, of shape [3, 3], is not the optimizer's",
        "put the new tensor into both"},
       [] {
         Loop loop;
         loop.steps(2);
         auto& parameters = loop.optimizer.param_groups()[0].params();
         parameters[0] = parameters[0].detach().clone().requires_grad_();
         loop.steps(1);
       }},
      {"a parameter put into the optimizer",
       {"1 parameters that are not the model's", "checkpoints do not hold their values"},
       [] {
         Loop loop;
         loop.steps(2);
         loop.optimizer.add_param_group(
             torch::optim::OptimizerParamGroup({torch::ones({2}).requires_grad_()}));
         loop.steps(1);
       }},
      {"a layer taken out",
       {"2 parameters that are not the model's"},
       [] {
         Loop loop;
         loop.steps(2);
         loop.model->unregister_module("b");
         loop.steps(1);
       }},
  };
  CHECK(faults_of(mistakes) == "");
}

TEST_CASE("what is so from the start is said once", "[mistakes]") {
  const CapturedStderr output;
  TwoLayers model;
  FusedAdamW optimizer(model->a->parameters());
  Session session(model, optimizer);
  for (int step = 0; step < 3; ++step) {
    auto [x] = session.begin(torch::ones({4, 3}));
    session.backward(model->forward(x).square().mean());
    session.step();
    if (step == 1) model->a->bias.requires_grad_(false);
  }
  session.finish();
  const std::string text = output.text();
  const size_t first = text.find("need a gradient");
  CHECK(first != std::string::npos);
  CHECK(text.find("need a gradient", first + 1) == std::string::npos);
}

TEST_CASE("a model whose holder is given another one lives on in its Session", "[session]") {
  TwoLayers model;
  FusedAdamW optimizer(model->parameters());
  auto session = std::make_unique<Session>(model, optimizer);
  const auto pass = [&] {
    auto [x] = session->begin(torch::ones({4, 3}));
    session->backward(model->forward(x).square().mean());
    session->step();
  };
  pass();
  const std::weak_ptr<TwoLayersImpl> first = model.ptr();
  model = TwoLayers();
  CHECK_FALSE(first.expired());
  const std::string message = refusal(pass);
  CHECK(contains(message, "no parameter of the optimizer has a gradient"));
  CHECK(contains(message, "made anew"));
  session.reset();
  CHECK(first.expired());
}

TEST_CASE("a Session takes a model in a shared_ptr, and keeps it", "[session]") {
  auto model = std::make_shared<TwoLayersImpl>();
  FusedAdamW optimizer(model->parameters());
  const std::weak_ptr<TwoLayersImpl> held = model;
  auto session = std::make_unique<Session>(model, optimizer, Communicator::alone(at::kCPU));
  auto [x] = session->begin(torch::ones({4, 3}));
  session->backward(model->forward(x).square().mean());
  CHECK(session->step());
  model.reset();
  CHECK_FALSE(held.expired());
  session.reset();
  CHECK(held.expired());
  CHECK(contains(refusal([&] { Session(model, optimizer); }), "an empty shared_ptr"));
}

}  // namespace pacer::testing
