// What causal_lm_files.py exchanges models with: a program that loads, trains and saves a CausalLm as a user would.
//
//   causal_lm_actor read FOLDER BATCH OUT   the model in FOLDER: logits, loss and gradients of a batch, to the file OUT
//   causal_lm_actor adapted FOLDER ADAPTER BATCH OUT   logits of the model in FOLDER with the adapter in ADAPTER
//   causal_lm_actor write FOLDER            models of each kind in folders below it, each with ids and logits, and with an
//                                           adapter and logits with it in a folder below
#include <cstdio>
#include <exception>
#include <string>
#include <utility>

#include <torch/utils.h>

#include <pacer/checkpoints/adapter_files.h>
#include <pacer/checkpoints/causal_lm_files.h>
#include <pacer/checkpoints/detail/tensor_file.h>
#include <pacer/files/file_system.h>
#include <pacer/modules/causal_lm.h>
#include <pacer/modules/lora.h>

namespace {

using pacer::modules::CausalLm;
using pacer::modules::CausalLmOptions;

void put(const std::string& path, const pacer::NamedTensors& tensors) {
  pacer::FileWriter out(pacer::posix_file_system(), path);
  pacer::detail::write_tensors(out, tensors);
  out.finish();
}

pacer::NamedTensors get(const std::string& path) {
  pacer::FileReader reader(pacer::posix_file_system(), path);
  return pacer::detail::read_tensors(reader, path);
}

void read_model(const std::string& folder, const std::string& batch_file, const std::string& out) {
  CausalLm model(pacer::causal_lm_options(folder));
  pacer::load_causal_lm(*model, folder);
  const pacer::NamedTensors batch = get(batch_file);
  pacer::NamedTensors found;
  found["logits"] = model->forward(batch.at("ids")).detach();
  const auto loss = model->loss(batch.at("ids"), batch.at("targets"));
  loss.backward();
  found["loss"] = loss.detach();
  for (const auto& item : model->named_parameters()) found["gradient." + item.key()] = item.value().grad();
  put(out, found);
}

void read_adapted(const std::string& folder, const std::string& adapter, const std::string& batch_file,
                  const std::string& out) {
  CausalLm model(pacer::causal_lm_options(folder));
  pacer::load_causal_lm(*model, folder);
  pacer::load_adapter(*model, adapter);
  put(out, {{"logits", model->forward(get(batch_file).at("ids")).detach()}});
}

// The model in the folder with an adapter, to a folder below, and its logits.
void write_adapted(const std::string& folder, const torch::Tensor& ids) {
  CausalLm model(pacer::causal_lm_options(folder));
  pacer::load_causal_lm(*model, folder);
  pacer::modules::add_lora(*model, pacer::modules::LoraOptions(3).alpha(5).targets({"layers.**"}));
  for (const auto& item : pacer::modules::trainable(*model)) item.value().normal_(0, 0.2);
  pacer::save_adapter(*model, folder + "/adapter");
  put(folder + "/adapter/logits", {{"logits", model->forward(ids)}});
}

void write_models(const std::string& folder) {
  const auto common = CausalLmOptions(56, 32, 2, 4).ffn(48).kv_heads(2).theta(300).eps(1e-4);
  const std::pair<const char*, CausalLmOptions> kinds[] = {
      {"llama", CausalLmOptions(common).head_dim(16)},
      {"llama_3.1",
       CausalLmOptions(common).scaling(
           pacer::modules::RotaryScaling().factor(4).high_frequency_factor(2.2).original_length(24))},
      {"qwen2", CausalLmOptions(common).qkv_bias(true).tied(true)},
      {"qwen2_wide", CausalLmOptions(common).qkv_bias(true).head_dim(16).kv_heads(1)},
      {"qwen3", CausalLmOptions(common).qk_norm(true).tied(true)}};
  for (const auto& [kind, options] : kinds) {
    torch::manual_seed(7);
    CausalLm model(options);
    const torch::NoGradGuard no_grad;
    for (torch::Tensor& parameter : model->parameters()) {
      parameter.normal_(parameter.dim() == 2 ? 0 : 0.7, parameter.dim() == 2 ? 0.2 : 0.4);
    }
    const std::string to = folder + "/" + kind;
    pacer::save_causal_lm(*model, to, pacer::SaveCausalLmOptions().max_positions(64));
    const auto ids = torch::randint(56, {3, 20}, torch::kLong);
    put(to + "/logits", {{"ids", ids}, {"logits", model->forward(ids)}});
    write_adapted(to, ids);
    model->to(torch::kBFloat16);
    pacer::save_causal_lm(*model, to + "_bf16");
    put(to + "_bf16/logits", {{"ids", ids}, {"logits", model->forward(ids).to(torch::kFloat)}});
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "";
  try {
    if (mode == "read" && argc == 5) {
      read_model(argv[2], argv[3], argv[4]);
    } else if (mode == "adapted" && argc == 6) {
      read_adapted(argv[2], argv[3], argv[4], argv[5]);
    } else if (mode == "write" && argc == 3) {
      write_models(argv[2]);
    } else {
      std::fprintf(
          stderr,
          "usage: causal_lm_actor read FOLDER BATCH OUT | adapted FOLDER ADAPTER BATCH OUT | write FOLDER\n");
      return 2;
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
