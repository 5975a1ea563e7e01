// Several adapters of a model that are active at once: their sum, what is trained, merging, and what is refused.
#include "support/catch.h"

#include <torch/autograd.h>
#include <torch/nn/modules/container/modulelist.h>

#include <pacer/core/error.h>
#include <pacer/modules/convolution.h>
#include <pacer/modules/embedding.h>
#include <pacer/modules/linear.h>
#include <pacer/modules/lora.h>
#include <pacer/modules/nf4.h>

#include "support/message_of.h"

namespace pacer::testing::lora_several {
namespace {

using Catch::Matchers::ContainsSubstring;
using modules::LoraOptions;
using torch::Tensor;
using Names = std::vector<std::string>;

// indices [N, L] -> [N, 6, L].
struct NetImpl : torch::nn::Module {
  NetImpl() {
    table = register_module("table", modules::Embedding(7, 8));
    mix = register_module("mix", modules::Linear(8, 4));
    conv = register_module("conv", modules::Conv1d(torch::nn::Conv1dOptions(4, 6, 3).padding(1)));
  }
  Tensor forward(const Tensor& x) { return conv(mix(table(x)).tanh().transpose(1, 2)); }
  modules::Embedding table = nullptr;
  modules::Linear mix = nullptr;
  modules::Conv1d conv = nullptr;
};
TORCH_MODULE(Net);

// With the adapters "a", of all layers, and "b", of two, whose ranks and scales differ, and "c", of all.
Net adapted() {
  torch::manual_seed(3);
  Net model;
  modules::add_lora(*model, LoraOptions(2).alpha(3).targets({"*"}).name("a"));
  modules::add_lora(*model, LoraOptions(3).alpha(1).targets({"mix", "conv"}).name("b"));
  modules::add_lora(*model, LoraOptions(1).targets({"*"}).name("c"));
  const torch::NoGradGuard no_grad;
  for (const auto& item : model->named_parameters()) {
    if (item.key().find("lora_") != std::string::npos) item.value().normal_(0, 0.3);
  }
  model->to(at::kDouble);
  return model;
}

Tensor indices() { return torch::tensor({{1, 4, 2, 6}, {0, 4, 6, 3}}, at::kLong); }

// What the adapters of these names make of the model, in LibTorch's operations.
Tensor reference(const Net& model, const Names& names) {
  Tensor table = model->table->weight, mix = model->mix->weight, conv = model->conv->weight;
  for (const std::string& name : names) {
    if (const modules::LoraAdapter adapter = model->table->adapter(name)) {
      table = table + adapter->scale() * adapter->B.matmul(adapter->A).t();
    }
    const modules::LoraAdapter of_mix = model->mix->adapter(name), of_conv = model->conv->adapter(name);
    mix = mix + of_mix->scale() * of_mix->B.matmul(of_mix->A);
    conv = conv + of_conv->scale() * torch::einsum("ors,rck->ock", {of_conv->B, of_conv->A});
  }
  const Tensor x = table.index_select(0, indices().flatten()).view({2, 4, 8});
  return torch::conv1d(at::linear(x, mix, model->mix->bias).tanh().transpose(1, 2), conv, model->conv->bias,
                       1, 1);
}

}  // namespace

TEST_CASE("adapters that are active at once add up, and all of them are trained", "[lora]") {
  Net model = adapted();
  modules::set_adapters(*model, {"b", "a"});
  CHECK(modules::trainable(*model).keys() ==
        Names{"table.lora_a.A", "table.lora_a.B", "mix.lora_a.A", "mix.lora_a.B", "mix.lora_b.A",
              "mix.lora_b.B", "conv.lora_a.A", "conv.lora_a.B", "conv.lora_b.A", "conv.lora_b.B"});
  const Tensor y = model->forward(indices()), wanted = reference(model, {"a", "b"});
  CHECK((y - wanted).abs().max().item<double>() < 1e-12);
  CHECK((wanted - reference(model, {"a"})).abs().max().item<double>() > 0.01);
  const std::vector<Tensor> parameters = modules::trainable(*model).values();
  const Tensor direction = torch::randn_like(wanted);
  const auto found = torch::autograd::grad({(y * direction).sum()}, parameters);
  const auto expected = torch::autograd::grad({(wanted * direction).sum()}, parameters);
  for (size_t i = 0; i < found.size(); ++i) {
    CAPTURE(i);
    CHECK(expected[i].abs().max().item<double>() > 1e-3);
    CHECK((found[i] - expected[i]).abs().max().item<double>() < 1e-10);
  }
  const Tensor x = torch::randn({3, 8}, at::kDouble);
  CHECK(modules::forward_together(x, {model->mix})[0].equal(model->mix(x)));
  modules::set_adapters(*model, {});
  CHECK((model->forward(indices()) - reference(model, {})).abs().max().item<double>() < 1e-12);
  modules::set_adapter(*model, "c");
  CHECK((model->forward(indices()) - reference(model, {"c"})).abs().max().item<double>() < 1e-12);
}

TEST_CASE("over weights in 4 bits several adapters add up, too", "[lora][nf4]") {
  torch::manual_seed(3);
  modules::Linear layer(64, 6);
  torch::nn::ModuleList model(layer);
  modules::quantize(*model, modules::Nf4Options().targets({"0"}));
  modules::add_lora(*model, LoraOptions(2).targets({"0"}).name("a"));
  modules::add_lora(*model, LoraOptions(3).alpha(6).targets({"0"}).name("b"));
  {
    const torch::NoGradGuard no_grad;
    for (const modules::LoraAdapter& adapter : layer->adapters()) adapter->B.normal_(0, 0.3);
  }
  modules::set_adapters(*model, {"a", "b"});
  Tensor weight = layer->nf4()->decode(at::kDouble);
  for (const modules::LoraAdapter& adapter : layer->adapters()) {
    weight = weight + adapter->scale() * adapter->B.to(at::kDouble).matmul(adapter->A.to(at::kDouble));
  }
  const Tensor x = torch::randn({5, 64});
  const Tensor wanted = at::linear(x.to(at::kDouble), weight, layer->bias.to(at::kDouble));
  CHECK((layer(x).to(at::kDouble) - wanted).abs().max().item<double>() < 1e-5);
}

TEST_CASE("merge adds all active adapters to the weights, and unmerge brings back every byte", "[lora]") {
  Net model = adapted();
  modules::set_adapters(*model, {"a", "c"});
  const Tensor before = model->conv->weight.detach().clone(), beside = model->forward(indices());
  modules::merge(*model);
  CHECK(model->table->is_merged());
  CHECK((model->forward(indices()) - beside).abs().max().item<double>() < 1e-12);
  CHECK_FALSE(model->conv->weight.equal(before));
  const auto refused = [&](const std::function<void()>& call, const char* reason) {
    const Tensor merged = model->forward(indices());
    CHECK_THAT(message_of<InvalidArgument>(call), ContainsSubstring(reason));
    CHECK(modules::adapters(*model) == Names{"a", "b", "c"});  // though the first layer has no "b"
    CHECK(model->forward(indices()).equal(merged));
  };
  refused([&] { modules::set_adapters(*model, {"a"}); }, "set_adapters: the adapter of table is merged");
  refused([&] { modules::remove_adapter(*model, "a"); },
          "remove_adapter: in table the adapter a is merged together with others");
  modules::remove_adapter(*model, "b");  // which is not active
  modules::unmerge(*model);
  CHECK(model->conv->weight.equal(before));
  CHECK(model->forward(indices()).equal(beside));
  modules::remove_adapter(*model, "a");
  CHECK((model->forward(indices()) - reference(model, {"c"})).abs().max().item<double>() < 1e-12);
  CHECK(modules::trainable(*model).size() == 6);
}

TEST_CASE("adapters that the model does not have are not set, and what was active stays", "[lora]") {
  Net model = adapted();
  modules::set_adapters(*model, {"a", "b"});
  CHECK_THAT(message_of<InvalidArgument>([&] {
               modules::set_adapters(*model, {"a", "x"});
             }),
             ContainsSubstring("set_adapters: the model has no adapter called x"));
  CHECK(modules::trainable(*model).size() == 10);
  model->mix->adapter("a")->options.dropout(0.5);
  CHECK_THAT(message_of<InvalidArgument>([&] { model->forward(indices()); }),
             ContainsSubstring("adapters with dropout 0.5 and 0"));
}

TEST_CASE("a clone has the same adapters active", "[lora]") {
  Net model = adapted();
  modules::set_adapters(*model, {"a", "c"});
  const auto copy = std::dynamic_pointer_cast<modules::LinearImpl>(model->mix->clone());
  REQUIRE(copy->active_adapters().size() == 2);
  CHECK(copy->active_adapters()[1]->options.name() == "c");
  const Tensor x = torch::randn({3, 8}, at::kDouble);
  CHECK(copy->forward(x).equal(model->mix(x)));
}

}  // namespace pacer::testing::lora_several
