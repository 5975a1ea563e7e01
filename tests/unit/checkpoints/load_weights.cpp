// load_weights: from checkpoints, from plain files and from what Python wrote; what does not fit is refused
// by name and changes nothing.
#include <string_view>

#include <torch/nn/modules/batchnorm.h>

#include <pacer/checkpoints/detail/tensor_file.h>
#include <pacer/checkpoints/load_weights.h>
#include <pacer/files/checkpoint_folder.h>

#include "support/catch.h"
#include "support/session/small_run.h"
#include "support/temporary_folder.h"

namespace pacer::testing {
namespace {

using WeightNames = std::vector<std::string>;

// What Python's package wrote (safetensors 0.8.0): save({"weight": bfloat16 [[1, 2, 3], [4, 5, 6]],
// "bias": float32 [0.5, -0.25]}, metadata={"format": "pt"}).
constexpr std::string_view kFromPython(
    "\x98\0\0\0\0\0\0\0"
    R"({"__metadata__":{"format":"pt"},"bias":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
    R"("weight":{"dtype":"BF16","shape":[2,3],"data_offsets":[8,20]}}  )"
    "\0\0\0?\0\0\x80\xbe\x80?\0@@@\x80@\xa0@\xc0@",
    180);

void put_tensors(const std::string& path, const NamedTensors& tensors) {
  FileWriter out(posix_file_system(), path);
  detail::write_tensors(out, tensors);
  out.finish();
}

NamedTensors weights_of(const torch::nn::Module& model) {
  NamedTensors values;
  for (const auto& [name, tensor] : detail::model_tensors(model)) values[name] = tensor.detach().clone();
  return values;
}

// Loading must fail with these parts in the message and change nothing.
void check_load_refused(torch::nn::Module& model, const std::string& path, const WeightNames& parts,
                        const LoadWeightsOptions& options = {}) {
  const NamedTensors before = weights_of(model);
  const std::string message = refusal([&] { load_weights(model, path, options); });
  for (const std::string& part : parts) {
    CAPTURE(message, part);
    CHECK(contains(message, part));
  }
  CHECK(first_difference(weights_of(model), before) == "");
}

}  // namespace

TEST_CASE("weights come from a checkpoint, from the newest of a folder, and from its file",
          "[resume][checkpoint][load_weights]") {
  const TemporaryFolder folder;
  SmallRun run(all_optimizers().front(), {});
  run.session->use(Checkpoints(CheckpointsOptions(folder.path()).every(1)));
  std::vector<NamedTensors> after = {weights_of(*run.model)};
  for (int step = 0; step < 3; ++step) {
    run.step();
    after.push_back(weights_of(*run.model));
  }
  run.finish();
  const std::string second = folder.path("step-0000000002");
  for (const auto& [path, step] : std::vector<std::pair<std::string, size_t>>{
           {folder.path(), 3}, {second, 2}, {second + "/", 2}, {second + "/model.safetensors", 2}}) {
    CAPTURE(path);
    SmallModel model = small_model();
    std::vector<const void*> memory;
    for (const Tensor& parameter : model->parameters()) memory.push_back(parameter.const_data_ptr());
    const LoadedWeights weights = load_weights(*model, path);
    CHECK(first_difference(weights_of(*model), after[step]) == "");
    CHECK(weights.loaded.size() == after[step].size());
    CHECK((weights.missing.empty() && weights.unexpected.empty()));
    CHECK(contains(weights.file, "model.safetensors"));
    for (const Tensor& parameter : model->parameters()) {
      CHECK(parameter.const_data_ptr() == memory.front());
      CHECK(parameter.requires_grad());
      memory.erase(memory.begin());
    }
  }
  // A newest that is damaged is passed over; asked for by name it is refused.
  const std::string third = folder.path("step-0000000003");
  std::string damaged = content_of(third + "/model.safetensors");
  damaged.back() ^= 1;
  put_content(third + "/model.safetensors", damaged);
  SmallModel model = small_model();
  check_load_refused(*model, third, {"checksum"});
  const CapturedStderr captured;
  load_weights(*model, folder.path());
  CHECK(contains(captured.text(), "step-0000000003"));
  CHECK(first_difference(weights_of(*model), after[2]) == "");
}

TEST_CASE("weights that Python wrote are loaded and converted", "[resume][load_weights]") {
  const TemporaryFolder folder;
  put_content(folder.path("model.safetensors"), kFromPython);
  torch::nn::Linear model(3, 2);
  const LoadedWeights weights = load_weights(*model, folder.path("model.safetensors"));
  CHECK(weights.loaded == WeightNames{"bias", "weight"});
  CHECK(model->weight.scalar_type() == at::kFloat);
  CHECK(same_bits(model->weight.detach(), torch::arange(1.f, 7.f).view({2, 3})));
  CHECK(same_bits(model->bias.detach(), torch::tensor({0.5f, -0.25f})));
}

TEST_CASE("weights that are missing or unexpected are refused by name unless they are allowed",
          "[resume][load_weights]") {
  const TemporaryFolder folder;
  const std::string path = folder.path("weights.safetensors");
  put_tensors(path, {{"weight", torch::full({2, 3}, 7.f)}, {"head.a", torch::ones({1})}});
  torch::nn::Linear model(3, 2);
  check_load_refused(*model, path, {path, "\"bias\"", "\"head.a\"", "allow_missing", "allow_unexpected"});
  check_load_refused(*model, path, {"\"head.a\""}, LoadWeightsOptions().allow_missing(true));
  check_load_refused(*model, path, {"\"bias\""}, LoadWeightsOptions().allow_unexpected(true));
  const Tensor bias = model->bias.detach().clone();
  const LoadedWeights weights =
      load_weights(*model, path, LoadWeightsOptions().allow_missing(true).allow_unexpected(true));
  CHECK(weights.loaded == WeightNames{"weight"});
  CHECK(weights.missing == WeightNames{"bias"});
  CHECK(weights.unexpected == WeightNames{"head.a"});
  CHECK(same_bits(model->bias.detach(), bias));
  CHECK(model->weight.detach().eq(7).all().item<bool>());
}

TEST_CASE("weights of another shape or kind of dtype are refused whatever is allowed",
          "[resume][load_weights]") {
  const TemporaryFolder folder;
  const auto anything = LoadWeightsOptions().allow_missing(true).allow_unexpected(true);
  torch::nn::BatchNorm1d model(3);
  NamedTensors tensors = weights_of(*model);
  for (auto& item : tensors) item.second = item.second + 1;
  const std::string path = folder.path("weights.safetensors");
  const auto check = [&](const std::string& name, const Tensor& value) {
    CAPTURE(name);
    NamedTensors other = tensors;
    other[name] = value;
    FileSystem& files = posix_file_system();
    files.remove_file(path);
    put_tensors(path, other);
    check_load_refused(*model, path, {"\"" + name + "\"", "in the model"}, anything);
  };
  check("weight", torch::ones({4}));
  check("bias", torch::ones({3, 1}));
  check("running_mean", torch::ones({3}, torch::kLong));
  check("num_batches_tracked", torch::ones({}));
  check_load_refused(*model, folder.path("absent"), {"absent", "No such file"});
  check_load_refused(*model, folder.path(), {"has none in it"});
  put_content(folder.path("text"), "no tensors here");
  check_load_refused(*model, folder.path("text"), {folder.path("text")});
}

TEST_CASE("a tensor with two names is loaded by either, and refused where they differ",
          "[resume][load_weights]") {
  struct Tied : torch::nn::Module {
    Tied() {
      a = register_parameter("a", torch::zeros({2}));
      b = register_parameter("b", a);
    }
    Tensor a, b;
  };
  const TemporaryFolder folder;
  Tied model;
  REQUIRE(model.named_parameters().size() == 2);
  put_tensors(folder.path("one"), {{"a", torch::ones({2})}});
  CHECK(load_weights(model, folder.path("one")).loaded == WeightNames{"a", "b"});
  CHECK(model.b.eq(1).all().item<bool>());
  put_tensors(folder.path("two"), {{"a", torch::ones({2})}, {"b", torch::zeros({2})}});
  check_load_refused(model, folder.path("two"), {"\"a\"", "\"b\"", "one tensor"});
}

TEST_CASE("tensors of any layout are written as they read, in pieces", "[resume][checkpoint]") {
  const TemporaryFolder folder;
  // More than one piece in every way of cutting: by rows, a row that is cut again, and rows of one element.
  const int64_t piece = detail::kHostPiece / 4;
  NamedTensors tensors = {{"scalar", torch::tensor(3.5)},
                          {"empty", torch::empty({0, 4})},
                          {"transposed", torch::arange(12).view({3, 4}).t()},
                          {"expanded", torch::ones({1, 3}).expand({4, 3})},
                          {"long rows", torch::arange(3 * (piece / 2)).to(torch::kFloat).view({3, -1}).t()},
                          {"wide", torch::arange(2 * (piece + 5)).to(torch::kFloat).view({-1, 2}).t()}};
  put_tensors(folder.path("file"), tensors);
  FileReader reader(posix_file_system(), folder.path("file"));
  const NamedTensors read = detail::read_tensors(reader, "file");
  reader.finish();
  CHECK(read.size() == tensors.size());
  for (const auto& [name, tensor] : tensors) {
    CAPTURE(name);
    CHECK(same_bits(read.at(name), tensor.contiguous()));
  }
}

}  // namespace pacer::testing
