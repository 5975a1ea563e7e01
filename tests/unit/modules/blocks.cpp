// Blocks and the hooks around them: names, calls, recomputation and layer dropping in a Session against plain
// training, in any order of use, and what is refused.
#include <functional>
#include <string>
#include <tuple>

#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>

#include <pacer/hooks/gradient_accumulation.h>
#include <pacer/hooks/gradient_clipping.h>
#include <pacer/hooks/precision.h>
#include <pacer/hooks/recompute.h>
#include <pacer/hooks/step_report.h>
#include <pacer/modules/blocks.h>
#include <pacer/modules/recompute.h>
#include <pacer/schedulers/layer_drop_sequential.h>
#include <pacer/session/session.h>

#include "support/catch.h"
#include "support/session/mistakes.h"
#include "support/session/small_model.h"

namespace pacer::testing {
namespace {

constexpr int64_t kDepth = 4;

struct ResidualImpl : torch::nn::Module {
  explicit ResidualImpl(double dropout)
      : linear(register_module("linear", torch::nn::Linear(kWidth, kWidth))),
        drop(register_module("drop", torch::nn::Dropout(dropout))) {}
  Tensor forward(const Tensor& x) {
    ++runs;
    return x + drop(torch::tanh(linear(x)));
  }
  torch::nn::Linear linear;
  torch::nn::Dropout drop;
  int64_t runs = 0;
};
TORCH_MODULE(Residual);

struct StackImpl : torch::nn::Module {
  explicit StackImpl(double dropout = 0.2) {
    torch::manual_seed(4);
    register_module("blocks", blocks);
    for (int64_t i = 0; i < kDepth; ++i) blocks->push_back(Residual(dropout));
    head = register_module("head", torch::nn::Linear(kWidth, kWidth));
  }
  Tensor forward(Tensor x) {
    for (size_t i = 0; i < blocks->size(); ++i) x = blocks->run(i, &ResidualImpl::forward, x);
    return head(x);
  }
  int64_t runs(size_t i) { return blocks->at<ResidualImpl>(i).runs; }

  Blocks blocks;
  torch::nn::Linear head = nullptr;
};
TORCH_MODULE(Stack);

// The same with LayerDropSequential.
struct GatedStackImpl : torch::nn::Module {
  GatedStackImpl(double dropout, const LayerDrop& gates) : blocks(gates) {
    torch::manual_seed(4);
    register_module("blocks", blocks);
    for (int64_t i = 0; i < kDepth; ++i) blocks->push_back(Residual(dropout));
    head = register_module("head", torch::nn::Linear(kWidth, kWidth));
  }
  Tensor forward(const Tensor& x) { return head(blocks(x)); }

  LayerDropSequential blocks;
  torch::nn::Linear head = nullptr;
};
TORCH_MODULE(GatedStack);

struct Training {
  std::vector<Tensor> parameters;
  std::vector<double> kept_layers;
};

class KeptLayers : public Hook {
 public:
  explicit KeptLayers(std::vector<double>& kept) : kept_(kept) {}
  std::string hook_name() const override { return "kept_layers_probe"; }
  Slot slot() const override { return Slot::record; }
  void after_step(StepReport& report) override {
    for (const auto& [name, value] : report.numbers()) {
      if (name == "kept_layers") kept_.push_back(value);
    }
  }

 private:
  std::vector<double>& kept_;
};

using Use = std::function<void(Session&)>;

template <class Model>
Training train(Model& model, const Use& use, int64_t steps = 6, bool extras = true) {
  FusedAdamW optimizer(model->named_parameters(), FusedAdamWOptions(1e-2));
  Training training;
  Session session(*model, optimizer);
  if (extras) session.use(GradientAccumulation(2)).use(GradientClipping(0.5));
  session.use(std::make_shared<KeptLayers>(training.kept_layers));
  use(session);
  torch::manual_seed(6);
  for (int64_t i = 0; i < steps * (extras ? 2 : 1); ++i) {
    auto [x] = session.begin(torch::randn({3, kWidth}));
    session.backward(torch::mse_loss(model->forward(x), x.roll(1, 1)));
    session.step();
  }
  session.finish();
  for (const Tensor& parameter : model->parameters())
    training.parameters.push_back(parameter.detach().clone());
  return training;
}

void require_same(const Training& a, const Training& b) {
  REQUIRE(a.parameters.size() == b.parameters.size());
  for (size_t i = 0; i < a.parameters.size(); ++i) {
    CAPTURE(i);
    REQUIRE(a.parameters[i].equal(b.parameters[i]));
  }
  REQUIRE(a.kept_layers == b.kept_layers);
}

LayerDropOptions many_drops() { return LayerDropOptions().theta_bar(0.3).gamma(1).seed(3); }

}  // namespace

TEST_CASE("Blocks is a ModuleList whose blocks are called by their own functions", "[blocks]") {
  Stack model(0.0);
  const auto names = model->named_parameters().keys();
  REQUIRE(names.front() == "blocks.0.linear.weight");
  REQUIRE(names.size() == 2 * kDepth + 2);
  const Tensor x = torch::randn({2, kWidth});
  Tensor wanted = x;
  for (size_t i = 0; i < kDepth; ++i) wanted = model->blocks->at<ResidualImpl>(i).forward(wanted);
  REQUIRE(model->forward(x).equal(model->head(wanted)));
  const auto own = [&, i = size_t{1}](const Tensor& h, double scale) {
    return std::make_pair(model->blocks->at<ResidualImpl>(i).forward(h), h * scale);
  };
  REQUIRE(model->blocks->run(1, own, x, 2.0).second.equal(2 * x));

  SECTION("a clone is a stack of its own, without hooks") {
    Blocks blocks(torch::nn::Linear(3, 3), torch::nn::Linear(3, 3));
    blocks->wrap(WrapperLevel::recompute, nullptr);
    const auto copy = std::dynamic_pointer_cast<BlocksImpl>(blocks->clone());
    REQUIRE(copy != nullptr);
    REQUIRE(copy->size() == 2);
    const Tensor h = torch::ones({1, 3});
    const auto linear = &torch::nn::LinearImpl::forward;
    REQUIRE(copy->run(1, linear, h).equal(blocks->run(1, linear, h)));
    REQUIRE(copy->parameters()[0].data_ptr() != blocks->parameters()[0].data_ptr());
  }
}

TEST_CASE("a Session with Recompute trains as one without, to the bit", "[blocks][session]") {
  Stack plain;
  const Training wanted = train(plain, [](Session&) {});
  REQUIRE(plain->runs(0) == 12);
  const std::vector<std::pair<RecomputeOptions, std::vector<int64_t>>> cases = {
      {RecomputeOptions(), {24, 24, 24, 24}},
      {RecomputeOptions().every(2), {24, 12, 24, 12}},
      {RecomputeOptions().blocks([](size_t i) { return i == 3; }), {12, 12, 12, 24}}};
  for (const auto& [options, runs] : cases) {
    Stack model;
    require_same(wanted, train(model, [&, &chosen = options](Session& session) {
                   session.use(Recompute(model->blocks, chosen));
                 }));
    for (size_t i = 0; i < kDepth; ++i) REQUIRE(model->runs(i) == runs[i]);
  }
  SECTION("under autocast, and with passes for evaluation and prewarm between") {
    for (const bool extras : {false, true}) {
      Stack a, b;
      const auto pass = [&](Stack& model, Session& session) {
        session.use(Precision::bf16());
        session.prewarm([&] { return model->forward(torch::ones({3, kWidth})).square().mean(); });
        session.evaluate([&] { return model->forward(torch::ones({3, kWidth})); });
      };
      const Training plainly = train(
          a, [&](Session& session) { pass(a, session); }, 4, extras);
      require_same(plainly, train(
                                b,
                                [&](Session& session) {
                                  session.use(Recompute(b->blocks));
                                  pass(b, session);
                                },
                                4, extras));
    }
  }
  SECTION("the stack is free again after the Session") {
    Stack model;
    for (int i = 0; i < 2; ++i) {
      train(model, [&](Session& session) { session.use(Recompute(model->blocks)); });
    }
    const auto runs = model->runs(0);
    model->forward(torch::ones({1, kWidth})).sum().backward();
    REQUIRE(model->runs(0) == runs + 1);
  }
}

TEST_CASE("LayerDrop made for Blocks drops what LayerDropSequential drops", "[blocks][layer_drop]") {
  const LayerDrop gates(many_drops());
  GatedStack gated(0.2, gates);
  const Training wanted = train(gated, [&](Session& session) { session.use(gates); });
  Stack model;
  require_same(wanted,
               train(model, [&](Session& session) { session.use(LayerDrop(model->blocks, many_drops())); }));
  const int64_t kept = model->runs(3);
  REQUIRE(kept < 12);

  SECTION("and what is dropped is not recomputed, whatever the order of use") {
    Training found[2];
    for (const bool drop_first : {false, true}) {
      Stack again;
      found[drop_first] = train(again, [&](Session& session) {
        if (drop_first) session.use(LayerDrop(again->blocks, many_drops()));
        session.use(Recompute(again->blocks));
        if (!drop_first) session.use(LayerDrop(again->blocks, many_drops()));
      });
      REQUIRE(again->runs(3) == 2 * kept);
      REQUIRE(found[drop_first].kept_layers == wanted.kept_layers);
    }
    require_same(found[0], found[1]);
    for (size_t i = 0; i < wanted.parameters.size(); ++i) {  // a gate adds two gradients, in another order
      REQUIRE(found[0].parameters[i].allclose(wanted.parameters[i], 1e-4, 1e-4));
    }
  }
  SECTION("in evaluation every block runs") {
    FusedAdamW optimizer(model->parameters(), FusedAdamWOptions(1e-2));
    Session session(*model, optimizer);
    session.use(LayerDrop(model->blocks, many_drops().theta_bar(0.01).gamma(100)));
    const auto before = model->runs(3);
    session.evaluate([&] { return model->forward(torch::ones({1, kWidth})); });
    REQUIRE(model->runs(3) == before + 1);
  }
}

// Two micro-batches are in flight: the gates have moved on when the first one's regions run again.
TEST_CASE("a gate inside a recomputed region decides as in the micro-step of its forward",
          "[blocks][layer_drop]") {
  torch::manual_seed(4);
  Residual block(0.0);
  LayerDrop gates(LayerDropOptions().theta_bar(0.01).gamma(100).seed(1));
  gates->add(*block);
  Progress kept, dropped;
  kept.step = dropped.step = 5;
  const auto keeps = [&](const Progress& progress) {
    gates->set_progress(progress);
    return gates->keeps(0);
  };
  for (kept.step = 0; !keeps(kept); ++kept.step) REQUIRE(kept.step < 1000);
  for (dropped.step = 1; keeps(dropped); ++dropped.step) REQUIRE(dropped.step < 1000);
  const auto gated = [&](const Tensor& x) {
    return gates->gate(0, x, [&](const Tensor& h) { return block(h); });
  };
  const Tensor x = torch::randn({2, kWidth}).requires_grad_();
  const auto gradient = [&](bool again, bool nested) {
    block->zero_grad();
    gates->set_progress(kept);
    const auto region = [&](const Tensor& h) { return recompute(*block, gated, h); };
    const Tensor y = !again ? gated(x) : nested ? recompute(*block, region, x) : region(x);
    gates->set_progress(dropped);
    y.square().sum().backward();
    return block->linear->weight.grad();
  };
  const Tensor wanted = gradient(false, false).clone();
  REQUIRE(wanted.abs().max().item<float>() > 0);
  for (const bool nested : {false, true}) {
    const Tensor found = gradient(true, nested);
    REQUIRE(found.defined());
    REQUIRE(found.equal(wanted));
  }
}

TEST_CASE("blocks of several tensors are dropped tensor by tensor", "[blocks][layer_drop]") {
  LayerDrop gates(LayerDropOptions().theta_bar(0.5).gamma(100).seed(1));
  gates->add();
  const Tensor x = torch::randn({2, 3}), z = torch::randn({4}), mask = torch::ones({2}, torch::kLong);
  const TensorFunction block = [](const Tensors& in) { return Tensors{in[0] + 1, in[1] * 2}; };
  int kept = 0;
  for (Progress progress; progress.step < 20; ++progress.step) {
    gates->set_progress(progress);
    const Tensors y = gates->gate_tensors(0, 2, {x, z, mask}, block);
    REQUIRE(y.size() == 2);
    if (!gates->keeps(0)) {
      REQUIRE(y[0].is_same(x));
      REQUIRE(y[1].is_same(z));
    } else if (progress.step > 0) {
      ++kept;
      REQUIRE(y[0].allclose(x + 2));  // 1 / p is 2
      REQUIRE(y[1].allclose(3 * z));
    }
  }
  REQUIRE(kept > 2);
  REQUIRE(kept < 18);
  CHECK_THROWS_AS(gates->gate_tensors(0, 2, {x}, block), InvalidArgument);
}

TEST_CASE("mistakes with Blocks are told in a sentence", "[blocks][mistakes]") {
  const auto with_session = [](const std::function<void(Stack&, Session&)>& make) {
    return [make] {
      Stack model;
      FusedAdamW optimizer(model->parameters(), FusedAdamWOptions(1e-2));
      Session session(*model, optimizer);
      make(model, session);
    };
  };
  const auto step = [](Session& session, const std::function<Tensor(const Tensor&)>& forward) {
    auto [x] = session.begin(torch::ones({1, kWidth}));
    session.backward(forward(x).sum());
    session.step();
  };
  const auto around = [](Stack& model) {  // forward past Blocks::run
    return [&](Tensor x) {
      for (size_t i = 0; i < kDepth; ++i) x = model->blocks->at<ResidualImpl>(i).forward(x);
      return model->head(x);
    };
  };
  const std::vector<Mistake> mistakes = {
      {"no such block",
       {"4 blocks", "no block 4"},
       [] { Stack()->blocks->run(4, &ResidualImpl::forward, torch::ones({1})); }},
      {"a function of another class",
       {"block 0", "ResidualImpl", "DropoutImpl"},
       [] { Stack()->blocks->run(0, &torch::nn::DropoutImpl::forward, torch::ones({1})); }},
      {"Recompute of no blocks", {"without a block"}, [] { Recompute hook{Blocks()}; }},
      {"LayerDrop for no blocks", {"without a block"}, [] { LayerDrop hook{Blocks()}; }},
      {"Recompute of every 0th block",
       {"every", "at least 1"},
       [] { Recompute(Stack()->blocks, RecomputeOptions().every(0)); }},
      {"Recompute that chooses none", {"no block"}, with_session([](Stack& model, Session& session) {
         session.use(Recompute(model->blocks, RecomputeOptions().blocks([](size_t) { return false; })));
       })},
      {"Recompute of another model",
       {"no part of", "register_module"},
       with_session([](Stack&, Session& session) { session.use(Recompute(Stack()->blocks)); })},
      {"LayerDrop of another model",
       {"no part of", "register_module"},
       with_session([](Stack&, Session& session) { session.use(LayerDrop(Stack()->blocks)); })},
      {"Recompute in two Sessions",
       {"recomputes", "already"},
       with_session([](Stack& model, Session& session) {
         session.use(Recompute(model->blocks));
         FusedAdamW optimizer(model->parameters(), FusedAdamWOptions(1e-2));
         Session second(*model, optimizer);
         second.use(Recompute(model->blocks));
       })},
      {"two LayerDrops of one stack", {"drops", "already"}, with_session([](Stack& model, Session& session) {
         session.use(LayerDrop(model->blocks));
         FusedAdamW optimizer(model->parameters(), FusedAdamWOptions(1e-2));
         Session second(*model, optimizer);
         second.use(LayerDrop(model->blocks));
       })},
      {"Recompute of blocks that are called past it",
       {"blocks->run"},
       with_session([&](Stack& model, Session& session) {
         session.use(Recompute(model->blocks));
         step(session, around(model));
       })},
      {"LayerDrop of blocks that are called past it",
       {"blocks->run"},
       with_session([&](Stack& model, Session& session) {
         session.use(LayerDrop(model->blocks));
         step(session, around(model));
       })},
      {"a block that came after Recompute",
       {"4 blocks", "before Session::use"},
       with_session([&](Stack& model, Session& session) {
         session.use(Recompute(model->blocks));
         model->blocks->push_back(Residual(0.1));
         step(session, [&](const Tensor& x) { return model->forward(x); });
       })},
      {"a block that came after LayerDrop",
       {"4 blocks", "5 now"},
       with_session([](Stack& model, Session& session) {
         const LayerDrop gates(model->blocks);
         model->blocks->push_back(Residual(0.1));
         session.use(gates);
       })},
  };
  CHECK(faults_of(mistakes) == "");
}

}  // namespace pacer::testing
