// What ranks learn of each other after they have met.
#include <chrono>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <sys/wait.h>
#include <unistd.h>

#include <pacer/collectives/detail/file_store.h>
#include <pacer/collectives/detail/rank_health.h>
#include <pacer/core/error.h>

#include "support/catch.h"
#include "support/temporary_folder.h"

namespace pacer::testing {
namespace {

using namespace std::chrono_literals;
using detail::RankHealth;
using RankHealths = std::vector<std::shared_ptr<RankHealth>>;

std::string text_of(const std::optional<RankHealth::FailureReport>& trouble) {
  return trouble ? trouble->text : "";
}

// Calls find_suspects of these ranks at the same time; returns what the first of them found.
RankHealth::FailureReport fail_together(const RankHealths& rank_healths, const std::vector<int>& ranks,
                                        const std::vector<int>& asked) {
  std::vector<std::thread> others;
  for (size_t i = 1; i < ranks.size(); ++i) {
    others.emplace_back([&, i] { rank_healths[static_cast<size_t>(ranks[i])]->find_suspects(asked); });
  }
  const RankHealth::FailureReport found = rank_healths[static_cast<size_t>(ranks[0])]->find_suspects(asked);
  for (std::thread& other : others) other.join();
  return found;
}

}  // namespace

TEST_CASE("a rank that has left is trouble for those who need it", "[collectives][rank_health]") {
  const RankHealths ranks = RankHealth::of_threads(4);
  CHECK_FALSE(ranks[0]->find_trouble({0, 1, 2, 3}));
  ranks[2]->leave("out of memory");
  ranks[2]->leave("later");
  CHECK(text_of(ranks[0]->find_trouble({0, 1, 2, 3})) == "rank 2 left: out of memory");
  CHECK(ranks[0]->find_trouble({0, 2})->ranks == std::vector<int>{2});
  CHECK_FALSE(ranks[0]->find_trouble({0, 1, 3}));
  CHECK_FALSE(ranks[2]->find_trouble({0, 1, 2, 3}));  // not for itself
  ranks[1]->leave("too");
  const RankHealth::FailureReport found = ranks[0]->find_suspects({0, 1, 2, 3});
  CHECK(found.text == "rank 1 left: too; rank 2 left: out of memory");
  CHECK(found.ranks == std::vector<int>{1, 2});
}

TEST_CASE("a rank that has retired is no trouble, and suspected last", "[collectives][rank_health]") {
  const RankHealths ranks = RankHealth::of_threads(3);
  ranks[2]->leave_quietly();
  CHECK_FALSE(ranks[0]->find_trouble({0, 1, 2}));
  SECTION("nobody else is a cause") {
    const RankHealth::FailureReport found = fail_together(ranks, {0, 1}, {0, 1, 2});
    CHECK(found.text == "rank 2 has ended its communicator");
    CHECK(found.ranks == std::vector<int>{2});
  }
  SECTION("another is silent") {
    const auto start = std::chrono::steady_clock::now();
    CHECK(ranks[0]->find_suspects({0, 1, 2}).text == "no sign of life from rank 1");
    CHECK(std::chrono::steady_clock::now() - start >= 900ms);
    CHECK(std::chrono::steady_clock::now() - start < 3s);
  }
  SECTION("another has left") {
    ranks[1]->leave("reason");
    CHECK(ranks[0]->find_suspects({0, 1, 2}).ranks == std::vector<int>{1});
  }
}

TEST_CASE("who gives a sign of life is not suspected", "[collectives][rank_health]") {
  const RankHealths ranks = RankHealth::of_threads(4);
  const RankHealth::FailureReport found = fail_together(ranks, {0, 3}, {0, 1, 2, 3});
  CHECK(found.text == "no sign of life from ranks 1 and 2");
  CHECK(found.ranks == std::vector<int>{1, 2});
  CHECK(fail_together(ranks, {1, 2}, {1, 2}).text.empty());
}

TEST_CASE("a failure with other ranks is a cause, one with the same is not", "[collectives][rank_health]") {
  const RankHealths ranks = RankHealth::of_threads(4);
  CHECK(ranks[3]->find_suspects({2, 3}).ranks == std::vector<int>{2});
  ranks[3]->tell_failure("all_reduce", {{2}, "no sign of life from rank 2"});
  const std::string text = "rank 3 failed in all_reduce: no sign of life from rank 2";
  CHECK(text_of(ranks[0]->find_trouble({0, 3})) == text);
  CHECK(ranks[0]->find_suspects({0, 3}).text == text);
  CHECK(ranks[0]->find_suspects({0, 3}).ranks == std::vector<int>{3});
  // Where rank 2 takes part, it is the one to look at.
  CHECK(ranks[1]->find_suspects({1, 2, 3}).ranks == std::vector<int>{2});
}

TEST_CASE("a process that ends without a word has left, unless it had retired or others had failed",
          "[collectives][rank_health]") {
  const auto store = std::make_shared<detail::MemoryStore>();
  const pid_t child = ::fork();
  if (child == 0) ::_exit(0);
  REQUIRE(::waitpid(child, nullptr, 0) == child);
  detail::ProcessIdentity own = detail::ProcessIdentity::myself(2), ended = own;
  CHECK(own.start != "-");  // a process that runs has not ended
  ended.process = static_cast<int>(child);
  const std::vector<std::optional<detail::ProcessIdentity>> processes{own, ended};
  RankHealth rank_health(store, 0, processes, std::nullopt, "here"),
      other(store, 1, processes, std::nullopt, "here");
  CHECK(rank_health.has_ended(1));
  CHECK_FALSE(rank_health.has_ended(0));
  CHECK(text_of(rank_health.find_trouble({0, 1})) == "rank 1 left: its process has ended");
  SECTION("it had retired") {
    other.leave_quietly();
    CHECK_FALSE(rank_health.find_trouble({0, 1}));
    CHECK(rank_health.find_suspects({0, 1}).text == "rank 1 has ended its communicator");
  }
  SECTION("others had failed") {
    other.find_suspects({1});
    CHECK_FALSE(rank_health.find_trouble({0, 1}));
    CHECK(rank_health.find_suspects({0, 1}).ranks.empty());
  }
  SECTION("it kept the store") {
    RankHealth third(store, 0, processes, 1, "here");
    const auto trouble = third.find_trouble({0});
    CHECK_THAT(text_of(trouble), Catch::Matchers::ContainsSubstring(
                                     "rank 0, or the launcher, has ended: the store where the ranks met"));
  }
}

TEST_CASE("that another rank has retired does not excuse the end of the store",
          "[collectives][rank_health]") {
  const auto store = std::make_shared<detail::MemoryStore>();
  int to_child[2];
  REQUIRE(::pipe(to_child) == 0);
  const pid_t child = ::fork();
  if (child == 0) {
    ::close(to_child[1]);
    char end = 0;
    ::_exit(::read(to_child[0], &end, 1) == 0 ? 0 : 1);
  }
  ::close(to_child[0]);
  const detail::ProcessIdentity own = detail::ProcessIdentity::myself(3);
  detail::ProcessIdentity store_host = own;
  store_host.process = static_cast<int>(child);
  std::ifstream file("/proc/" + std::to_string(child) + "/stat");
  for (int field = 1; field <= 22; ++field) file >> store_host.start;
  const std::vector<std::optional<detail::ProcessIdentity>> processes{own, store_host, own};
  RankHealth rank_health(store, 0, processes, 1, "here"), other(store, 2, processes, std::nullopt, "here");
  other.leave_quietly();
  CHECK_FALSE(rank_health.has_ended(1));
  CHECK_FALSE(rank_health.find_trouble({0, 1, 2}));
  ::close(to_child[1]);
  REQUIRE(::waitpid(child, nullptr, 0) == child);
  CHECK_THAT(text_of(rank_health.find_trouble({0, 2})),
             Catch::Matchers::ContainsSubstring("rank 0, or the launcher, has ended"));
}

TEST_CASE("who keeps the store stays until the others can have read its last words",
          "[collectives][rank_health]") {
  const std::vector<std::optional<detail::ProcessIdentity>> processes(2, detail::ProcessIdentity::myself(2));
  const auto store = std::make_shared<detail::MemoryStore>();
  auto rank_health = std::make_unique<RankHealth>(store, 0, processes, 0, "here");
  const auto start = std::chrono::steady_clock::now();
  rank_health->leave("reason");
  rank_health.reset();
  CHECK(std::chrono::steady_clock::now() - start >= 1400ms);
}

TEST_CASE("ranks of one network are of one host, and are numbered there", "[collectives][rank_health]") {
  const auto store = std::make_shared<detail::MemoryStore>();
  const detail::ProcessIdentity here = detail::ProcessIdentity::myself(4);
  detail::ProcessIdentity there = here;
  there.network += " of another host";
  const std::vector<std::optional<detail::ProcessIdentity>> processes{there, here, there, here};
  const RankHealth second(store, 1, processes, std::nullopt, "here"),
      last(store, 3, processes, std::nullopt, "here");
  CHECK(second.local_rank() == 0);
  CHECK(last.local_rank() == 1);
  CHECK(last.local_size() == 2);
  CHECK(last.first_local_rank() == 1);
  CHECK_FALSE(last.is_one_host());
}

TEST_CASE("a kept file is found while its keeper lives, and made anew after", "[collectives][rank_health]") {
  const TemporaryFolder folder;
  const std::string path = folder.path("port-1");
  CHECK(detail::FileStore::open_kept(path) == nullptr);
  auto kept = detail::FileStore::keep(path);
  REQUIRE(kept != nullptr);
  CHECK(detail::FileStore::keep(path) == nullptr);
  kept->append("key", "old");
  const auto opened = detail::FileStore::open_kept(path);
  REQUIRE(opened != nullptr);
  CHECK(opened->read("key") == std::vector<std::string>{"old"});
  kept.reset();  // as where its process is killed
  CHECK(detail::FileStore::open_kept(path) == nullptr);
  kept = detail::FileStore::keep(path);
  REQUIRE(kept != nullptr);
  CHECK(detail::FileStore::open_kept(path)->read("key").empty());
  kept->remove_name();
  CHECK(std::filesystem::is_empty(folder.path()));
}

}  // namespace pacer::testing
