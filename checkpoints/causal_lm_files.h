// A CausalLm in the folders of Hugging Face, from which Python's transformers takes Llama, Qwen2 and Qwen3: config.json
// beside model.safetensors, or beside model.safetensors.index.json and the files that it names.
//
//   pacer::modules::CausalLm model(pacer::causal_lm_options("hub/Qwen3-0.6B"));
//   pacer::load_causal_lm(*model, "hub/Qwen3-0.6B");
//   ...                                                  // trains
//   pacer::save_causal_lm(*model, "trained");            // AutoModelForCausalLM.from_pretrained("trained")
#pragma once

#include <cstdint>
#include <string>

#include <torch/arg.h>

#include <pacer/checkpoints/load_weights.h>
#include <pacer/modules/causal_lm.h>

namespace pacer {

// The options of the model in the folder, by its config.json. What does not change what the model computes (ids of
// tokens, the longest sequence, the dtype) is passed over.
//
// InvalidArgument that names the field for what CausalLm cannot do: another model_type, activation or kind of position,
// scaled positions, attention in a sliding window, dropout, other biases, weights in few bits, and fields that pacer does
// not know; FileError where the file is missing, damaged or has no sizes.
modules::CausalLmOptions causal_lm_options(const std::string& folder);

// Writes the weights of the folder to the model, as load_weights writes those of its files: values are converted to the
// model's dtype, and optimizers stay valid. Names in what it returns are those of the folder. inv_freq, which older
// files have for each layer, follows from theta and is passed over: it is among the unexpected names.
//
// InvalidArgument where config.json is not that of this model, for names that are missing or unexpected, for other
// shapes, and for a model with weights in 4 bits or a merged adapter; FileError as load_weights has it. Nothing was
// changed then.
LoadedWeights load_causal_lm(modules::CausalLmImpl& model, const std::string& folder);

struct SaveCausalLmOptions {
  // max_position_embeddings: the longest sequence that readers of the folder give the model, >= 1.
  TORCH_ARG(int64_t, max_positions) = 2048;
};

// Writes config.json and model.safetensors for transformers, in the dtype of the parameters. The folder is made where it
// is missing; each file appears whole or not at all, and weights never lie beside the config.json of another model. On
// several ranks one of them calls it, and the parameters must all be there. The tokenizer's files, generation_config.json
// and a window are not in it.
//
// InvalidArgument for a model with both qkv_bias and qk_norm, which no class of transformers has, for a Llama whose
// hidden is no multiple of heads, which transformers refuses, for weights in 4 bits, for an active adapter that is not
// merged, for a folder with model.safetensors.index.json, for parameters that are not all Float, BFloat16 or Half, and
// for max_positions below 1; FileError where a file cannot be written.
void save_causal_lm(modules::CausalLmImpl& model, const std::string& folder,
                    const SaveCausalLmOptions& options = {});

}  // namespace pacer
