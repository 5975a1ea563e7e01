// CausalLm on a GPU: the numbers of the CPU, hooks that change none of them, and a folder that goes back to a CPU.
#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <pacer/pacer.h>

#include "support/both_devices.h"
#include "support/catch.h"
#include "support/kernels/fused_reference.h"
#include "support/no_waiting.h"
#include "support/temporary_folder.h"

namespace pacer::testing::causal_lm_gpu {
namespace {

using fused_layers::relative_error;
using modules::CausalLm;
using modules::CausalLmImpl;
using modules::CausalLmOptions;

constexpr int64_t kIds = 96, kLength = 64;

// As Llama 3, Qwen2 and Qwen3 are, small, of widths that 8-bit products can have.
std::vector<CausalLmOptions> decoders() {
  const auto common = CausalLmOptions(kIds, 128, 3, 4).ffn(256).kv_heads(2);
  return {common, CausalLmOptions(common).qkv_bias(true).kv_heads(1).tied(true),
          CausalLmOptions(common).qk_norm(true).head_dim(64)};
}

CausalLm make_model(const CausalLmOptions& options) {
  torch::manual_seed(5);
  CausalLm model(CausalLmOptions(options).init_std(0.1));
  return model;
}
CausalLm copy_of(CausalLm& model, at::Device device) {
  return CausalLm(std::dynamic_pointer_cast<CausalLmImpl>(model->clone(device)));
}

std::pair<Tensor, Tensor> batch(uint64_t number, at::Device device = at::kCPU) {
  torch::manual_seed(100 + number);
  const Tensor text = torch::randint(kIds, {4, kLength + 1}, torch::kLong).to(device);
  return {text.narrow(1, 0, kLength).contiguous(), text.narrow(1, 1, kLength).contiguous()};
}

using Use = std::function<void(Session&, CausalLm&)>;

struct Trained {
  std::vector<double> losses;
  std::vector<Tensor> weights;
};

Trained train(const CausalLmOptions& options, const Use& use, at::ScalarType dtype = at::kFloat) {
  CausalLm model = make_model(options);
  model->to(at::Device(at::kCUDA, 0), dtype);
  FusedAdamW optimizer(model->named_parameters(), FusedAdamWOptions(1e-3));
  Session session(*model, optimizer);
  session.use(GradientClipping(1.0));
  use(session, model);
  std::vector<Tensor> losses;
  const auto step = [&](uint64_t number) {
    const auto [ids, targets] = batch(number % 2, at::kCUDA);
    auto [x, y] = session.begin(ids, targets);
    const Tensor loss = model->loss(x, y);
    session.backward(loss);
    session.step();
    losses.push_back(loss.detach());
  };
  for (uint64_t number = 0; number < 40; ++number) step(number);
  session.finish();
  Trained trained;
  for (const Tensor& loss : losses) trained.losses.push_back(loss.item<double>());
  for (const Tensor& parameter : model->parameters()) trained.weights.push_back(parameter.detach().cpu());
  return trained;
}

void plain(Session&, CausalLm&) {}

}  // namespace

TEST_CASE("a CausalLm on a GPU has the logits, the loss and the gradients of the CPU", "[causal_lm][gpu]") {
  PACER_NEEDS_GPU();
  for (const CausalLmOptions& options : decoders()) {
    CausalLm cpu = make_model(options);
    CausalLm gpu = copy_of(cpu, at::Device(at::kCUDA, 0));
    const auto [ids, targets] = batch(0);
    CHECK(relative_error(gpu(ids.cuda()).cpu(), cpu(ids)) < 1e-5);
    const Tensor loss = gpu->loss(ids.cuda(), targets.cuda()), wanted = cpu->loss(ids, targets);
    CHECK(relative_error(loss.cpu(), wanted) < 1e-6);
    loss.backward(), wanted.backward();
    const auto found = gpu->named_parameters();
    for (const auto& item : cpu->named_parameters()) {
      CAPTURE(item.key());
      CHECK(relative_error(found[item.key()].grad().cpu(), item.value().grad()) < 2e-5);
    }
  }
}

TEST_CASE("adapters inside a CausalLm on a GPU, over whole weights and over 4 bits, are the CPU's",
          "[causal_lm][lora][nf4][gpu]") {
  PACER_NEEDS_GPU();
  for (const CausalLmOptions& options : decoders()) {
    for (const bool in_4_bits : {false, true}) {
      CAPTURE(in_4_bits);
      CausalLm cpu = make_model(options);
      if (in_4_bits) modules::quantize(*cpu, modules::Nf4Options().targets({"layers.**"}));
      modules::add_lora(*cpu, modules::LoraOptions(4).targets({"layers.**"}));
      for (const auto& item : modules::trainable(*cpu)) item.value().detach().normal_(0, 0.1);
      CausalLm gpu = copy_of(cpu, at::Device(at::kCUDA, 0));
      const auto [ids, targets] = batch(0);
      const Tensor loss = gpu->loss(ids.cuda(), targets.cuda()), wanted = cpu->loss(ids, targets);
      CHECK(relative_error(loss.cpu(), wanted) < 1e-6);
      loss.backward(), wanted.backward();
      const auto found = modules::trainable(*gpu);  // a clone of torch's layers trains them again
      for (const auto& item : modules::trainable(*cpu)) {
        CAPTURE(item.key());
        CHECK(relative_error(found[item.key()].grad().cpu(), item.value().grad()) < 2e-5);
      }
    }
  }
}

TEST_CASE("hooks train a CausalLm on a GPU", "[causal_lm][gpu]") {
  PACER_NEEDS_GPU();
  for (const CausalLmOptions& options : decoders()) {
    const Trained wanted = train(options, plain);
    CHECK(wanted.losses.back() < 0.7 * wanted.losses.front());
    const Trained recomputed =
        train(options, [](Session& session, CausalLm& model) { session.use(Recompute(model->layers)); });
    CHECK(same_bits(recomputed.weights, wanted.weights));
    const Trained graph = train(options, [](Session& session, CausalLm&) { session.use(CudaGraph()); });
    CHECK(same_bits(graph.weights, wanted.weights));
    const auto is_close = [&](const Trained& other, double bound) {
      for (size_t step = 0; step < wanted.losses.size(); ++step) {
        CAPTURE(step);
        CHECK(std::abs(other.losses[step] - wanted.losses[step]) < bound * wanted.losses[0]);
      }
    };
    // Of the first loss: 8 and 4 bits of significand, and forty steps in which these differences grow.
    is_close(train(options, [](Session& session, CausalLm&) { session.use(Precision::bf16()); }), 0.05);
    is_close(train(options, plain, at::kBFloat16), 0.05);
    is_close(train(options, [](Session& session, CausalLm&) { session.use(Precision::fp8()); }), 0.1);
    is_close(train(
                 options,
                 [](Session& session, CausalLm& model) {
                   session.use(Precision::fp8()).use(Recompute(model->layers));
                 },
                 at::kBFloat16),
             0.1);
  }
}

TEST_CASE("a step of a CausalLm never waits for the GPU", "[causal_lm][gpu]") {
  PACER_NEEDS_GPU();
  CausalLm model = make_model(decoders()[0]);
  model->to(at::Device(at::kCUDA, 0));
  FusedAdamW optimizer(model->named_parameters(), FusedAdamWOptions(1e-3));
  Session session(*model, optimizer);
  session.use(Precision::bf16()).use(GradientClipping(1.0));
  const auto [ids, targets] = batch(0, at::kCUDA);
  const auto step = [&, x = ids, y = targets] {
    auto [of_ids, of_targets] = session.begin(x, y);
    session.backward(model->loss(of_ids, of_targets));
    session.step();
  };
  for (int number = 0; number < 3; ++number) step();
  const NoWaiting no_waiting;
  for (int number = 0; number < 3; ++number) step();
}

TEST_CASE("a CausalLm that was trained on a GPU goes on from its folder on a CPU", "[causal_lm][gpu]") {
  PACER_NEEDS_GPU();
  const TemporaryFolder folder;
  for (const CausalLmOptions& options : decoders()) {
    CausalLm gpu = make_model(options);
    gpu->to(at::Device(at::kCUDA, 0));
    save_causal_lm(*gpu, folder.path("saved"));
    CausalLm cpu(causal_lm_options(folder.path("saved")));
    (void)load_causal_lm(*cpu, folder.path("saved"));
    const auto found = cpu->named_parameters();
    for (const auto& item : gpu->named_parameters()) CHECK(same_bits(found[item.key()], item.value().cpu()));
  }
}

}  // namespace pacer::testing::causal_lm_gpu
