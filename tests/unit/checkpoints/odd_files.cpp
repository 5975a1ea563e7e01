// Files that are something else than they seem: manifests with wild numbers, weights with holes, random
// states that are none, files of other programs.
#include <filesystem>

#include <torch/nn/modules/linear.h>
#include <torch/serialize.h>

#include <pacer/checkpoints/detail/training_state.h>
#include <pacer/files/checkpoint_folder.h>
#include <pacer/pacer.h>

#include "support/catch.h"
#include "support/checkpoints/weight_files.h"
#include "support/session/mistakes_trainer.h"
#include "support/temporary_folder.h"

namespace pacer::testing::odd_files {

TEST_CASE("numbers in a manifest bound no loop", "[checkpoint]") {
  for (const int64_t ranks : {int64_t{20'000'000}, int64_t{1} << 31, (int64_t{1} << 32) + 1}) {
    const TemporaryFolder folder;
    put_tensors_in(folder.path("m"), {{"weight", torch::ones({2, 3})}});
    const std::string model = content_of(folder.path("m"));
    CheckpointWriter writer(posix_file_system(), folder.path("c"), 1);
    for (const char* name : {"model-00001-of-00001.safetensors", "optimizer-rank-00000-of-00001.safetensors",
                             "session-rank-00000-of-00001.safetensors"}) {
      writer.write(name, [&](ByteSink& out) { out.write(model.data(), model.size()); });
    }
    CheckpointFacts facts;
    facts.world_size = ranks;
    facts.pacer_version = "0";
    writer.commit(facts);
    const std::vector<std::string> says = {"world_size", std::to_string(ranks)};
    torch::nn::Linear net(3, 2);
    CHECK(fault_of(heard_of([&] { load_weights(*net, folder.path("c")); }), says) == "");
    Trainer t;
    t.session.use(Checkpoints(CheckpointsOptions(folder.path("c"))));
    CHECK(fault_of(heard_of([&] { t.session.resume(); }), says) == "");
  }
}

TEST_CASE("bytes that nobody wants are not read", "[load_weights]") {
  const TemporaryFolder folder;
  const std::string path = folder.path("w.safetensors");
  constexpr int64_t kUnwanted = int64_t{1} << 42;  // a hole
  std::string header = R"({"huge":{"dtype":"U8","shape":[4398046511104],"data_offsets":[0,4398046511104]},)"
                       R"("bias":{"dtype":"F32","shape":[2],"data_offsets":[4398046511104,4398046511112]}} )";
  header.resize((header.size() + 7) / 8 * 8, ' ');
  const uint64_t length = header.size();
  put_content(path, std::string(reinterpret_cast<const char*>(&length), 8) + header);
  std::error_code error;
  std::filesystem::resize_file(path, 8 + length + kUnwanted + 8, error);
  if (error) PACER_SKIP("this file system has no files of 4 TiB");
  torch::nn::Linear model(3, 2);
  load_weights(*model, path, LoadWeightsOptions().allow_unexpected(true).allow_missing(true));
  CHECK(model->bias.eq(0).all().item<bool>());
}

TEST_CASE("a random state that is none is told in a sentence", "[resume]") {
  const TemporaryFolder folder;
  {
    Trainer t;
    t.session.use(Checkpoints(CheckpointsOptions(folder.path("c"))));
    t.steps(1);
    t.session.finish();
  }
  const std::string session = "session-rank-00000-of-00001.safetensors";
  Checkpoint checkpoint = open_checkpoint(folder.path("c/step-0000000001"));
  put_content(folder.path("s"), {checkpoint.files[session].data(), checkpoint.files[session].size()});
  NamedTensors tensors = tensors_in(folder.path("s"));
  tensors["random/cpu"] = torch::full_like(tensors["random/cpu"], 255);
  CheckpointWriter writer(posix_file_system(), folder.path("c"), 2);
  for (const auto& [name, bytes] : checkpoint.files) {
    const std::vector<char>& content = bytes;
    writer.write(name, [&, is_session = name == session](ByteSink& out) {
      if (is_session) return detail::write_tensors(out, tensors);
      out.write(content.data(), content.size());
    });
  }
  writer.commit({1, "0", {}});
  Trainer t;
  t.session.use(Checkpoints(CheckpointsOptions(folder.path("c"))));
  CHECK(fault_of(heard_of([&] { t.session.resume(); }), {"random state of the CPU"}) == "");
}

TEST_CASE("a file that is something else is told by what it is", "[load_weights]") {
  const TemporaryFolder folder;
  torch::nn::Linear model(3, 2);
  const auto heard = [&](const std::string& path) { return heard_of([&] { load_weights(*model, path); }); };
  torch::save(model, folder.path("model.pt"));
  CHECK(fault_of(heard(folder.path("model.pt")), {"model.pt", "torch::save", "save_weights"}) == "");
  put_content(folder.path("old.pt"), std::string("\x80\x02\x8a\x0al\xfc\x9c", 8) + std::string(100, 'x'));
  CHECK(fault_of(heard(folder.path("old.pt")), {"pickle"}) == "");
  put_content(folder.path("model.gguf"), "GGUF" + std::string(100, '\3'));
  CHECK(fault_of(heard(folder.path("model.gguf")), {"GGUF"}) == "");
  put_content(folder.path("lfs.safetensors"), "version https://git-lfs.github.com/spec/v1\noid sha256:" +
                                                  std::string(64, 'a') + "\nsize 123\n");
  CHECK(fault_of(heard(folder.path("lfs.safetensors")), {"Git LFS", "git lfs pull"}) == "");
}

TEST_CASE("of a file and an index in one folder it is said which is taken", "[load_weights]") {
  const TemporaryFolder folder;
  torch::nn::Linear model(3, 2);
  put_tensors_in(folder.path("model.safetensors"), detail::model_tensors(*model));
  put_content(folder.path("model.safetensors.index.json"), R"({"weight_map": {}})");
  CHECK(fault_of(heard_of([&] { load_weights(*model, folder.path()); }),
                 {"model.safetensors.index.json", "model.safetensors is read"}) == "");
}

}  // namespace pacer::testing::odd_files
