// What peft_files.py exchanges files with: a program that saves and loads as a user of adapters and of
// weights in 4 bits would.
//
//   peft_actor write FOLDER    a base model, an adapter and what the model with it computes; layers in 4 bits
//                              with and without double quantisation, and what they decode to; a model of
//                              convolutions and an embedding with two adapters at once, and with DoRA
//   peft_actor read FOLDER [KIND...]
//                              the same of files that Python wrote there; those of bitsandbytes are of these kinds
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <pacer/checkpoints/adapter_files.h>
#include <pacer/checkpoints/detail/tensor_file.h>
#include <pacer/checkpoints/load_weights.h>
#include <pacer/checkpoints/save_weights.h>
#include <pacer/files/file_system.h>
#include <pacer/modules/convolution.h>
#include <pacer/modules/embedding.h>
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

// ids [N, 12] -> [N, 8], through every kind of layer that takes an adapter.
struct WideImpl : torch::nn::Module {
  WideImpl() {
    namespace nn = torch::nn;
    colours = register_module("colours", pacer::modules::Embedding(9, 4));
    line = register_module("line", pacer::modules::Conv1d(nn::Conv1dOptions(4, 6, 3).padding(1)));
    plane = register_module("plane", pacer::modules::Conv2d(nn::Conv2dOptions(6, 6, 3).padding(1).groups(2)));
    space = register_module("space", pacer::modules::Conv3d(nn::Conv3dOptions(3, 4, 2).bias(false)));
    down = register_module("down", pacer::modules::Linear(24, 10));
    head = register_module("head", pacer::modules::Linear(10, 8));
  }
  torch::Tensor forward(const torch::Tensor& ids) {
    torch::Tensor x = line(colours(ids).transpose(1, 2)).tanh();
    x = plane(x.view({-1, 6, 3, 4})).tanh();
    x = space(x.view({-1, 3, 2, 3, 4})).tanh();
    return head(down(x.flatten(1)).tanh());
  }
  pacer::modules::Embedding colours = nullptr;
  pacer::modules::Conv1d line = nullptr;
  pacer::modules::Conv2d plane = nullptr;
  pacer::modules::Conv3d space = nullptr;
  pacer::modules::Linear down = nullptr, head = nullptr;
};
TORCH_MODULE(Wide);

template <class Model>
void randomize_trained(Model& model) {
  for (const auto& item : model->named_parameters()) {
    const torch::NoGradGuard no_grad;
    if (item.value().requires_grad()) item.value().normal_(0, 0.4);
  }
}

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

void write_wide(const std::string& folder) {
  Wide base;
  pacer::save_weights(*base, folder + "/wide.safetensors");
  const torch::Tensor ids = torch::randint(9, {5, 12});
  put(folder + "/ids.safetensors", {{"ids", ids}});
  Wide model;
  pacer::load_weights(*model, folder + "/wide.safetensors");
  pacer::modules::add_lora_to(*model, pacer::modules::LoraOptions(4).alpha(6),
                              {"colours", "line", "plane", "space", "down", "head"});
  randomize_trained(model);
  put(folder + "/logits_wide.safetensors", {{"logits", model->forward(ids)}});
  pacer::modules::add_lora_to(*model, pacer::modules::LoraOptions(2).alpha(3).name("second"),
                              {"colours", "plane", "down"});
  randomize_trained(model);
  pacer::modules::set_adapters(*model, {"default", "second"});
  pacer::save_adapter(*model, folder + "/wide_first");
  pacer::save_adapter(*model, folder + "/wide_second", "second");
  put(folder + "/logits_two.safetensors", {{"logits", model->forward(ids)}});
  Wide directed;
  pacer::load_weights(*directed, folder + "/wide.safetensors");
  pacer::modules::add_lora_to(*directed, pacer::modules::LoraOptions(3).alpha(5).dora(true),
                              {"down", "head"});
  randomize_trained(directed);
  pacer::save_adapter(*directed, folder + "/wide_dora");
  put(folder + "/logits_dora.safetensors", {{"logits", directed->forward(ids)}});
}

void read_wide(const std::string& folder) {
  const torch::Tensor ids = get(folder + "/ids.safetensors").at("ids");
  Wide model;
  pacer::load_weights(*model, folder + "/wide.safetensors");
  pacer::load_adapter(*model, folder + "/peft_wide");
  put(folder + "/read-logits_wide.safetensors", {{"logits", model->forward(ids)}});
  pacer::load_adapter(*model, folder + "/peft_second", pacer::LoadAdapterOptions().name("second"));
  pacer::modules::set_adapters(*model, {"default", "second"});
  put(folder + "/read-logits_two.safetensors", {{"logits", model->forward(ids)}});
  Wide directed;
  pacer::load_weights(*directed, folder + "/wide.safetensors");
  pacer::load_adapter(*directed, folder + "/peft_dora");
  put(folder + "/read-logits_dora.safetensors", {{"logits", directed->forward(ids)}});
}

void read_files(const std::string& folder, const std::vector<std::string>& kinds) {
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
  for (const std::string& kind : kinds) {
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
  const std::string mode = argc >= 3 ? argv[1] : "";
  if (mode != "read" && (mode != "write" || argc > 3)) {
    std::fprintf(stderr, "usage: peft_actor write FOLDER, or peft_actor read FOLDER [KIND...]\n");
    return 2;
  }
  try {
    if (mode == "write") {
      write_files(argv[2]);
      write_wide(argv[2]);
    } else {
      read_files(argv[2], {argv + 3, argv + argc});
      read_wide(argv[2]);
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
