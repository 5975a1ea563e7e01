// What GradientRelease does not go with, each in one sentence and before anything is changed; steps that fail half way,
// which say so; and the memory that training_memory counts.
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/embedding.h>
#include <torch/optim/adamw.h>

#include <pacer/modules/embedding.h>

#include "support/catch.h"
#include "support/collectives/ranks.h"
#include "support/cpu_memory.h"
#include "support/message_of.h"
#include "support/session/mistakes_trainer.h"

namespace pacer::testing {
namespace {

// One step with that optimizer and a released gradient.
template <class Optimizer, class Options, class Change>
Mistake with_optimizer(std::string name, std::vector<std::string> says, Options options, Change change) {
  return {std::move(name), std::move(says), [=] {
            torch::nn::Linear model(4, 4);
            Optimizer optimizer(model->parameters(), options);
            change(optimizer, model);
            const Tensor before = model->weight.detach().clone();
            Session session(model, optimizer);
            session.use(GradientRelease());
            try {
              auto [x] = session.begin(torch::ones({2, 4}));
              session.backward(model->forward(x).square().mean());
            } catch (...) {
              REQUIRE(model->weight.equal(before));
              throw;
            }
          }};
}
template <class Optimizer, class Options>
Mistake with_optimizer(std::string name, std::vector<std::string> says, Options options) {
  return with_optimizer<Optimizer>(std::move(name), std::move(says), options, [](auto&, auto&) {});
}

struct TwoWeightsImpl : torch::nn::Module {
  TwoWeightsImpl()
      : first(register_parameter("first", torch::full({3}, 0.5))),
        second(register_parameter("second", torch::full({3}, 0.25))) {}
  Tensor first, second;
};
TORCH_MODULE(TwoWeights);

struct Releasing {
  Releasing() { session.use(GradientRelease()); }
  // The gradient of the second weight comes first, because its product is made last.
  void backward(const std::function<void(const Tensor&)>& between) {
    auto [x] = session.begin(torch::ones({3}));
    const Tensor of_first = x * model->first;
    of_first.register_hook([between](const Tensor& gradient) {
      between(gradient);
      return gradient;
    });
    session.backward((of_first.detach() * model->second).sum() + of_first.sum());
  }
  int64_t count(const char* name) const {
    const NamedTensors state = optimizer.export_state();
    const auto found = state.find(std::string(name) + "/step");
    return found == state.end() ? 0 : found->second.item<int64_t>();
  }

  TwoWeights model;
  FusedAdamW optimizer{model->named_parameters(), FusedAdamWOptions(0.1)};
  Session session{*model, optimizer};
};

}  // namespace

TEST_CASE("GradientRelease is refused where it cannot be, in one sentence", "[release][session][mistakes]") {
  const auto nothing = [](auto&, auto&) {};
  const std::string faults = faults_of({
      with_optimizer<torch::optim::AdamW>("an optimizer of torch's",
                                          {"only optimizers of pacer", "FusedAdamW"},
                                          torch::optim::AdamWOptions(0.1), nothing),
      with_optimizer<FusedLamb>("LAMB", {"LAMB's ratios", "use FusedAdamW"}, FusedLambOptions(0.1)),
      with_optimizer<FusedAdamW>("finite_check", {"finite_check", "leave that option out"},
                                 FusedAdamWOptions(0.1).finite_check(true)),
      with_optimizer<FusedAdamW>("paged state", {"its state is paged", "leave out paged()"},
                                 FusedAdamWOptions(0.1).paged(Paging())),
      with_optimizer<FusedAdamW>("a norm of the optimizer's own",
                                 {"clip_gradient_norm", "leave that call out"}, FusedAdamWOptions(0.1),
                                 [](FusedAdamW& optimizer, auto&) { optimizer.clip_gradient_norm(1); }),
      with_optimizer<FusedAdamW>("visible rows", {"set_visible_rows", "undefined tensor"},
                                 FusedAdamWOptions(0.1),
                                 [](FusedAdamW& optimizer, auto& model) {
                                   optimizer.set_visible_rows({model->weight}, torch::ones({4}, at::kBool));
                                 }),
      {"Muon",
       {"orthogonalises all matrices", "use FusedAdamW"},
       [] {
         torch::nn::Linear model(torch::nn::LinearOptions(4, 4).bias(false));
         Muon optimizer(model->parameters(), MuonOptions(0.1));
         Session(model, optimizer).use(GradientRelease());
       }},
      {"1-bit Adam",
       {"compress the momentum", "use FusedAdamW"},
       [] {
         torch::nn::Linear model(4, 4);
         const auto world = Communicator::alone(at::kCPU);
         OneBitAdam optimizer(model->parameters(), OneBitAdamOptions(0.1).freeze_step(5), world);
         Session(model, optimizer, world).use(GradientRelease());
       }},
      {"sparse gradients",
       {"sparse gradients of words", "sparse(false)"},
       [] {
         torch::nn::Sequential model;
         model->push_back("words", torch::nn::Embedding(torch::nn::EmbeddingOptions(5, 4).sparse(true)));
         FusedAdamW optimizer(model->parameters(), FusedAdamWOptions(0.1));
         Session session(*model, optimizer);
         session.use(GradientRelease());
         (void)session.begin(torch::zeros({2}, at::kLong));
       }},
      {"sparse gradients of pacer's embedding",
       {"sparse gradients of words", "sparse(false)"},
       [] {
         torch::nn::Sequential model;
         model->push_back("words", modules::Embedding(torch::nn::EmbeddingOptions(5, 4).sparse(true)));
         FusedAdamW optimizer(model->parameters(), FusedAdamWOptions(0.1));
         Session session(*model, optimizer);
         session.use(GradientRelease());
         (void)session.begin(torch::zeros({2}, at::kLong));
       }},
      with_trainer("twice", {"already has the hook gradient_release"},
                   [](Trainer& t) { t.session.use(GradientRelease()).use(GradientRelease()); }),
      with_trainer("prewarm", {"prewarm with GradientRelease", "leave prewarm out"},
                   [](Trainer& t) {
                     t.session.use(GradientRelease());
                     t.session.prewarm([&] { return t.model->forward(t.inputs).square().mean(); });
                   }),
      with_trainer("options that change later", {"finite_check", "leave that option out"},
                   [](Trainer& t) {
                     t.session.use(GradientRelease());
                     t.micro_step();
                     auto& options = t.optimizer.param_groups()[0].options();
                     static_cast<FusedAdamWOptions&>(options).finite_check(true);
                     t.micro_step();
                   }),
      with_trainer("a backward that is not the Session's", {"from a backward() that is not this Session's"},
                   [](Trainer& t) {
                     t.session.use(GradientRelease());
                     const Tensor loss = t.forward();
                     t.session.backward(loss, BackwardOptions().retain_graph(true));
                     t.model->forward(t.inputs).sum().backward();
                     t.session.step();
                   }),
      with_trainer("a step without gradients", {"no parameter of the optimizer has a gradient"},
                   [](Trainer& t) {
                     t.session.use(GradientRelease());
                     (void)t.forward();
                     t.session.backward(torch::ones({1}).requires_grad_().sum());
                     t.session.step();
                   }),
  });
  CHECK(faults == "");
}

TEST_CASE("GradientRelease is refused on several ranks", "[release][session][mistakes]") {
  const Ranks ranks = Communicator::in_process(2);
  const auto messages = run_ranks(2, [&](int rank) {
    torch::nn::Linear model(3, 2);
    FusedAdamW optimizer(model->parameters(), FusedAdamWOptions(0.1));
    Session session(model, optimizer, ranks[static_cast<size_t>(rank)]);
    session.use(GradientRelease());
  });
  for (const std::string& message : messages) CHECK(contains(message, "2 ranks train together; use Shards"));
}

TEST_CASE("a backward that fails with released gradients says which parameters have taken the step",
          "[release][session]") {
  Releasing run;
  const Tensor first = run.model->first.detach().clone(), second = run.model->second.detach().clone();
  const auto fail = [](const Tensor&) { throw std::runtime_error("no memory is left"); };
  const std::string message = message_of<Error>([&] { run.backward(fail); });
  CHECK(contains(message, "had updated 1 of 2 parameters, which have taken step 1"));
  CHECK(contains(message, "no memory is left"));
  CHECK(run.model->first.equal(first));
  CHECK_FALSE(run.model->second.equal(second));
  CHECK(run.count("first") == 0);
  CHECK(run.count("second") == 1);
  CHECK(run.session.progress().step == 0);
  CHECK_FALSE(run.model->second.grad().defined());

  // Training may go on, each parameter at its own count.
  run.backward([](const Tensor&) {});
  run.session.step();
  CHECK(run.count("first") == 1);
  CHECK(run.count("second") == 2);
  CHECK(run.session.progress().step == 1);
}

TEST_CASE("a backward that fails before the first released gradient has changed nothing",
          "[release][session]") {
  Releasing run;
  const Tensor second = run.model->second.detach().clone();
  auto [x] = run.session.begin(torch::ones({3}));
  const Tensor loss = (x * run.model->second).sum();
  loss.register_hook([](const Tensor&) -> Tensor { throw std::runtime_error("no memory is left"); });
  const std::string message = message_of([&, loss = loss] { run.session.backward(loss); });
  CHECK(contains(message, "no memory is left"));
  CHECK_FALSE(contains(message, "GradientRelease"));
  CHECK(run.model->second.equal(second));
  CHECK(run.count("second") == 0);
}

TEST_CASE("a released parameter whose value backward still needs, or that has another gradient, is an error",
          "[release][session]") {
  Releasing run;
  SECTION("its value") {
    auto [x] = run.session.begin(torch::ones({3}));
    const Tensor needs_second =
        run.model->first * run.model->second.detach();  // made first, so it comes last
    const Tensor loss = needs_second.sum() + (x * run.model->second).sum();
    const std::string message = message_of<Error>([&] { run.session.backward(loss); });
    CHECK(contains(message, "had updated 1 of 2 parameters"));
    CHECK(contains(message, "modified by an inplace operation"));
  }
  SECTION("another gradient") {
    const std::string message = message_of<Error>([&] {
      run.backward([&](const Tensor&) {
        const at::AutoGradMode with_grad(true);
        (run.model->second * 2).sum().backward();
      });
    });
    INFO(message);
    CHECK(contains(message, "received a second gradient in one backward pass"));
  }
  CHECK(run.session.progress().step == 0);
}

TEST_CASE("memory with released gradients is asked for one rank and a largest gradient", "[release]") {
  const TrainingMemoryOptions options(1000);
  CHECK(training_memory(TrainingMemoryOptions(options).largest_released(10)).gradients == 40);
  CHECK(training_memory(options).gradients == 4000);
  for (const auto& wrong : {TrainingMemoryOptions(options).largest_released(-1),
                            TrainingMemoryOptions(options).largest_released(1001),
                            TrainingMemoryOptions(options).largest_released(10).ranks(2),
                            TrainingMemoryOptions(options).largest_released(10).accumulates_in_fp32(true),
                            TrainingMemoryOptions(options).largest_released(10).orthogonalized(5)}) {
    CHECK(contains(message_of<InvalidArgument>([&] { (void)training_memory(wrong); }), "released gradient"));
  }
}

TEST_CASE("training with released gradients takes the memory that training_memory says",
          "[release][session]") {
  constexpr int64_t kWide = 256, kLayers = 24, kLayer = kWide * kWide;
  const CountedCpuMemory memory;
  const int64_t before = CountedCpuMemory::live();
  torch::nn::Sequential model;
  for (int64_t i = 0; i < kLayers; ++i) {
    model->push_back(torch::nn::Linear(torch::nn::LinearOptions(kWide, kWide).bias(false)));
  }
  FusedAdamW optimizer(model->parameters(), FusedAdamWOptions(0.001));
  Session session(*model, optimizer);
  session.use(GradientRelease());
  const auto step = [&] {
    auto [x] = session.begin(torch::ones({1, kWide}));
    session.backward(model->forward(x).square().mean());
    session.step();
  };
  step();
  CountedCpuMemory::reset_peak();
  step();
  const int64_t found = CountedCpuMemory::peak() - before;
  const TrainingMemory plan =
      training_memory(TrainingMemoryOptions(kLayers * kLayer).largest_released(kLayer));
  CHECK(plan.gradients == kLayer * 4);
  CAPTURE(found, plan.total());
  CHECK(found > plan.total());
  CHECK(found < plan.total() + 2 * kLayer * 4);
}

}  // namespace pacer::testing
