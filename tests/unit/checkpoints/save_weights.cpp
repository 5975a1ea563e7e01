// save_weights: what it writes is what bitsandbytes would, and comes back to the bit.
#include <filesystem>
#include <limits>

#include <nlohmann/json.hpp>

#include <pacer/checkpoints/load_weights.h>
#include <pacer/checkpoints/save_weights.h>
#include <pacer/files/safetensors.h>

#include "support/catch.h"
#include "support/checkpoints/weight_files.h"
#include "support/message_of.h"

namespace pacer::testing::save_weights_file {
namespace {

using Catch::Matchers::ContainsSubstring;

const std::string kState = ".weight.quant_state.bitsandbytes__nf4";

}  // namespace

TEST_CASE("what bitsandbytes wrote is written again as it was", "[nf4][save_weights]") {
  const TemporaryFolder folder;
  const std::string fixture = std::string(PACER_TEST_DATA) + "/bitsandbytes.safetensors",
                    again = folder.path("a/b/again");
  PeerNet model;
  load_weights(*model, fixture);
  save_weights(*model, again);
  const NamedTensors wanted = tensors_in(fixture), found = tensors_in(again);
  CHECK(found.size() == wanted.size());
  for (const auto& [name, value] : wanted) {
    CAPTURE(name);
    REQUIRE(found.count(name) == 1);
    if (name.find("quant_state") == std::string::npos) {
      CHECK(same_bits(found.at(name), value));
    } else {
      CHECK(nlohmann::json::parse(text_of(found.at(name))) == nlohmann::json::parse(text_of(value)));
      CHECK(found.at(name).scalar_type() == at::kByte);
    }
  }
  FileReader reader(posix_file_system(), again);
  CHECK(SafetensorsFile::read_header(reader, again).metadata().at("format") == "pt");
  CHECK_FALSE(std::filesystem::exists(again + ".new"));
}

TEST_CASE("a quantised model comes back to the bit into one that is not, without its adapters",
          "[nf4][save_weights]") {
  const TemporaryFolder folder;
  for (const bool doubly : {true, false}) {
    CAPTURE(doubly);
    FileNet model;
    model->block->up->to(at::kBFloat16);
    modules::quantize(*model, modules::Nf4Options().targets({"block.*"}).double_quantization(doubly));
    const ModelState wanted = state_of_model(*model);
    modules::add_lora(*model, modules::LoraOptions(2).targets({"block.up", "down"}).name("mine"));
    save_weights(*model, folder.path("file"));
    for (const auto& item : tensors_in(folder.path("file")))
      CHECK(item.first.find("lora") == std::string::npos);
    FileNet other;
    other->block->up->to(at::kBFloat16);
    const LoadedWeights loaded = load_weights(*other, folder.path("file"));
    CHECK((loaded.missing.empty() && loaded.unexpected.empty()));
    const ModelState found = state_of_model(*other);
    CHECK(found.values.size() == wanted.values.size());
    for (const auto& [name, value] : wanted.values) {
      CAPTURE(name);
      CHECK(same_bits(found.values.at(name), value));
    }
    CHECK(other->block->up->nf4()->dtype == at::kBFloat16);
    CHECK(other->block->down->nf4()->dtype == at::kFloat);
    // Over the file of before.
    save_weights(*other, folder.path("file"));
    load_weights(*other, folder.path("file"));
  }
}

TEST_CASE("offsets of any size are written so that they read back to their bits", "[nf4][save_weights]") {
  const TemporaryFolder folder;
  modules::Linear layer(torch::nn::LinearOptions(64, 2).bias(false));
  modules::Nf4Weight weight(2, 64, at::kFloat, true);
  layer->set_nf4(weight);
  for (const float offset : {0.f, -0.f, 0.03f, 1e-30f, 123456.79f, std::numeric_limits<float>::denorm_min(),
                             std::numeric_limits<float>::max(), 16777216.f}) {
    CAPTURE(offset);
    weight->nested_offset.fill_(offset);
    save_weights(*layer, folder.path("file"));
    modules::Linear other(torch::nn::LinearOptions(64, 2).bias(false));
    load_weights(*other, folder.path("file"));
    CHECK(same_bits(other->nf4()->nested_offset, weight->nested_offset));
  }
}

TEST_CASE("models without 4 bits, on the stack, and empty layers are written, too", "[nf4][save_weights]") {
  const TemporaryFolder folder;
  struct Net : torch::nn::Module {
    Net() { layer = register_module("layer", modules::Linear(0, 4)); }
    modules::Linear layer = nullptr;
  };
  Net model;
  save_weights(model, folder.path("file"));
  CHECK(tensors_in(folder.path("file")).size() == 2);
  CHECK(load_weights(model, folder.path("file")).loaded.size() == 2);
}

TEST_CASE("what bitsandbytes cannot read is not written", "[nf4][save_weights]") {
  const TemporaryFolder folder;
  const std::string path = folder.path("file");
  put_content(path, "what was there");
  const auto check = [&](torch::nn::Module& model, const std::string& file, const std::string& part) {
    CHECK_THAT(message_of<Error>([&] { save_weights(model, file); }), ContainsSubstring(part));
    CHECK(content_of(path) == "what was there");
    CHECK_FALSE(std::filesystem::exists(path + ".new"));
  };
  modules::Linear odd(torch::nn::LinearOptions(5, 3).bias(false));
  odd->set_nf4(modules::Nf4Weight(3, 5, at::kFloat, false));
  check(*odd, path, "odd number");
  modules::Linear wide(torch::nn::LinearOptions(4, 4).bias(false));
  wide->set_nf4(modules::Nf4Weight(4, 4, at::kDouble, false));
  check(*wide, path, "Double");
  check(*wide, "", "name of a file");
  check(*wide, folder.path("x/"), "name of a file");
  modules::Linear strange(torch::nn::LinearOptions(4, 4).bias(false));
  strange->register_buffer("phase", torch::zeros({2}, torch::kComplexDouble));
  check(*strange, path, "ComplexDouble");
  modules::Linear sound(4, 4);
  CHECK_THAT(message_of<Error>([&] { save_weights(*sound, path + "/below"); }), ContainsSubstring(path));
}

}  // namespace pacer::testing::save_weights_file
