// Checkpoints of 1-bit optimizers that compress other parameters than the program says: the saved choice
// comes into force where it still can, and is refused where ranks have shared out their work by the other
// one.
#include "support/catch.h"
#include "support/optimizers/onebit_refusals.h"
#include "support/parallel/shards_onebit_runs.h"

namespace pacer::testing::shards_onebit {
namespace {

template <class O>
void prewarm(Run<O>& run) {
  const auto gradients = gradients_of(run.ranks, 0, true);
  REQUIRE(run.ranks.run([&](size_t rank) {
    std::vector<Tensor> flat;
    for (const Tensor& gradient : gradients[rank]) flat.push_back(gradient.flatten());
    run.sessions[rank]->prewarm([&] { return run.models[rank]->loss(at::cat(flat)); });
  }) == "");
}

// As the program of the saved run or of the next one says it.
template <class O>
Run<O> run_with(bool compress_vectors, const Uses& uses) {
  return Run<O>(2, 2, options_of<O>(), uses, at::kFloat, compress_vectors);
}

}  // namespace

TEMPLATE_TEST_CASE("a run goes on with the compress_vectors of its checkpoint, also after prewarm",
                   "[nodes][onebit_adam][onebit_lamb][resume]", OneBitAdam, OneBitLamb) {
  using O = TestType;
  constexpr int64_t kSaved = kFreeze + 2;
  for (const bool saved : {false, true}) {
    for (const bool prewarms : {false, true}) {
      CAPTURE(saved, prewarms);
      const TemporaryFolder folder;
      auto wanted = run_with<O>(saved, both(whole(), saving(folder, kSaved)));
      for (int64_t t = 0; t < kSaved; ++t) {
        REQUIRE(wanted.step({gradients_of(wanted.ranks, t, true)}) == "");
      }
      auto found = run_with<O>(!saved, both(whole(), saving(folder, 100)));
      REQUIRE(found.resume() == "");
      if (prewarms) prewarm(found);
      REQUIRE(run_beside(wanted, found, kSaved, kSaved + 3) == "");
    }
  }
}

TEMPLATE_TEST_CASE(
    "ranks that have shared out their work refuse a checkpoint that compresses other parameters",
    "[shards][nodes][onebit_adam][onebit_lamb][resume]", OneBitAdam, OneBitLamb) {
  using O = TestType;
  for (const bool saved : {false, true}) {
    for (const int64_t steps : {3, 7}) {
      for (const bool blocks : {false, true}) {
        CAPTURE(saved, steps, blocks);
        const TemporaryFolder folder;
        auto before = run_with<O>(saved, both(sharded(blocks), saving(folder, steps)));
        for (int64_t t = 0; t < steps; ++t) {
          REQUIRE(before.step({gradients_of(before.ranks, t, true)}) == "");
        }
        auto next = run_with<O>(!saved, both(sharded(blocks), saving(folder, 100)));
        CHECK(unless_sentence(next.resume(), {"cannot resume", "shared out", "compress_vectors"}) == "");
        auto same = run_with<O>(saved, both(sharded(blocks), saving(folder, 100)));
        REQUIRE(same.resume() == "");
        REQUIRE(run_beside(before, same, steps, steps + 2) == "");
      }
    }
  }
}

}  // namespace pacer::testing::shards_onebit
