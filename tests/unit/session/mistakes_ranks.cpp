// Mistakes with two ranks: they are not alike, or do not do the same. Both hear of it, in a sentence that
// names what differs, and none hangs.
#include <functional>
#include <limits>

#include <pacer/pacer.h>

#include "support/catch.h"
#include "support/parallel/rank_trainers.h"
#include "support/session/mistakes.h"

namespace pacer::testing {
namespace {

CommunicatorOptions impatient() { return CommunicatorOptions().timeout(std::chrono::seconds(3)); }

// Rank 1 is set up in another way.
struct OddRank {
  std::string name;
  std::vector<std::string> says;
  std::function<void(RankSetup&)> change;
};

std::vector<OddRank> odd_ranks() {
  const auto use = [](auto make) {
    return [make](RankSetup& s) { s.hooks = [make](Session& session) { session.use(make()); }; };
  };
  return {
      {"another width",
       {"[6, 4]", "[7, 4]"},
       [](RankSetup& s) {
         s.widths = {4, 7, 3};
       }},
      {"a layer more",
       {"2.weight"},
       [](RankSetup& s) {
         s.widths = {4, 6, 3, 3};
       }},
      {"no biases", {"parameter 1"}, [](RankSetup& s) { s.bias = false; }},
      {"another dtype", {"Float", "Double"}, [](RankSetup& s) { s.dtype = at::kDouble; }},
      {"another order", {"1.bias"}, [](RankSetup& s) { s.reversed = true; }},
      {"a group more",
       {"parameter groups: 1", "parameter groups: 2"},
       [](RankSetup& s) { s.two_groups = true; }},
      {"a frozen layer", {"frozen"}, [](RankSetup& s) { s.frozen = true; }},
      {"another learning rate",
       {"learning rate of parameter group 0", "0.01", "0.5"},
       [](RankSetup& s) { s.options.lr(0.5); }},
      {"another beta1",
       {"beta1"},
       [](RankSetup& s) {
         s.options.betas({0.8, 0.999});
       }},
      {"another beta2",
       {"beta2"},
       [](RankSetup& s) {
         s.options.betas({0.9, 0.99});
       }},
      {"another eps", {"eps"}, [](RankSetup& s) { s.options.eps(1e-7); }},
      {"another decay", {"weight_decay"}, [](RankSetup& s) { s.options.weight_decay(0.5); }},
      {"another check", {"finite_check"}, [](RankSetup& s) { s.options.finite_check(true); }},
      {"another bias correction",
       {"bias_correction"},
       [](RankSetup& s) { s.options.bias_correction(false); }},
      {"clipping on one rank", {"hooks: ", "gradient_clipping"}, use([] { return GradientClipping(1.0); })},
      {"a schedule on one rank", {"hooks: ", "learning_rate"}, use([] {
         return LearningRate(constant_schedule());
       })},
      {"a curriculum on one rank", {"hooks: ", "sequence_length"}, use([] {
         return SequenceLength(SequenceLengthOptions(1, 4).ramp_steps(5).difficulty_step(1));
       })},
      {"bf16 on one rank", {"hooks: ", "precision"}, use([] { return Precision::bf16(); })},
      {"other windows", {"micro-steps: 1", "micro-steps: 2"}, use([] { return GradientAccumulation(2); })},
      {"other buckets", {"buckets"}, [](RankSetup& s) { s.data_parallel.bucket_bytes(100); }},
      {"another dtype on the wire",
       {"BFloat16"},
       [](RankSetup& s) { s.data_parallel.wire_dtype(at::kBFloat16); }},
      {"unused parameters are zero",
       {"are zero"},
       [](RankSetup& s) { s.data_parallel.unused_is_zero(true); }},
      {"buffers of its own", {"each rank's own"}, [](RankSetup& s) { s.data_parallel.sync_buffers(false); }},
      {"another step", {"step 5"}, [](RankSetup& s) { s.first_step = 5; }},
  };
}

// Both ranks are alike, and rank 1 does something else.
struct OddDeed {
  std::string name;
  std::vector<std::string> says;  // to each of the ranks
  std::function<void(RankTrainer&)> usual, odd;
};

void steps(RankTrainer& trainer, int count) {
  for (int i = 0; i < count; ++i) trainer.step();
}

std::vector<OddDeed> odd_deeds() {
  const auto step = [](RankTrainer& t) { steps(t, 2); };
  const auto world = [](RankTrainer& t) -> Communicator& { return t.parts->world(); };
  const auto ones = [](int64_t count) { return torch::ones({count}); };
  return {
      {"a step less",
       {"rank 1", "no more data after step 1"},
       step,
       [](RankTrainer& t) {
         t.step();
         t.session->finish();
       }},
      {"an exception of the user",
       {"rank 1"},
       step,
       [](RankTrainer& t) {
         t.step();
         throw std::runtime_error("rank 1 made this up");
       }},
      {"a collective during a step",
       {"rank 1 calls all_reduce", "of 3 elements", "rank 0 takes a step"},
       step,
       [=](RankTrainer& t) {
         t.step();
         world(t).all_reduce(ones(3)).wait();
       }},
      {"a broadcast during a step",
       {"rank 1 calls broadcast", "on every rank, or on none"},
       step,
       [=](RankTrainer& t) {
         t.step();
         world(t).broadcast(ones(3)).wait();
       }},
      {"a gather while the other ends",
       {"rank 1 calls all_gather", "rank 0 has no more data"},
       [](RankTrainer& t) {
         t.step();
         t.session->finish();
       },
       [=](RankTrainer& t) {
         t.step();
         world(t).all_gather(ones(6), ones(3)).wait();
       }},
      {"a rate set by hand",
       {"learning rate of parameter group 0: 0.01", "learning rate of parameter group 0: 0.25"},
       [](RankTrainer& t) { steps(t, 3); },
       [](RankTrainer& t) {
         t.step();
         t.optimizer->param_groups()[0].options().set_lr(0.25);
         steps(t, 2);
       }},
      {"a layer frozen on the way",
       {"rank"},
       [](RankTrainer& t) { steps(t, 3); },
       [](RankTrainer& t) {
         t.step();
         t.model->parameters().front().requires_grad_(false);
         steps(t, 2);
       }},
      {"another operation",
       {"rank 0 calls all_reduce", "rank 1 calls broadcast"},
       [=](RankTrainer& t) { world(t).all_reduce(ones(3)).wait(); },
       [=](RankTrainer& t) { world(t).broadcast(ones(3)).wait(); }},
      {"another size",
       {"of 3 elements", "of 4 elements"},
       [=](RankTrainer& t) { world(t).all_reduce(ones(3)).wait(); },
       [=](RankTrainer& t) { world(t).all_reduce(ones(4)).wait(); }},
      {"another dtype",
       {"Float", "Double"},
       [=](RankTrainer& t) { world(t).all_reduce(ones(3)).wait(); },
       [=](RankTrainer& t) { world(t).all_reduce(ones(3).to(at::kDouble)).wait(); }},
      {"another root",
       {"from rank 0", "from rank 1"},
       [=](RankTrainer& t) { world(t).broadcast(ones(3), 0).wait(); },
       [=](RankTrainer& t) { world(t).broadcast(ones(3), 1).wait(); }},
      {"another number of tensors",
       {"in 2 tensors", "in 3 tensors"},
       [=](RankTrainer& t) {
         world(t).all_reduce_coalesced({ones(2), ones(4)}).wait();
       },
       [=](RankTrainer& t) {
         world(t).all_reduce_coalesced({ones(2), ones(2), ones(2)}).wait();
       }},
      {"a call less",
       {"rank 1"},
       [=](RankTrainer& t) {
         world(t).all_reduce(ones(3)).wait();
         world(t).all_reduce(ones(3)).wait();
       },
       [=](RankTrainer& t) {
         world(t).all_reduce(ones(3)).wait();
         world(t).leave("it is done");
       }},
      {"a compressed mean of another size",
       {"sizes of the compressed tensors: 8", "sizes of the compressed tensors: 9"},
       [=](RankTrainer& t) { CompressedAllReduce(t.parts->shared_world(), 8); },
       [=](RankTrainer& t) { CompressedAllReduce(t.parts->shared_world(), 9); }},
      {"other scales",
       {"by blocks"},
       [=](RankTrainer& t) { CompressedAllReduce(t.parts->shared_world(), 8); },
       [=](RankTrainer& t) {
         CompressedAllReduce(t.parts->shared_world(), 8, CompressionOptions().block_scales(true));
       }},
      {"a save that the other does not take part in",
       {"rank 0 takes a step", "rank 1 compares set-ups"},
       [](RankTrainer& t) { steps(t, 2); },
       [=](RankTrainer& t) {
         t.step();
         require_agreement(world(t), 1, {{"mine", "alone"}});
       }},
  };
}

}  // namespace

TEST_CASE("a rank that is set up in another way is told to both, and nothing is sent", "[mistakes]") {
  const auto all = odd_ranks();
  std::string faults;
  for (const OddRank& odd : all) {
    std::vector<RankSetup> setups(2);
    odd.change(setups[1]);
    auto trainers = trainers_of(setups, impatient());
    for (const std::string& message : run_all(trainers, [](RankTrainer&t, int) { steps(t, 1); })) {
      const std::string fault = fault_of(message, odd.says);
      if (!fault.empty()) faults += odd.name + ": " + fault + "\n";
    }
  }
  CHECK(faults == "");
  CHECK(all.size() == 24);
}

TEST_CASE("a rank that does something else is told to both", "[mistakes]") {
  const auto all = odd_deeds();
  std::string faults;
  for (const OddDeed& odd : all) {
    auto trainers = trainers_of(std::vector<RankSetup>(2), impatient());
    const auto messages = run_all(trainers, [&](RankTrainer& t, int rank) {
      try {
        rank == 0 ? odd.usual(t) : odd.odd(t);
      } catch (...) {
        t.session.reset();  // as the end of its scope does
        throw;
      }
      t.session.reset();
    });
    // Who ends by itself needs not be told.
    const std::string fault = fault_of(messages[0], odd.says);
    if (!fault.empty()) faults += odd.name + ": " + fault + "\n";
    if (!messages[1].empty() && contains(messages[1], "frame #")) faults += odd.name + ": a back trace\n";
  }
  CHECK(faults == "");
  CHECK(all.size() == 16);
}

TEST_CASE("what is true on all ranks is said by the first of them, once", "[mistakes]") {
  RankSetup setup;
  setup.hooks = [](Session& session) {
    session.use(GradientClipping(1.0)).use(LearningRate(warmup_linear({0, 3})));
    session.use(SequenceLength(SequenceLengthOptions(2, 4).ramp_steps(1'000)));
    session.use(GradientAccumulation(GradientAccumulationOptions(1).weight_by_tokens(true)));
  };
  setup.widths = {2, 6, 3};
  std::vector<std::string> messages;
  const std::string heard = heard_of([&] {
    auto trainers = trainers_of(std::vector<RankSetup>(2, setup), impatient());
    messages = run_all(trainers, [](RankTrainer& t, int) {
      t.inputs = torch::full({2, 4}, std::numeric_limits<float>::infinity());
      steps(t, 60);
      for (int i = 0; i < 2; ++i) {
        auto [x] = t.session->begin(t.inputs);
        t.session->count_tokens(0);
        t.session->backward(t.model->forward(x).mean());
        t.session->step();
      }
      t.session->finish();
    });
  });
  CHECK(first_of(messages) == "");
  const auto times = [&](const std::string& part) {
    size_t count = 0;
    for (size_t at = 0; (at = heard.find(part, at)) != std::string::npos; ++at) ++count;
    return count;
  };
  INFO(heard);
  CHECK(times("steps changed nothing, because") == 1);
  CHECK(times("schedule ended after 3 steps") == 1);
  CHECK(times("SequenceLength cuts dimension 1") == 1);
  CHECK(times("trains on no token") == 1);
}

TEST_CASE("what is said once may be renewed, on the first rank only", "[mistakes]") {
  OnceOnFirstRank first(true), other(false), unattached;
  CHECK(first.take());
  CHECK_FALSE(first.take());
  CHECK_FALSE(other.take());
  CHECK_FALSE(unattached.take());
  for (OnceOnFirstRank* each : {&first, &other, &unattached}) each->renew();
  CHECK(first.take());
  CHECK_FALSE(other.take());
  CHECK_FALSE(unattached.take());
}

}  // namespace pacer::testing
