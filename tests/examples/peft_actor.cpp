// What peft_files.py exchanges files with: a program that saves and loads as a user of adapters and of
// weights in 4 bits would.
//
//   peft_actor write FOLDER    a base model, an adapter and what the model with it computes; layers in 4 bits
//                              with and without double quantisation, and what they decode to
//   peft_actor read FOLDER     the same of files that Python wrote there
#include <cstdio>
#include <exception>
#include <string>

#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <pacer/checkpoints/adapter_files.h>
#include <pacer/checkpoints/detail/tensor_file.h>
#include <pacer/checkpoints/load_weights.h>
#include <pacer/checkpoints/save_weights.h>
#include <pacer/files/file_system.h>
#include <pacer/modules/linear.h>
#include <pacer/modules/lora.h>
#include <pacer/modules/nf4.h>

namespace {

struct BlockImpl : torch::nn::Module {
  BlockImpl() {
    up = register_module("up", pacer::modules::Linear(64, 128));
    down = register_module("down", pacer::modules::Linear(torch::nn::LinearOptions(128, 64).bias(false)));
  }
  pacer::modules::Linear up = nullptr, down = nullptr;
};
TORCH_MODULE(Block);

// x [N, 64] -> [N, 8]. "extra", whose rows are no whole blocks, takes no part in it.
struct NetImpl : torch::nn::Module {
  NetImpl() {
    block = register_module("block", Block());
    down = register_module("down", pacer::modules::Linear(64, 10));
    head = register_module("head", torch::nn::Linear(10, 8));
    extra = register_module("extra", pacer::modules::Linear(torch::nn::LinearOptions(96, 66).bias(false)));
  }
  torch::Tensor forward(const torch::Tensor& x) { return head(down(x + block->down(block->up(x).tanh()))); }
  Block block = nullptr;
  pacer::modules::Linear down = nullptr;
  torch::nn::Linear head = nullptr;
  pacer::modules::Linear extra = nullptr;
};
TORCH_MODULE(Net);

void put(const std::string& path, const pacer::NamedTensors& tensors) {
  pacer::posix_file_system().remove_file(path);
  pacer::FileWriter out(pacer::posix_file_system(), path);
  pacer::detail::write_tensors(out, tensors);
  out.finish();
}

pacer::NamedTensors get(const std::string& path) {
  pacer::FileReader reader(pacer::posix_file_system(), path);
  return pacer::detail::read_tensors(reader, path);
}

// The layers in 4 bits, each in the dtype of its weight before.
void put_decoded(const std::string& path, Net& model) {
  pacer::NamedTensors decoded;
  for (const auto& item : model->named_modules()) {
    const auto* layer = item.value()->as<pacer::modules::LinearImpl>();
    if (layer == nullptr || layer->nf4().is_empty()) continue;
    decoded[item.key()] = layer->nf4()->decode(layer->nf4()->dtype);
  }
  put(path, decoded);
}

void write_files(const std::string& folder) {
  torch::manual_seed(11);
  Net model;
  model->eval();
  pacer::save_weights(*model, folder + "/base.safetensors");  // nothing is in 4 bits yet
  const torch::Tensor x = torch::randn({5, 64});
  put(folder + "/input.safetensors", {{"x", x}});
  for (const bool doubly : {false, true}) {
    Net quantized;
    pacer::load_weights(*quantized, folder + "/base.safetensors");
    quantized->block->up->to(torch::kBFloat16);
    quantized->block->down->to(torch::kHalf);
    pacer::modules::quantize(
        *quantized, pacer::modules::Nf4Options().targets({"block.*", "extra"}).double_quantization(doubly));
    const std::string kind = doubly ? "nested" : "plain";
    pacer::save_weights(*quantized, folder + "/" + kind + ".safetensors");
    put_decoded(folder + "/" + kind + "-decoded.safetensors", quantized);
  }
  pacer::modules::add_lora_to(*model, pacer::modules::LoraOptions(4).alpha(6).dropout(0.1).rslora(true),
                              {"block.up", "down"});
  for (const auto& item : model->named_parameters()) {
    const torch::NoGradGuard no_grad;
    if (item.value().requires_grad()) item.value().normal_(0, 0.2);
  }
  model->eval();
  pacer::save_adapter(*model, folder + "/adapter");
  put(folder + "/logits.safetensors", {{"logits", model->forward(x)}});

  // Layers of different ranks and alphas, and a head that is trained beside them.
  Net beside;
  pacer::load_weights(*beside, folder + "/base.safetensors");
  pacer::modules::add_lora_to(*beside, {{"block.up", pacer::modules::LoraOptions(4).alpha(6)},
                                        {"block.down", pacer::modules::LoraOptions(2).alpha(5)},
                                        {"down", pacer::modules::LoraOptions(11).alpha(3)}});
  for (const torch::Tensor& parameter : beside->head->parameters()) parameter.requires_grad_(true);
  for (const auto& item : beside->named_parameters()) {
    const torch::NoGradGuard no_grad;
    if (item.value().requires_grad()) item.value().normal_(0, 0.2);
  }
  beside->eval();
  pacer::save_adapter(*beside, folder + "/adapter_beside");
  put(folder + "/logits_beside.safetensors", {{"logits", beside->forward(x)}});
}

void read_files(const std::string& folder) {
  const torch::Tensor x = get(folder + "/input.safetensors").at("x");
  Net model;
  pacer::load_weights(*model, folder + "/base.safetensors");
  pacer::load_adapter(*model, folder + "/peft_adapter");
  model->eval();
  put(folder + "/read-logits.safetensors", {{"logits", model->forward(x)}});
  Net beside;
  pacer::load_weights(*beside, folder + "/base.safetensors");
  pacer::load_adapter(*beside, folder + "/peft_beside");
  beside->eval();
  put(folder + "/read-logits_beside.safetensors", {{"logits", beside->forward(x)}});
  for (const char* kind : {"plain", "nested"}) {
    Net quantized;
    const std::string from = folder + "/bitsandbytes-" + kind;
    pacer::load_weights(*quantized, from + ".safetensors");
    put_decoded(folder + "/read-" + kind + "-decoded.safetensors", quantized);
    // An adapter over these weights, in fp32.
    pacer::load_adapter(*quantized, folder + "/adapter");
    quantized->eval();
    put(folder + "/read-" + kind + "-logits.safetensors", {{"logits", quantized->forward(x)}});
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc == 3 ? argv[1] : "";
  if (mode != "write" && mode != "read") {
    std::fprintf(stderr, "usage: peft_actor write|read FOLDER\n");
    return 2;
  }
  try {
    (mode == "write" ? write_files : read_files)(argv[2]);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
