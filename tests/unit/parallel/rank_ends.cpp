// A rank that has no more data, ends a window early, or throws (F5): every rank is told, by an error that
// names it, and none hangs.
#include <chrono>

#include "support/catch.h"
#include "support/parallel/rank_trainers.h"

namespace pacer::testing {

using namespace std::chrono_literals;

TEST_CASE("a rank whose data ends before the others' is named by all", "[session][data_parallel]") {
  for (const int early : {0, 2}) {
    auto trainers = trainers_of(std::vector<RankSetup>(3));
    const auto messages = run_all(trainers, [&](RankTrainer& trainer, int rank) {
      for (int step = 0; step < (rank == early ? 3 : 5); ++step) trainer.step();
      trainer.session->finish();
    });
    for (const std::string& message : messages) {
      CHECK(contains(message, "has no more data after step 3"));
      CHECK(contains(message, early == 0 ? "rank 0 has no more data" : "rank 2 has no more data"));
    }
  }
  auto trainers = trainers_of(std::vector<RankSetup>(3));
  REQUIRE(first_of(run_all(trainers, [&](RankTrainer& trainer, int) {
            for (int step = 0; step < 3; ++step) trainer.step();
            trainer.session->finish();
          })) == "");
}

TEST_CASE("a window that ends early counts what all ranks have", "[session][data_parallel]") {
  RankSetup setup;
  setup.hooks = [](Session& session) { session.use(GradientAccumulation(4)); };
  auto trainers = trainers_of({setup, setup});
  REQUIRE(first_of(run_all(trainers, [&](RankTrainer& trainer, int rank) {
            trainer.step();
            trainer.inputs.fill_(rank + 2);
            for (int m = 0; m < 2; ++m) {
              trainer.begin_and_backward();
              trainer.session->step();
            }
            trainer.session->finish();
          })) == "");
  const auto a = trainers[0]->snapshot(), b = trainers[1]->snapshot();
  for (size_t i = 0; i < a.size(); ++i) CHECK(a[i].equal(b[i]));
  CHECK(trainers[0]->session->progress().step == 2);

  trainers = trainers_of({setup, setup});
  const auto messages = run_all(trainers, [&](RankTrainer& trainer, int rank) {
    trainer.step();
    for (int m = 0; m < rank; ++m) {
      trainer.begin_and_backward();
      trainer.session->step();
    }
    trainer.session->finish();
  });
  for (const std::string& message : messages) {
    CHECK(contains(message, "rank 0 has no more data after step 1, rank 1 ends with a window of 1"));
  }
}

TEST_CASE("F5: an exception on one rank ends the others with its reason", "[session][data_parallel]") {
  struct Thrower : Hook {
    Thrower(std::string at, int64_t step) : at_(std::move(at)), step_(step) {}
    std::string hook_name() const override { return "thrower"; }
    Slot slot() const override { return Slot::record; }
    void fail(const char* at, int64_t step) const {
      if (at_ == at && step == step_) throw InvalidArgument("made up at " + at_);
    }
    void begin(const Progress& p, MicroBatch&) override { fail("begin", p.step); }
    void backward_begin(const Progress& p) override { fail("backward", p.step); }
    void backward_end(const Progress& p) override { fail("backward_end", p.step); }
    void gradients_ready(const Progress& p) override { fail("ready", p.step); }
    void after_step(StepReport& r) override { fail("after", r.progress().step - 1); }
    std::string at_;
    int64_t step_;
  };
  for (const char* at : {"begin", "backward", "backward_end", "ready", "after", "user"}) {
    INFO(at);
    std::vector<RankSetup> setups(3);
    for (size_t i = 0; i < 3; ++i) {
      setups[i].hooks = [at, i](Session& s) { s.use(Thrower(i == 1 ? at : "never", 2)); };
    }
    const auto began = std::chrono::steady_clock::now();
    auto trainers = trainers_of(setups);
    const auto messages = run_all(trainers, [&](RankTrainer& trainer, int rank) {
      for (int step = 0; step < 5; ++step) {
        if (rank != 1) {
          trainer.step();
          continue;
        }
        try {
          if (at == std::string("user") && step == 2) throw InvalidArgument("made up by the user");
          trainer.step();
        } catch (...) {
          trainer.session.reset();  // as the end of its scope would
          throw;
        }
      }
    });
    CHECK(contains(messages[1], "made up"));
    CHECK(contains(messages[0], "rank 1 left: "));
    CHECK(contains(messages[2], "rank 1 left: "));
    CHECK(std::chrono::steady_clock::now() - began < 20s);
  }
}

}  // namespace pacer::testing
