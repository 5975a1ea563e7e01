// Adapters and weights in 4 bits of a CausalLm in files: runs that go on from checkpoints, and folders of Hugging Face.
// Folders of adapters: causal_lm_adapter_folders.cpp.
#include <filesystem>
#include <string>

#include <pacer/checkpoints/causal_lm_files.h>
#include <pacer/checkpoints/checkpoints.h>
#include <pacer/hooks/gradient_clipping.h>
#include <pacer/hooks/recompute.h>
#include <pacer/optimizers/fused_adam.h>
#include <pacer/session/session.h>

#include "support/catch.h"
#include "support/checkpoints/weight_files.h"
#include "support/message_of.h"

namespace pacer::testing::causal_lm_adapters {
namespace {

using Catch::Matchers::ContainsSubstring;
using modules::CausalLm;
using modules::CausalLmOptions;
using modules::LoraOptions;

CausalLm base_model(uint64_t seed = 1) {
  torch::manual_seed(seed);
  return CausalLm(CausalLmOptions(40, 16, 2, 4).ffn(24).kv_heads(2).init_std(0.2));
}

LoraOptions some_adapters() { return LoraOptions(3).alpha(6).targets({"layers.**"}); }

void quantize_layers(CausalLm& model) {
  modules::quantize(*model, modules::Nf4Options().targets({"layers.**"}));
}

void randomize_adapters(CausalLm& model) {
  torch::manual_seed(7);
  const torch::NoGradGuard no_grad;
  for (const auto& item : modules::trainable(*model)) item.value().normal_(0, 0.2);
}

Tensor some_ids() { return torch::arange(24).view({2, 12}); }

void train(CausalLm& model, Session& session, int64_t until) {
  while (session.progress().step < until) {
    auto [text] = session.begin(torch::randint(40, {2, 13}, torch::kLong));
    session.backward(model->loss(text.narrow(1, 0, 12), text.narrow(1, 1, 12)));
    session.step();
  }
}

}  // namespace

TEST_CASE("a CausalLm with adapters goes on from a checkpoint to the bit", "[causal_lm][lora][checkpoints]") {
  for (const bool quantized : {false, true}) {
    for (const bool save_frozen : {false, true}) {
      CAPTURE(quantized, save_frozen);
      const TemporaryFolder folder;
      // What drops is drawn by LibTorch's generator, which a checkpoint has.
      const auto run = [&](int64_t resumed_at, int64_t until, bool saves) {
        CausalLm model = base_model();
        if (quantized) quantize_layers(model);
        modules::add_lora(*model, some_adapters().dropout(0.2));
        FusedAdamW optimizer(modules::trainable(*model), FusedAdamWOptions(0.02));
        Session session(*model, optimizer);
        session.use(GradientClipping(1.0)).use(Recompute(model->layers));
        if (saves)
          session.use(Checkpoints(CheckpointsOptions(folder.path()).every(3).save_frozen(save_frozen)));
        torch::manual_seed(resumed_at == 0 ? 5 : 6);
        if (resumed_at > 0) REQUIRE(session.resume() == resumed_at);
        train(model, session, until);
        session.finish();
        return model;
      };
      const CausalLm unbroken = run(0, 6, false);
      run(0, 3, true);
      const CausalLm resumed = run(3, 6, true);
      for (const auto& item : modules::trainable(*unbroken)) {
        CAPTURE(item.key());
        CHECK(item.value().abs().max().item<double>() > 0);
        CHECK(same_bits(item.value(), modules::trainable(*resumed)[item.key()]));
      }
    }
  }
}

TEST_CASE("a CausalLm goes to a folder of Hugging Face with its adapters merged, and in whole weights alone",
          "[causal_lm][lora][nf4][save_weights]") {
  const TemporaryFolder folder;
  const std::string base = folder.path("base"), path = folder.path("tuned");
  CausalLm model = base_model();
  save_causal_lm(*model, base);

  modules::add_lora(*model, some_adapters());
  randomize_adapters(model);
  CHECK_THAT(
      message_of([&] { save_causal_lm(*model, path); }),
      ContainsSubstring("the adapter of \"layers.0.mlp.fc1\" has no place in a folder of transformers; "
                        "merge() the model"));
  CHECK_FALSE(std::filesystem::exists(path));
  const Tensor adapted = model(some_ids());
  modules::merge(*model);
  CHECK_THAT(message_of([&] { load_causal_lm(*model, base); }),
             ContainsSubstring("unmerge() the model first"));
  save_causal_lm(*model, path);
  CausalLm tuned(causal_lm_options(path));
  load_causal_lm(*tuned, path);
  CHECK(tuned(some_ids()).equal(model(some_ids())));
  CHECK(tuned(some_ids()).allclose(adapted, 1e-4, 1e-5));

  // Weights go under adapters that are there; without one that is active the model is what it was.
  modules::unmerge(*model);
  load_causal_lm(*model, base);
  CHECK(model(some_ids()).equal(adapted));
  modules::set_adapter(*model, "");
  save_causal_lm(*model, path);
  load_causal_lm(*tuned, path);
  CHECK(tuned(some_ids()).equal(base_model()(some_ids())));

  CausalLm small = base_model();
  quantize_layers(small);
  CHECK_THAT(message_of([&] { save_causal_lm(*small, path); }),
             ContainsSubstring("the weight of \"layers.0.mlp.fc1\" is in 4 bits; dequantize()"));
  CHECK_THAT(message_of([&] { load_causal_lm(*small, base); }),
             ContainsSubstring("is in 4 bits in the model; load the weights first"));
  modules::dequantize(*small);
  save_causal_lm(*small, path);
}

}  // namespace pacer::testing::causal_lm_adapters
