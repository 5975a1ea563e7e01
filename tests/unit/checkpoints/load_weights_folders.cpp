// load_weights from what Hugging Face and bitsandbytes write: folders with an index, and weights in 4 bits.
// What does not fit is refused in one sentence and changes nothing.
#include <cmath>
#include <filesystem>

#include <pacer/checkpoints/load_weights.h>
#include <pacer/files/crc32c.h>

#include "support/catch.h"
#include "support/checkpoints/failed_loads.h"
#include "support/checkpoints/weight_files.h"
#include "support/message_of.h"
#include "support/samples.h"

namespace pacer::testing::load_weights_folders {
namespace {

const std::string kBitsandbytes = std::string(PACER_TEST_DATA) + "/bitsandbytes.safetensors";

template <class Net>
void check_refused(Net& model, const std::string& path, const Names& parts,
                   const LoadWeightsOptions& options = {}) {
  check_load_fails(*model, parts, [&] { load_weights(*model, path, options); });
}

uint32_t crc_of(const Tensor& tensor) {
  const Tensor dense = tensor.contiguous();
  return crc32c({static_cast<const char*>(dense.const_data_ptr()), dense.nbytes()});
}

// Values of a FileNet in two files and an index, as Hugging Face writes it.
NamedTensors put_shards(const std::string& folder) {
  std::filesystem::create_directories(folder);
  torch::manual_seed(3);
  const FileNet source;
  NamedTensors first, second, all = state_of_model(*source).values;
  std::string map;
  for (const auto& [name, value] : all) {
    const bool to_first = name < "down";
    (to_first ? first : second)[name] = value;
    map += (map.empty() ? "" : ", ") + ("\"" + name + "\": \"model-0000" + (to_first ? "1" : "2")) +
           "-of-00002.safetensors\"";
  }
  put_tensors_in(folder + "/model-00001-of-00002.safetensors", first, {{"format", "pt"}});
  put_tensors_in(folder + "/model-00002-of-00002.safetensors", second, {{"format", "pt"}});
  put_content(
      folder + "/model.safetensors.index.json",
      R"({"metadata": {"total_size": 1, "more": [1.5e3, {"a": null}]}, "weight_map": {)" + map + "}}\n");
  return all;
}

std::string first_other(const torch::nn::Module& model, const NamedTensors& wanted) {
  for (const auto& [name, value] : wanted) {
    if (!same_bits(detail::model_tensors(model).at(name), value)) return name;
  }
  return "";
}

}  // namespace

TEST_CASE("weights come from a folder of Hugging Face, in one file or by its index", "[load_weights]") {
  const TemporaryFolder folder;
  const NamedTensors wanted = put_shards(folder.path("shards"));
  FileNet model;
  const LoadedWeights loaded = load_weights(*model, folder.path("shards"));
  CHECK(loaded.loaded.size() == wanted.size());
  CHECK((loaded.missing.empty() && loaded.unexpected.empty()));
  CHECK(loaded.file == folder.path("shards"));
  CHECK(first_other(*model, wanted) == "");

  // model.safetensors goes before the index, as in Python, and links are followed, as its cache has them.
  put_tensors_in(folder.path("blob"), wanted);
  std::filesystem::create_directory(folder.path("whole"));
  std::filesystem::create_symlink("../blob", folder.path("whole/model.safetensors"));
  put_content(folder.path("whole/model.safetensors.index.json"), "{}");
  FileNet other;
  CHECK(load_weights(*other, folder.path("whole/")).file == folder.path("whole/") + "/model.safetensors");
  CHECK(first_other(*other, wanted) == "");
}

TEST_CASE("a folder whose index and files do not agree is refused", "[load_weights]") {
  const TemporaryFolder folder;
  const std::string path = folder.path("hub"), index = path + "/model.safetensors.index.json",
                    second = path + "/model-00002-of-00002.safetensors";
  FileNet model;
  const auto anew = [&] {
    std::filesystem::remove_all(path);
    return put_shards(path);
  };
  const auto with = [&](const std::string& from, const std::string& to) {
    anew();
    std::string text = content_of(index);
    text.replace(text.find(from), from.size(), to);
    put_content(index, text);
  };
  anew();
  std::filesystem::remove(second);
  check_refused(model, path, {"model-00002-of-00002.safetensors", "not there", "all of the 2 files"});
  anew();
  std::filesystem::resize_file(second, std::filesystem::file_size(second) - 1);
  check_refused(model, path, {second});
  with("\"head.bias\": ", "\"head.bios\": ");
  check_refused(model, path, {"head.bios", "but it is not"});
  with(", \"steps\": \"model-00002-of-00002.safetensors\"", "");
  check_refused(model, path, {"does not name \"steps\"", "model-00002"});
  with("\"steps\": \"model-00002", "\"steps\": \"model-00001");
  check_refused(model, path, {"\"steps\" is in \"model-00001"});
  {  // In both files, of which the index names one.
    NamedTensors tensors = tensors_in(second);
    tensors["block.up.bias"] = torch::zeros({96});
    anew();
    put_tensors_in(second, tensors);
    check_refused(model, path, {"does not say that \"block.up.bias\" is in \"model-00002"});
  }
  for (const char* outside :
       {"../model.safetensors", "/etc/passwd", "sub/model.safetensors", "..", ".", "", "a\\u0000b"}) {
    with("\"steps\": \"model-00002-of-00002.safetensors\"", std::string("\"steps\": \"") + outside + "\"");
    check_refused(model, path, {"\"steps\" is said to be in", "not the name of a file"});
  }
  with("\"steps\": ", "\"head.bias\": ");
  check_refused(model, path, {"\"head.bias\" occurs twice"});
  with("\"weight_map\"", "\"weight_mop\"");
  check_refused(model, path, {"names no file"});
  with("{\"metadata\"", "{\"weight_map\": {}, \"metadata\"");
  check_refused(model, path, {"a second \"weight_map\""});
  anew();
  const std::string text = content_of(index);
  for (size_t length = 0; length + 1 < text.size(); length += 7) {
    put_content(index, text.substr(0, length));
    check_refused(model, path, {index});
  }
  std::filesystem::remove(index);
  check_refused(model, path, {"no checkpoint", "model.safetensors"});
}

TEST_CASE("weights in 4 bits that bitsandbytes wrote are decoded to its bits", "[load_weights][nf4]") {
  // As bitsandbytes 0.49.2 decodes them, see tests/data/make_fixtures.py.
  PeerNet model;
  const LoadedWeights loaded = load_weights(*model, kBitsandbytes);
  CHECK(loaded.loaded == Names{"nested.weight", "plain.bias", "plain.weight", "small.weight"});
  CHECK((loaded.missing.empty() && loaded.unexpected.empty()));
  const auto check = [](const modules::Linear& layer, at::ScalarType dtype, bool nested, uint32_t crc) {
    REQUIRE_FALSE(layer->nf4().is_empty());
    const modules::Nf4WeightImpl& weight = *layer->nf4();
    CHECK(weight.dtype == dtype);
    CHECK(weight.double_quantization == nested);
    CHECK(crc_of(weight.decode(dtype)) == crc);
    CHECK(same_bits(weight.decode(dtype), decoded_by_hand(weight)));
  };
  check(model->plain, at::kFloat, false, 0xf19c2a38);
  check(model->nested, at::kBFloat16, true, 0x01227718);
  check(model->small, at::kHalf, true, 0x0783b318);
  for (const auto& parameter : model->named_parameters()) CHECK(parameter.key() == "plain.bias");

  // Into layers that are in 4 bits already, and once more.
  PeerNet other;
  modules::quantize(*other, modules::Nf4Options().targets({"*"}).double_quantization(false));
  load_weights(*other, kBitsandbytes);
  load_weights(*other, kBitsandbytes);
  CHECK(first_other(*other, state_of_model(*model).values) == "");
  CHECK(state_of_model(*other).values.size() == state_of_model(*model).values.size());
}

TEST_CASE("4 bits of another kind, or that do not fit, are refused by name", "[load_weights][nf4]") {
  const TemporaryFolder folder;
  const std::string path = folder.path("weights.safetensors");
  const NamedTensors sound = tensors_in(kBitsandbytes);
  const std::string state = "quant_state.bitsandbytes__nf4";
  PeerNet model;
  const auto anything = LoadWeightsOptions().allow_missing(true).allow_unexpected(true);
  const auto check = [&](const std::function<void(NamedTensors&)>& edit, const Names& parts) {
    NamedTensors tensors = sound;
    edit(tensors);
    put_tensors_in(path, tensors);
    check_refused(model, path, parts);
    check_refused(model, path, parts, anything);
  };
  const auto check_json = [&](const std::string& layer, const std::string& from, const std::string& to,
                              const Names& parts) {
    CAPTURE(from, to);
    check(
        [&](NamedTensors& tensors) {
          std::string text = text_of(tensors.at(layer + ".weight." + state));
          REQUIRE(text.find(from) != std::string::npos);
          text.replace(text.find(from), from.size(), to);
          tensors[layer + ".weight." + state] = text_tensor(text);
        },
        parts);
  };
  const auto drop = [](const std::string& name) {
    return [name](NamedTensors& tensors) { tensors.erase(name); };
  };
  const auto put = [](const std::string& name, const Tensor& value) {
    return [name, value](NamedTensors& tensors) { tensors[name] = value; };
  };
  // Parts: all, none left over, of the right sizes and dtypes.
  for (const std::string part : {"absmax", "quant_map", "nested_absmax", "nested_quant_map"}) {
    check(drop("nested.weight." + part), {"nested.weight", "it has no", part});
  }
  check(drop("nested.weight"), {"it has no \"nested.weight\""});
  check(put("nested.weight.nested_offset", torch::ones({})), {"nested_offset", "no part"});
  check(put("plain.weight.nested_absmax", torch::ones({1})), {"plain.weight.nested_absmax", "not quantised"});
  check(put("plain.weight.absmax", torch::ones({3})), {"plain.weight.absmax", "[3]", "[6]", "blocks of 64"});
  check(put("plain.weight", torch::zeros({96, 1}, torch::kBFloat16)), {"plain.weight", "BF16", "U8"});
  check(put("plain.weight", torch::zeros({1, 192}, torch::kByte)), {"plain.weight", "[1, 192]"});
  check(put("nested.weight.nested_absmax", torch::ones({3})), {"nested_absmax", "[3]", "[2]"});
  check(put("plain.weight." + state, torch::ones({76})), {"not a row of U8"});
  check(
      [&](NamedTensors& tensors) {
        tensors["plain.weight.quant_state.bitsandbytes__fp4"] = tensors["plain.weight." + state];
        tensors.erase("plain.weight." + state);
      },
      {"plain.weight", "\"fp4\"", "nf4 alone"});
  check(
      [&](NamedTensors& tensors) {
        tensors["plain.weight.quant_state.bitsandbytes__fp4"] = tensors["plain.weight." + state];
      },
      {"plain.weight", "nf4 alone"});
  // Values.
  Tensor book = sound.at("plain.weight.quant_map").clone();
  book[3] = std::nextafter(book[3].item<float>(), 0.f);
  check(put("plain.weight.quant_map", book), {"plain.weight.quant_map", "16 values of NF4"});
  const float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
  check(put("plain.weight.absmax", torch::full({6}, nan)), {"plain.weight.absmax", "not finite"});
  check(put("nested.weight.nested_absmax", torch::full({2}, inf)), {"nested_absmax", "not finite"});
  check(put("nested.weight.nested_quant_map", torch::full({256}, -inf)), {"nested_quant_map", "not finite"});
  // The text.
  check_json("plain", "nf4", "fp4", {"plain.weight", "\"fp4\""});
  check_json("plain", "64", "128", {"plain.weight", "blocks of 128"});
  check_json("plain", "float32", "int8", {"plain.weight", "\"int8\""});
  check_json("plain", "[6, 64]", "[64, 6]", {"plain.weight", "[64, 6]", "[6, 64]"});
  check_json("plain", "[6, 64]", "[1,1,1,1,1,1,1,1,1]", {"8 dimensions"});
  check_json("plain", "\"shape\"", "\"shade\"", {"\"shade\"", "not known"});
  check_json("plain", "\"dtype\": \"float32\", ", "", {"lacks its"});
  check_json("plain", "\"dtype\"", "\"quant_type\"", {"occurs twice"});
  check_json("plain", "}", ", \"nested_blocksize\": 256}", {"lacks one of"});
  check_json("nested", "256", "512", {"nested.weight", "512", "scales"});
  check_json("nested", "\"nested_dtype\": \"float32\"", "\"nested_dtype\": \"float16\"", {"\"float16\""});
  check_json("nested", "\"nested_offset\": ", "\"nested_offset\": 1e300, \"x\": ", {"not known"});
  check_json("nested", "\"nested_offset\": ", "\"nested_offset\": 1e", {"nested.weight"});
  check_json("nested", "\"nested_offset\": ", "\"nested_offset\": NaN, \"x\": ", {"expected a number"});
  check_json("nested", ", \"nested_blocksize\": 256, \"nested_dtype\": \"float32\"", "", {"lacks one of"});
}

TEST_CASE("4 bits go into layers of pacer that can have them, and into no other", "[load_weights][nf4]") {
  const TemporaryFolder folder;
  const auto anything = LoadWeightsOptions().allow_missing(true).allow_unexpected(true);
  struct ForeignImpl : torch::nn::Module {
    ForeignImpl() {
      plain = register_module("plain", torch::nn::Linear(64, 6));
      nested = register_module("nested", modules::Linear(torch::nn::LinearOptions(128, 132).bias(false)));
      small = register_module("small", modules::Linear(torch::nn::LinearOptions(64, 2).bias(false)));
    }
    torch::nn::Linear plain = nullptr;
    modules::Linear nested = nullptr, small = nullptr;
  };
  auto foreign = std::make_shared<ForeignImpl>();
  check_refused(foreign, kBitsandbytes, {"\"plain\" is no pacer::modules::Linear"}, anything);

  // Layers that the model lacks are unexpected, and can be passed over.
  struct Part : torch::nn::Module {
    Part() { plain = register_module("plain", modules::Linear(64, 6)); }
    modules::Linear plain = nullptr;
  };
  auto part = std::make_shared<Part>();
  check_refused(part, kBitsandbytes, {"the model has no", "nested.weight"});
  const LoadedWeights loaded = load_weights(*part, kBitsandbytes, anything);
  CHECK(loaded.loaded == Names{"plain.bias", "plain.weight"});
  CHECK(loaded.unexpected.size() == 12);

  // On the stack, where a module has no shared_ptr, and the layer itself.
  Part on_stack;
  load_weights(on_stack, kBitsandbytes, anything);
  CHECK(same_bits(on_stack.plain->nf4()->codes, part->plain->nf4()->codes));
  NamedTensors tensors;
  for (const auto& [name, value] : tensors_in(kBitsandbytes)) {
    if (name.compare(0, 6, "plain.") == 0) tensors[name.substr(6)] = value;
  }
  put_tensors_in(folder.path("layer"), tensors);
  modules::Linear layer(64, 6);
  CHECK(load_weights(*layer, folder.path("layer")).loaded == Names{"bias", "weight"});
  CHECK(same_bits(layer->nf4()->codes, part->plain->nf4()->codes));

  // Merged adapters and tied weights.
  PeerNet merged;
  modules::add_lora(*merged, modules::LoraOptions(1).targets({"plain"}));
  modules::merge(*merged);
  check_refused(merged, kBitsandbytes, {"plain", "merged"}, anything);
}

TEST_CASE("a layer in 4 bits takes no 16-bit weight, and the other way round", "[load_weights][nf4]") {
  const TemporaryFolder folder;
  const std::string plain = folder.path("plain"), four = folder.path("four");
  const auto anything = LoadWeightsOptions().allow_missing(true).allow_unexpected(true);
  FileNet model;
  put_tensors_in(plain, state_of_model(*model).values);
  modules::quantize(*model, modules::Nf4Options().targets({"block.*"}));
  check_refused(model, plain, {"\"block.down.weight\" is F32 there", "load the weights first", "after"});
  check_refused(model, plain, {"\"block.down.weight\" is F32 there"}, anything);

  // pacer's own names, as checkpoints have them.
  const ModelState quantized = state_of_model(*model);
  REQUIRE(quantized.values.count("block.up.weight.codes") == 1);
  put_tensors_in(four, quantized.values);
  FileNet other;
  check_refused(other, four, {"\"block.down.weight\" is in 4 bits there", "quantize the model first"});
  check_refused(other, four, {"\"block.down.weight\" is in 4 bits there"}, anything);
  modules::quantize(*other, modules::Nf4Options().targets({"block.*"}));
  const LoadedWeights loaded = load_weights(*other, four);
  CHECK(loaded.loaded.size() == quantized.values.size());
  CHECK(first_other(*other, quantized.values) == "");
  NamedTensors partial = quantized.values;
  partial.erase("block.up.weight.codes");
  put_tensors_in(four, partial);
  check_refused(other, four, {"\"block.up.weight\"", "4 of 5 parts"}, anything);
  for (const char* part : {"absmax", "nested_absmax", "nested_quant_map"}) {
    partial.erase(std::string("block.up.weight.") + part);
  }
  put_tensors_in(four, partial);
  check_refused(other, four, {"\"block.up.weight\"", "1 of 5 parts"}, anything);
}

TEST_CASE("a file with 4 bits that is cut or changed anywhere is refused or loaded, and never half loaded",
          "[load_weights][nf4]") {
  const TemporaryFolder folder;
  const std::string path = folder.path("weights.safetensors"), sound = content_of(kBitsandbytes);
  PeerNet model;
  for (size_t length = 0; length < sound.size(); length += 97) {
    put_content(path, sound.substr(0, length));
    check_refused(model, path, {path});
  }
  Samples samples(5);
  int refused = 0;
  for (int i = 0; i < 300; ++i) {
    std::string bytes = sound;
    const int64_t header = 1600;  // where most flips matter
    const int64_t at =
        samples.chance(0.6) ? samples.below(header) : samples.below(static_cast<int64_t>(bytes.size()));
    bytes[static_cast<size_t>(at)] ^= static_cast<char>(1 << samples.below(8));
    put_content(path, bytes);
    PeerNet target;
    const ModelState before = state_of_model(*target);
    if (message_of<Error>([&] { load_weights(*target, path); }).empty()) continue;
    ++refused;
    REQUIRE(changed_since(*target, before) == "");
  }
  CHECK(refused > 100);
}

}  // namespace pacer::testing::load_weights_folders
