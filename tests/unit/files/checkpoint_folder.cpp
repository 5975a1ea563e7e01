// Checkpoints on disk when all goes well, and what is refused. Manifests are in files/checkpoint_manifest.cpp,
// failing disks in files/checkpoint_failures.cpp, damaged files in
// tests/property/core_checkpoint_corruption.cpp.
#include <algorithm>
#include <filesystem>
#include <stdexcept>
#include <string>

#include <unistd.h>

#include <nlohmann/json.hpp>

#include <pacer/core/error.h>
#include <pacer/files/checkpoint_folder.h>

#include "support/catch.h"
#include "support/checkpoints/checkpoint_samples.h"
#include "support/files/memory_file_system.h"
#include "support/temporary_folder.h"

namespace pacer::testing {
namespace {

using Catch::Matchers::ContainsSubstring;
using FolderNames = std::vector<std::string>;

constexpr int64_t kLargestStep = INT64_MAX;

}  // namespace

TEST_CASE("a checkpoint on a real disk reads back to the byte", "[core][checkpoint]") {
  const TemporaryFolder folder;
  const std::string root = folder.path("checkpoints");
  const std::string saved = save_checkpoint(posix_file_system(), root, 1000, sample_contents(1));
  CHECK(saved == root + "/step-0000001000");
  CHECK(loaded_contents(posix_file_system(), saved) == sample_contents(1));
  const Checkpoint checkpoint = open_checkpoint(saved);
  CHECK(checkpoint.manifest.step == 1000);
  CHECK(checkpoint.manifest.world_size == 4);
  CHECK(checkpoint.manifest.pacer_version == "0.1.0");
  CHECK(checkpoint.manifest.libraries.at("libtorch") == "2.11.0");
  CHECK(names_in(posix_file_system(), root) == FolderNames{"step-0000001000"});
  CHECK(names_in(posix_file_system(), saved) == FolderNames{"empty", "manifest.json", "model.safetensors",
                                                            "optimizer-rank-00000-of-00001.safetensors"});

  const auto manifest = nlohmann::json::parse(content_of(saved + "/manifest.json"));
  CHECK(manifest.at("format_version") == 1);
  CHECK(manifest.at("step") == 1000);
  CHECK(manifest.at("files").size() == 3);
  CHECK(manifest.at("files")[1].at("xxh3_128") == checksum_of(sample_contents(1).at("model.safetensors")));
}

TEST_CASE("a root that is a link to a folder works", "[core][checkpoint]") {
  const TemporaryFolder folder;
  REQUIRE(make_folder(posix_file_system(), folder.path("real")));
  REQUIRE(::symlink("real", folder.path("link").c_str()) == 0);
  save_checkpoint(posix_file_system(), folder.path("link"), 1, sample_contents(1));
  CHECK(list_checkpoints(folder.path("link")).size() == 1);
  CHECK(find_newest_checkpoint(folder.path("real")).checkpoint->step == 1);
}

TEST_CASE("a file of a checkpoint that became a link is refused", "[core][checkpoint]") {
  const TemporaryFolder folder;
  const std::string saved = save_checkpoint(posix_file_system(), folder.path("root"), 1, sample_contents(1));
  for (const char* name : {"model.safetensors", "manifest.json"}) {
    std::filesystem::rename(saved + '/' + name, folder.path(name));
    REQUIRE(::symlink(folder.path(name).c_str(), (saved + '/' + name).c_str()) == 0);
    CHECK_THROWS_WITH(open_checkpoint(saved), ContainsSubstring(saved + '/' + name));
  }
}

TEST_CASE("checkpoints are listed newest first, by exactly their names", "[core][checkpoint]") {
  MemoryFileSystem files;
  CHECK(list_checkpoints("/root", files).empty());
  for (const int64_t step : {int64_t{20}, int64_t{3}, int64_t{12345678901}, int64_t{0}, kLargestStep}) {
    save_checkpoint(files, "/root", step, sample_contents(1));
  }
  for (const char* name :
       {"step-1", "step-00000000001", "step-000000000x", "step-0000000001.old", "step--000000001", "step-",
        "step", ".step-0000000001", ".step-0000000001.partial", "Step-0000000001", "step-0000000001 ",
        "xstep-0000000001", "..step-0000000001.partial", "step-9223372036854775808",
        "step-0000000001.partial", "mine"}) {
    REQUIRE(make_folder(files, std::string("/root/") + name));
  }
  std::vector<int64_t> steps;
  for (const CheckpointInfo& each : list_checkpoints("/root", files)) {
    steps.push_back(each.step);
    CHECK(open_checkpoint(each.folder, files).manifest.step == each.step);
  }
  CHECK(steps == std::vector<int64_t>{kLargestStep, 12345678901, 20, 3, 0});
}

TEST_CASE("a commit removes what dead saves left, and nothing else", "[core][checkpoint]") {
  MemoryFileSystem files;
  const FolderNames theirs = {".step-0000000001", ".step-1.partial", ".step-0000000001.partially", "notes",
                              "step-0000000001.partial"};
  const FolderNames leftovers = {".step-0000000005.partial", ".step-0000000002.partial",
                                 ".step-0000000003.removed"};
  REQUIRE(make_folder(files, "/root"));
  for (const FolderNames& names : {theirs, leftovers}) {
    for (const std::string& name : names) {
      REQUIRE(make_folder(files, "/root/" + name));
      files.content("/root/" + name + "/file") = "x";
    }
  }
  save_checkpoint(files, "/root", 5, sample_contents(1));
  FolderNames expected = theirs;
  expected.push_back("step-0000000005");
  std::sort(expected.begin(), expected.end());
  CHECK(names_in(files, "/root") == expected);
}

TEST_CASE("a step saved again replaces the former checkpoint", "[core][checkpoint]") {
  MemoryFileSystem files;
  save_checkpoint(files, "/root", 5, sample_contents(1));
  const std::string folder = save_checkpoint(files, "/root", 5, sample_contents(2));
  CHECK(loaded_contents(files, folder) == sample_contents(2));
  CHECK(names_in(files, "/root") == FolderNames{"step-0000000005"});
}

TEST_CASE("a checkpoint that stepped aside counts until the new one is there", "[core][checkpoint]") {
  MemoryFileSystem files;
  save_checkpoint(files, "/root", 5, sample_contents(1));
  rename(files, "/root/step-0000000005", "/root/.step-0000000005.replaced");
  REQUIRE(find_newest_checkpoint("/root", files).checkpoint);
  CHECK(loaded_contents(files, find_newest_checkpoint("/root", files).checkpoint->folder) ==
        sample_contents(1));
  SECTION("a save of another step puts it back") {
    save_checkpoint(files, "/root", 6, sample_contents(2));
    CHECK(names_in(files, "/root") == FolderNames{"step-0000000005", "step-0000000006"});
    CHECK(loaded_contents(files, "/root/step-0000000005") == sample_contents(1));
  }
  SECTION("a save of the same step takes its place") {
    save_checkpoint(files, "/root", 5, sample_contents(2));
    CHECK(names_in(files, "/root") == FolderNames{"step-0000000005"});
    CHECK(loaded_contents(files, "/root/step-0000000005") == sample_contents(2));
  }
  SECTION("beside a new one it does not count") {
    save_checkpoint(files, "/root", 9, sample_contents(2));
    rename(files, "/root/step-0000000009", "/root/.step-0000000005.replaced");
    CHECK(list_checkpoints("/root", files).size() == 1);
    save_checkpoint(files, "/root", 5, sample_contents(3));
    CHECK(names_in(files, "/root") == FolderNames{"step-0000000005"});
  }
}

TEST_CASE("without a commit nothing remains", "[core][checkpoint]") {
  MemoryFileSystem files;
  {
    CheckpointWriter writer(files, "/root", 1);
    writer.write("a", [](ByteSink& out) { out.write("x", 1); });
    CHECK(names_in(files, "/root") == FolderNames{".step-0000000001.partial"});
  }
  CHECK(names_in(files, "/root").empty());
  CHECK(files.open_descriptors() == 0);
}

TEST_CASE("a producer that throws ends the save, and its exception comes out", "[core][checkpoint]") {
  MemoryFileSystem files;
  {
    CheckpointWriter writer(files, "/root", 1);
    CHECK_THROWS_AS(writer.write("a", [](ByteSink&) { throw std::out_of_range("mine"); }), std::out_of_range);
    CHECK_THROWS_AS(writer.write("b", [](ByteSink&) {}), InvalidArgument);
    CHECK_THROWS_AS(writer.commit({}), InvalidArgument);
  }
  CHECK(names_in(files, "/root").empty());
}

TEST_CASE("names and facts that a checkpoint cannot have are refused", "[core][checkpoint]") {
  MemoryFileSystem files;
  CheckpointWriter writer(files, "/root", 1);
  for (const std::string& name :
       {std::string(), std::string("."), std::string(".."), std::string("../x"), std::string("a/b"),
        std::string("/a"), std::string(".hidden"), std::string("a b"), std::string("a\0b", 3),
        std::string("\xC3\xA9"), std::string("manifest.json"), std::string(201, 'a')}) {
    CAPTURE(name);
    CHECK_THROWS_AS(writer.write(name, [](ByteSink&) {}), InvalidArgument);
  }
  writer.write(std::string(200, 'a'), [](ByteSink&) {});
  writer.write("a..b-_Z9", [](ByteSink&) {});
  CHECK_THROWS_AS(writer.write("a..b-_Z9", [](ByteSink&) {}), InvalidArgument);
  CHECK_THROWS_AS(writer.commit({0, "", {}}), InvalidArgument);
  CHECK_THROWS_AS(writer.commit({1, "\xFF", {}}), InvalidArgument);
  CHECK_THROWS_AS(writer.commit({1, "", {{"\xFF", ""}}}), InvalidArgument);
  CHECK_THROWS_AS(writer.commit({1, std::string(kMaxManifestBytes, 'x'), {}}), InvalidArgument);
  const std::string folder = writer.commit({1, "", {}});  // a refusal changed nothing
  CHECK(open_checkpoint(folder, files).files.size() == 2);
  CHECK_THROWS_AS(writer.commit({}), InvalidArgument);
  CHECK_THROWS_AS(CheckpointWriter(files, "/root", -1), InvalidArgument);
  CHECK(names_in(files, "/root") == FolderNames{"step-0000000001"});
}

TEST_CASE("the newest checkpoint that verifies is found, and the others are named", "[core][checkpoint]") {
  MemoryFileSystem files;
  CHECK_FALSE(find_newest_checkpoint("/root", files).checkpoint);
  for (const int64_t step : {1, 2, 3, 4, 5, 6}) save_checkpoint(files, "/root", step, sample_contents(step));
  files.content("/root/step-0000000006/model.safetensors")[7] ^= 1;
  files.content("/root/step-0000000005/manifest.json").pop_back();
  REQUIRE(files.remove_file("/root/step-0000000004/empty") == 0);
  rename(files, "/root/step-0000000002", "/root/step-0000000007");
  files.content("/root/step-0000000001/empty") = "x";
  const NewestCheckpoint newest = find_newest_checkpoint("/root", files);
  REQUIRE(newest.checkpoint);
  CHECK(newest.checkpoint->step == 3);
  const std::vector<std::pair<const char*, const char*>> reasons = {
      {"step-0000000007", "of step 2"},
      {"step-0000000006/model.safetensors", "checksum"},
      {"step-0000000005/manifest.json", "checksum"},
      {"step-0000000004/empty", "No such file"}};
  REQUIRE(newest.passed_over.size() == reasons.size());
  for (size_t i = 0; i < reasons.size(); ++i) {
    CHECK_THAT(newest.passed_over[i],
               ContainsSubstring(reasons[i].first) && ContainsSubstring(reasons[i].second));
  }
  REQUIRE(files.remove_file("/root/step-0000000003/manifest.json") == 0);
  CHECK_FALSE(find_newest_checkpoint("/root", files).checkpoint);
  CHECK(find_newest_checkpoint("/root", files).passed_over.size() == 6);
}

TEST_CASE("old checkpoints are removed, damaged ones count for nothing", "[core][checkpoint]") {
  MemoryFileSystem files;
  remove_old_checkpoints("/root", 1, files);  // nothing there
  for (const int64_t step : {1, 2, 3, 4, 5}) save_checkpoint(files, "/root", step, sample_contents(1));
  files.content("/root/step-0000000005/model.safetensors").pop_back();
  REQUIRE(files.make_folder("/root/.step-0000000002.removed") == 0);
  files.content("/root/.step-0000000002.removed/x") = "y";
  CHECK_THROWS_AS(remove_old_checkpoints("/root", 0, files), InvalidArgument);
  remove_old_checkpoints("/root", 4, files);
  CHECK(list_checkpoints("/root", files).size() == 5);
  remove_old_checkpoints("/root", 2, files);
  CHECK(names_in(files, "/root") == FolderNames{"step-0000000003", "step-0000000004", "step-0000000005"});
}

TEST_CASE("a checkpoint in the folder of another step counts for nothing where old ones are removed",
          "[core][checkpoint]") {
  MemoryFileSystem files;
  for (const int64_t step : {1, 2, 3}) save_checkpoint(files, "/root", step, sample_contents(1));
  rename(files, "/root/step-0000000003", "/root/step-0000000009");
  CHECK(remove_old_checkpoints("/root", 1, files).empty());
  CHECK(names_in(files, "/root") == FolderNames{"step-0000000002", "step-0000000009"});
}

TEST_CASE("an old checkpoint that cannot be removed is named, tried again, and keeps nothing else",
          "[core][checkpoint]") {
  MemoryFileSystem files;
  for (const int64_t step : {1, 2, 3, 4}) save_checkpoint(files, "/root", step, sample_contents(1));
  REQUIRE(files.make_folder("/root/step-0000000002/mine") == 0);
  for (int attempt = 0; attempt < 2; ++attempt) {
    const auto failures = remove_old_checkpoints("/root", 1, files);
    REQUIRE(failures.size() == 1);
    CHECK(failures[0].step == 2);
    CHECK_THAT(failures[0].reason, ContainsSubstring("step-0000000002") && ContainsSubstring("mine"));
    CHECK(list_checkpoints("/root", files).size() == 1);
  }
  REQUIRE(files.remove_folder("/root/.step-0000000002.removed/mine") == 0);
  CHECK(remove_old_checkpoints("/root", 1, files).empty());
  CHECK(names_in(files, "/root") == FolderNames{"step-0000000004"});
}

TEST_CASE("checkpoints of later steps than the newest neither count nor go", "[core][checkpoint]") {
  MemoryFileSystem files;
  for (const int64_t step : {1, 2, 3, 8, 9}) save_checkpoint(files, "/root", step, sample_contents(1));
  CHECK(remove_old_checkpoints("/root", 1, files, /*newest_step=*/3).empty());
  CHECK(names_in(files, "/root") == FolderNames{"step-0000000003", "step-0000000008", "step-0000000009"});
}

TEST_CASE("a checkpoint that others belong to stays, and does not count", "[core][checkpoint]") {
  MemoryFileSystem files;
  for (const int64_t step : {1, 2, 3, 4}) save_checkpoint(files, "/root", step, sample_contents(1));
  CHECK(remove_old_checkpoints("/root", 1, files, /*newest_step=*/4, /*stays=*/2).empty());
  CHECK(names_in(files, "/root") == FolderNames{"step-0000000002", "step-0000000004"});
}

TEST_CASE("a file of a checkpoint is read in pieces and believed once its checksum is right",
          "[core][checkpoint]") {
  MemoryFileSystem files;
  const FileContents contents = {{"file", random_text(1, 100'000)}};
  const std::string folder = save_checkpoint(files, "/root", 1, contents);
  const CheckpointManifest manifest = read_manifest(folder, files);
  REQUIRE(manifest.files.size() == 1);
  const auto read = [&](size_t bytes) {
    std::string text(bytes, ' ');
    read_checkpoint_file(
        folder, manifest.files[0],
        [&](FileReader& reader) {
          for (size_t at = 0; at < bytes; at += 777)
            reader.read_next(&text[at], std::min<size_t>(777, bytes - at));
        },
        files);
    return text;
  };
  CHECK(read(100'000) == contents.at("file"));
  CHECK_THROWS_WITH(read(99'999), ContainsSubstring("changed while it was read"));
  CHECK_THROWS_WITH(read(100'001), ContainsSubstring("1 bytes too early"));
  files.content(folder + "/file")[50'000] ^= 1;
  CHECK_THROWS_WITH(read(100'000), ContainsSubstring("checksum"));
  files.content(folder + "/file").pop_back();
  CHECK_THROWS_WITH(read(100'000), ContainsSubstring("99999 bytes"));
  CHECK(files.open_descriptors() == 0);
}

TEST_CASE("files that change places or come from another checkpoint are refused", "[core][checkpoint]") {
  MemoryFileSystem files;
  FileContents contents = {{"rank-0", random_text(1, 100)}, {"rank-1", random_text(2, 100)}};
  const std::string folder = save_checkpoint(files, "/root", 1, contents);
  files.content(folder + "/rank-0").swap(files.content(folder + "/rank-1"));
  CHECK_THROWS_WITH(open_checkpoint(folder, files), ContainsSubstring("rank-0"));
  CHECK_THROWS_WITH(verify_checkpoint(folder, files), ContainsSubstring("rank-0"));
}

}  // namespace pacer::testing
