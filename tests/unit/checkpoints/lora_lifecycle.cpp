// What happens to layers with adapters and 4-bit weights in their life: kept graphs, odd inputs, layers used
// twice, and models that are changed, copied and moved while an optimizer or a Session has them.
#include "support/catch.h"

#include <functional>
#include <sstream>

#include <torch/autograd.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/serialize.h>

#include <pacer/checkpoints/all.h>
#include <pacer/core/error.h>
#include <pacer/hooks/hooks.h>
#include <pacer/metrics/all.h>
#include <pacer/modules/linear.h>
#include <pacer/modules/lora.h>
#include <pacer/modules/nf4.h>
#include <pacer/modules/recompute.h>
#include <pacer/optimizers/fused_adam.h>
#include <pacer/parallel/parallel.h>
#include <pacer/schedulers/schedulers.h>
#include <pacer/session/all.h>

#include "support/collectives/ranks.h"
#include "support/cpu_memory.h"
#include "support/session/mistakes.h"

namespace pacer::testing::lora_lifecycle {
namespace {

using Catch::Matchers::ContainsSubstring;
using torch::Tensor;

struct PartImpl : torch::nn::Cloneable<PartImpl> {
  PartImpl() { PartImpl::reset(); }
  void reset() override {
    up = register_module("up", modules::Linear(24, 20));
    down = register_module("down", modules::Linear(torch::nn::LinearOptions(20, 24).bias(false)));
  }
  Tensor forward(const Tensor& x) { return x + down(up(x).tanh()); }
  modules::Linear up = nullptr, down = nullptr;
};
TORCH_MODULE(Part);

void fill(torch::nn::Module& model) {
  const torch::NoGradGuard no_grad;
  for (const auto& item : model.named_parameters()) {
    if (item.key().find("lora_") != std::string::npos) item.value().normal_(0, 0.2);
  }
}

// Of plain weights, or of weights in 4 bits; r is no multiple of anything.
Part adapted(bool in_4_bits, double dropout = 0) {
  torch::manual_seed(2);
  Part part;
  if (in_4_bits) modules::quantize(*part, modules::Nf4Options().targets({"up", "down"}));
  modules::add_lora(*part, modules::LoraOptions(3).alpha(4).dropout(dropout).targets({"up", "down"}));
  fill(*part);
  return part;
}

std::vector<Tensor> gradients_of(const torch::nn::Module& model) {
  std::vector<Tensor> gradients;
  for (const auto& item : modules::trainable(model)) {
    gradients.push_back(item.value().grad().defined() ? item.value().grad().clone() : Tensor());
  }
  return gradients;
}

bool all_equal(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const Tensor& x, const Tensor& y) {
    return x.defined() == y.defined() && (!x.defined() || x.equal(y));
  });
}

}  // namespace

TEST_CASE("a graph of an adapted layer may be kept and run backward twice", "[lora]") {
  for (const bool in_4_bits : {false, true}) {
    Part part = adapted(in_4_bits, /*dropout=*/0.25);
    const Tensor x = torch::randn({5, 24}).requires_grad_();
    const Tensor loss = part(x).square().sum();
    loss.backward({}, /*retain_graph=*/true);
    const auto once = gradients_of(*part);
    const Tensor dx = x.grad().clone();
    loss.backward({}, /*retain_graph=*/true);
    for (size_t i = 0; i < once.size(); ++i) CHECK(gradients_of(*part)[i].equal(2 * once[i]));
    CHECK(x.grad().equal(2 * dx));
    std::vector<Tensor> inputs = {x};
    for (const auto& item : modules::trainable(*part)) inputs.push_back(item.value());
    const auto again = torch::autograd::grad({loss}, inputs, {}, /*retain_graph=*/true);
    CHECK(again[0].equal(dx));
    for (size_t i = 0; i < once.size(); ++i) CHECK(again[i + 1].equal(once[i]));
    CHECK_THROWS_WITH(torch::autograd::grad({loss}, {x}, {}, true, /*create_graph=*/true),
                      ContainsSubstring("second derivative"));
  }
}

TEST_CASE("without gradients an adapted layer keeps nothing, and gives the same", "[lora]") {
  for (const bool in_4_bits : {false, true}) {
    Part part = adapted(in_4_bits);
    const Tensor x = torch::randn({5, 24});
    const Tensor with = part(x);
    CHECK(with.requires_grad());
    {
      const torch::NoGradGuard no_grad;
      const Tensor without = part(x);
      CHECK_FALSE(without.requires_grad());
      CHECK(without.equal(with));
    }
    modules::set_adapter(*part, "");
    CHECK_FALSE(part(x).requires_grad());
    const Tensor twin = x.clone().requires_grad_();
    part(twin).sum().backward();
    CHECK(twin.grad().defined());
    CHECK_FALSE(part->up->adapter("default")->A.grad().defined());
  }
}

TEST_CASE("inputs of any number of dimensions and any strides give what a matrix of rows gives", "[lora]") {
  for (const bool in_4_bits : {false, true}) {
    Part part = adapted(in_4_bits);
    const Tensor rows = torch::randn({6, 24});
    const auto pass = [&](const std::function<Tensor(const Tensor&)>& view) {
      part->zero_grad();
      const Tensor leaf = rows.clone().requires_grad_();
      const Tensor y = part(view(leaf));
      y.square().sum().backward();
      auto result = gradients_of(*part);
      result.push_back(leaf.grad().clone());
      result.push_back(y.detach().reshape({6, 24}).clone());
      return result;
    };
    const auto wanted = pass([](const Tensor& x) { return x; });
    CHECK(all_equal(pass([](const Tensor& x) { return x.view({2, 3, 24}); }), wanted));
    // Products of other strides add in another order: a few units of the last place.
    const auto transposed = pass([](const Tensor& x) { return x.t().contiguous().t(); });
    for (size_t i = 0; i < wanted.size(); ++i) CHECK(torch::allclose(transposed[i], wanted[i], 1e-4, 1e-5));
    const auto gaps = [](const Tensor& x) { return torch::cat({x, x}, 1).narrow(1, 24, 24); };
    CHECK(all_equal(pass(gaps), wanted));
    const Tensor one = part(rows[2]);
    CHECK(one.sizes() == at::IntArrayRef({24}));
    CHECK(torch::allclose(one, part(rows)[2], 1e-5, 1e-6));
    // Gradients that arrive as an expanded number, and rows that are one row.
    part->zero_grad();
    part(rows[0].expand({4, 24})).sum().backward();
    const auto expanded = gradients_of(*part);
    part->zero_grad();
    part(rows[0].repeat({4, 1})).sum().backward();
    CHECK(all_equal(gradients_of(*part), expanded));
    CHECK_THROWS_WITH(part->up(torch::zeros({3, 23})), ContainsSubstring("takes [..., 24], not [3, 23]"));
    CHECK_THROWS_WITH(part->up(torch::tensor(1.0)), ContainsSubstring("takes [..., 24], not []"));
  }
}

TEST_CASE("a layer that is used twice in one pass gets the sum of both gradients", "[lora]") {
  for (const bool in_4_bits : {false, true}) {
    Part part = adapted(in_4_bits);
    const Tensor x = torch::randn({4, 24});
    const Tensor y = part(part(x));
    const auto all = modules::trainable(*part).values();
    const auto found = torch::autograd::grad({y.sum()}, all, {}, /*retain_graph=*/true);
    const Tensor middle = part(x).detach().requires_grad_();
    std::vector<Tensor> inputs = all;
    inputs.push_back(middle);
    const auto second = torch::autograd::grad({part(middle).sum()}, inputs);
    const auto first = torch::autograd::grad({part(x)}, all, {second.back()});
    for (size_t i = 0; i < all.size(); ++i) {
      CHECK(torch::allclose(found[i], first[i] + second[i], 1e-4, 1e-5));
    }
  }
}

TEST_CASE("a clone of a whole model has its adapters and 4 bits, and is on its own", "[lora]") {
  for (const bool in_4_bits : {false, true}) {
    torch::nn::Sequential model(adapted(in_4_bits), modules::Linear(24, 2));
    for (auto& parameter : model[1]->parameters()) parameter.requires_grad_(false);
    model->eval();
    const Tensor x = torch::randn({3, 24});
    const Tensor before = model->forward(x);
    const auto copy = std::dynamic_pointer_cast<torch::nn::SequentialImpl>(model->clone());
    CHECK(copy->forward(x).equal(before));
    CHECK(modules::trainable(*copy).keys() == modules::trainable(*model).keys());
    CHECK(copy->named_buffers().keys() == model->named_buffers().keys());
    for (const auto& module : copy->modules(/*include_self=*/false)) CHECK_FALSE(module->is_training());
    // An optimizer over the copy trains the copy.
    FusedAdamW optimizer(modules::trainable(*copy), FusedAdamWOptions(0.01));
    copy->forward(x).sum().backward();
    optimizer.step();
    CHECK_FALSE(copy->forward(x).equal(before));
    CHECK(model->forward(x).equal(before));
    for (const auto& item : model->named_buffers()) item.value().zero_();
    const Tensor of_copy = copy->forward(x);
    CHECK((in_4_bits ? !model->forward(x).equal(before) : model->forward(x).equal(before)));
    CHECK(copy->forward(x).equal(of_copy));
  }
}

TEST_CASE("a clone of a layer with a merged adapter can be unmerged", "[lora]") {
  Part part = adapted(false);
  const Tensor before = part->up->weight.detach().clone();
  modules::merge(*part);
  const auto copy = std::dynamic_pointer_cast<PartImpl>(part->clone());
  CHECK(copy->up->is_merged());
  modules::unmerge(*copy);
  CHECK(copy->up->weight.equal(before));
  CHECK(part->up->is_merged());
  modules::unmerge(*part);
  CHECK(part->up->weight.equal(before));
}

TEST_CASE("adapters are merged where others of the model's layers are in 4 bits without one", "[lora][nf4]") {
  torch::manual_seed(2);
  Part part;
  modules::quantize(*part, modules::Nf4Options().targets({"up"}));
  modules::add_lora(*part, modules::LoraOptions(3).targets({"down"}));
  fill(*part);
  const Tensor x = torch::randn({3, 24});
  const Tensor before = part(x).detach();
  modules::merge(*part);
  CHECK(part->down->is_merged());
  CHECK(torch::allclose(part(x), before, 1e-4, 1e-5));
  modules::unmerge(*part);
  CHECK(part(x).equal(before));
}

TEST_CASE("archives bring back adapters and codes into a model that was changed alike", "[lora]") {
  for (const bool in_4_bits : {false, true}) {
    Part part = adapted(in_4_bits);
    std::stringstream file;
    torch::save(part, file);
    Part other = adapted(in_4_bits);
    for (const auto& tensors : {other->parameters(), other->buffers()}) {
      const torch::NoGradGuard no_grad;
      for (const Tensor& tensor : tensors) tensor.detach().zero_();
    }
    torch::load(other, file);
    const Tensor x = torch::randn({3, 24});
    CHECK(other(x).equal(part(x)));
    CHECK(modules::trainable(*other).size() == 4);
  }
}

TEST_CASE("to another dtype and back, adapted layers compute in what they are given", "[lora]") {
  for (const bool in_4_bits : {false, true}) {
    Part part = adapted(in_4_bits);
    const Tensor x = torch::randn({3, 24});
    const Tensor before = part(x).detach();
    for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf, at::kDouble}) {
      part->to(dtype);
      const Tensor y = part(x.to(dtype));
      CHECK(y.scalar_type() == dtype);
      CHECK((y.to(at::kFloat) - before).norm().item<double>() < 0.02 * before.norm().item<double>());
      y.sum().backward();
      CHECK(part->up->adapter("default")->A.grad().scalar_type() == dtype);
      part->zero_grad();
    }
    part->to(at::kFloat);
    if (in_4_bits) CHECK(part->up->nf4()->dtype == at::kFloat);
    CHECK(torch::allclose(part(x), before, 0.05, 0.05));
  }
}

TEST_CASE("frozen and unfrozen between steps, an optimizer of adapters passes over what is frozen",
          "[lora]") {
  for (const bool in_4_bits : {false, true}) {
    Part part = adapted(in_4_bits);
    FusedAdamW optimizer(modules::trainable(*part), FusedAdamWOptions(0.01));
    Session session(*part, optimizer);
    const modules::LoraAdapter up = part->up->adapter("default"), down = part->down->adapter("default");
    const auto step = [&] {
      auto [x] = session.begin(torch::randn({4, 24}));
      session.backward(part(x).square().mean());
      session.step();
    };
    step();
    const Tensor frozen = up->A.detach().clone(), trained = down->A.detach().clone();
    up->A.requires_grad_(false);
    step();
    CHECK(up->A.equal(frozen));
    CHECK_FALSE(down->A.equal(trained));
    up->A.requires_grad_(true);
    step();
    CHECK_FALSE(up->A.equal(frozen));
    session.finish();
  }
}

TEST_CASE("an adapter that is changed for another is not trained on, and a Session says so", "[lora]") {
  for (const bool all : {false, true}) {
    Part part = adapted(true);
    modules::set_adapter(*part, "");
    modules::add_lora(*part, modules::LoraOptions(2).targets({"down"}).name("other"));
    modules::set_adapter(*part, "default");
    NamedParameters parameters = modules::trainable(*part);
    if (all) {  // both adapters are the optimizer's
      parameters.insert("down.other.A", part->down->adapter("other")->A);
      parameters.insert("down.other.B", part->down->adapter("other")->B);
    }
    FusedAdamW optimizer(parameters, FusedAdamWOptions(0.01));
    auto session = std::make_unique<Session>(*part, optimizer);
    const auto step = [&] {
      auto [x] = session->begin(torch::randn({4, 24}));
      session->backward(part(x).square().mean());
      session->step();
    };
    step();
    modules::set_adapter(*part, "other");
    const Tensor first = part->up->adapter("default")->A.detach().clone();
    const Tensor second = part->down->adapter("other")->B.detach().clone();
    if (all) {
      step();
      step();
      CHECK_FALSE(part->down->adapter("other")->B.equal(second));
    } else {
      CHECK_THROWS_WITH(step(), ContainsSubstring("none of the optimizer's 4 parameters needs a gradient") &&
                                    ContainsSubstring("set_adapter"));
      CHECK(part->down->adapter("other")->B.equal(second));
    }
    CHECK(part->up->adapter("default")->A.equal(first));
    modules::set_adapter(*part, "default");
    if (!all) session = std::make_unique<Session>(*part, optimizer);  // the failed step is still to be taken
    step();
    CHECK_FALSE(part->up->adapter("default")->A.equal(first));
    session->finish();
  }
}

TEST_CASE("weights that were put in 4 bits under an optimizer are named in one sentence", "[lora][nf4]") {
  const auto quantize = [](Part& part) {
    modules::quantize(*part, modules::Nf4Options().targets({"up"}));
    modules::add_lora(*part, modules::LoraOptions(2).targets({"down"}));
  };
  const auto step = [](Session& session, Part& part) {
    auto [x] = session.begin(torch::randn({4, 24}));
    session.backward(part(x).square().mean());
    session.step();
  };
  constexpr const char* kSentence = "is no longer the model's";
  {
    INFO("before the Session");
    Part part;
    FusedAdamW optimizer(part->named_parameters(), FusedAdamWOptions(0.01));
    quantize(part);
    Session session(*part, optimizer);
    CHECK_THROWS_WITH(step(session, part), ContainsSubstring(kSentence) && ContainsSubstring("quantize()"));
  }
  {
    INFO("between steps");
    Part part;
    FusedAdamW optimizer(part->named_parameters(), FusedAdamWOptions(0.01));
    Session session(*part, optimizer);
    step(session, part);
    quantize(part);
    CHECK_THROWS_WITH(step(session, part), ContainsSubstring("up.weight") && ContainsSubstring(kSentence));
  }
  {
    INFO("others of the same shape are the model's");
    torch::nn::Sequential model(modules::Linear(torch::nn::LinearOptions(8, 8).bias(false)),
                                modules::Linear(8, 8));
    modules::quantize(*model, modules::Nf4Options().targets({"0"}));
    FusedAdamW optimizer(model[1]->parameters(), FusedAdamWOptions(0.01));
    Session session(*model, optimizer);
    auto [x] = session.begin(torch::randn({4, 8}));
    session.backward(model->forward(x).square().mean());
    CHECK_NOTHROW(session.step());
    session.finish();
  }
  {
    INFO("back again");
    Part part = adapted(true);
    FusedAdamW optimizer(modules::trainable(*part), FusedAdamWOptions(0.01));
    Session session(*part, optimizer);
    step(session, part);
    const Tensor x = torch::randn({4, 24});
    const Tensor before = part(x).detach();
    modules::dequantize(*part);
    CHECK(torch::allclose(part(x), before, 1e-5, 1e-6));
    step(session, part);
    CHECK_FALSE(torch::allclose(part(x), before, 1e-5, 1e-6));
    CHECK_FALSE(part->up->weight.grad().defined());
    session.finish();
  }
}

TEST_CASE("a recomputed region copies no weights in 4 bits, and hears that they were changed",
          "[lora][nf4]") {
  torch::manual_seed(3);
  modules::Linear layer(256, 256);
  torch::nn::ModuleList model(layer);
  modules::quantize(*model, modules::Nf4Options().targets({"0"}));
  modules::add_lora(*model, modules::LoraOptions(2).targets({"0"}));
  const Tensor x = torch::ones({1, 256});
  const auto forward = [part = layer.get()](const Tensor& in) { return part->forward(in); };
  const auto pass = [&] { return recompute(*layer, forward, x); };
  const CountedCpuMemory memory;
  const auto peak_of = [](const std::function<Tensor()>& run) {
    run().sum().backward();  // workspaces of products
    const int64_t before = CountedCpuMemory::live();
    CountedCpuMemory::reset_peak();
    run().sum().backward();
    return CountedCpuMemory::peak() - before;
  };
  const int64_t plain = peak_of([&] { return layer(x); });
  CHECK(peak_of(pass) < plain + 16384);  // the codes have 32768
  const Tensor y = pass();
  layer->nf4()->codes.zero_();
  CHECK_THROWS_WITH(y.sum().backward(), ContainsSubstring("buffer weight.codes was changed"));
}

TEST_CASE("dropout of adapters whose layers have sizes that cannot be dropped is refused at once", "[lora]") {
  modules::Linear layer(10, 12);
  torch::nn::ModuleList model(layer);
  CHECK_THROWS_WITH(modules::add_lora(*model, modules::LoraOptions(2).dropout(0.1).targets({"0"})),
                    ContainsSubstring("multiple of 4"));
  CHECK(layer->is_plain());
  CHECK(layer->weight.requires_grad());
}

TEST_CASE("ranks whose weights in 4 bits differ hear of it before the first step", "[lora][nf4][ranks]") {
  struct Setup {
    const char* name;
    std::function<void(Part&)> of_rank_1;
    InitialParameters initial;
    const char* says;
  };
  const auto quantize = [](bool doubly) {
    return [doubly](Part& part) {
      modules::quantize(*part, modules::Nf4Options().targets({"up"}).double_quantization(doubly));
    };
  };
  const Setup setups[] = {
      {"other values", [&](Part& part) { quantize(true)(part), part->up->nf4()->codes.fill_(3); },
       InitialParameters::check, "up.weight.codes"},
      {"in 16 bits on one", [](Part&) {}, InitialParameters::broadcast, "up.weight"},
      {"in 16 bits on one, compared", [](Part&) {}, InitialParameters::check, "up.weight"},
      {"scales of another kind", quantize(false), InitialParameters::broadcast, "up.weight"},
      {"the same", quantize(true), InitialParameters::check, nullptr},
      {"other values, brought over",
       [&](Part& part) { quantize(true)(part), part->up->nf4()->codes.fill_(3); },
       InitialParameters::broadcast, nullptr},
  };
  for (const Setup& setup : setups) {
    CAPTURE(setup.name);
    std::vector<Part> parts;
    for (int rank = 0; rank < 2; ++rank) {
      torch::manual_seed(4);
      parts.emplace_back();
      rank == 1 ? setup.of_rank_1(parts.back()) : quantize(true)(parts.back());
      torch::manual_seed(5);
      modules::add_lora(*parts.back(), modules::LoraOptions(2).targets({"up"}));
    }
    const auto worlds = Communicator::in_process(2, CommunicatorOptions().timeout(std::chrono::seconds(20)));
    const auto messages = run_ranks(2, [&](int rank) {
      Part& part = parts[static_cast<size_t>(rank)];
      FusedAdamW optimizer(modules::trainable(*part), FusedAdamWOptions(0.01));
      Session session(*part, optimizer, worlds[static_cast<size_t>(rank)]);
      session.use(DataParallel(DataParallelOptions().initial_parameters(setup.initial)));
      auto [x] = session.begin(torch::ones({2, 24}));
      session.backward(part(x).square().mean());
      session.step();
      session.finish();
    });
    for (const std::string& message : messages) {
      if (setup.says) {
        CHECK_THAT(message, ContainsSubstring(setup.says));
      } else {
        CHECK(message.empty());
      }
    }
    if (!setup.says) CHECK(parts[0]->up->nf4()->codes.equal(parts[1]->up->nf4()->codes));
  }
}

}  // namespace pacer::testing::lora_lifecycle
