// What Shards is made of: layouts, sums of parts, and the memory that it takes.
#include <chrono>
#include <future>
#include <memory>
#include <random>

#include <pacer/parallel/parameter_shards.h>
#include <pacer/parallel/training_memory.h>

#include "support/catch.h"
#include "support/collectives/ranks.h"
#include "support/cpu_memory.h"
#include "support/message_of.h"
#include "support/parallel/rank_trainers.h"

namespace pacer::testing {

TEST_CASE("a layout gives every element of every tensor to exactly one rank", "[shards]") {
  std::mt19937 random(3);
  for (int trial = 0; trial < 200; ++trial) {
    const int ranks = 1 + static_cast<int>(random() % 7);
    std::vector<int64_t> counts(1 + random() % 6);
    for (int64_t& count : counts)
      count = static_cast<int64_t>(random() % 4 == 0 ? random() % 3 : random() % 2000);
    const ShardLayout layout(counts, ranks);
    CAPTURE(ranks, counts);
    REQUIRE(layout.elements() % (128 * ranks) == 0);
    int64_t end = 0;
    for (size_t t = 0; t < counts.size(); ++t) {
      REQUIRE(layout.begin(t) % 128 == 0);
      REQUIRE(layout.begin(t) >= end);
      end = layout.begin(t) + counts[t];
      const std::vector<int64_t> bounds = layout.bounds(t);
      REQUIRE(bounds.size() == static_cast<size_t>(ranks) + 1);
      REQUIRE(bounds.front() == 0);
      REQUIRE(bounds.back() == counts[t]);
      for (int rank = 0; rank < ranks; ++rank) {
        const auto r = static_cast<size_t>(rank);
        REQUIRE(bounds[r] <= bounds[r + 1]);
        if (bounds[r] == bounds[r + 1]) continue;
        REQUIRE(layout.begin(t) + bounds[r] >= rank * layout.part_elements());
        REQUIRE(layout.begin(t) + bounds[r + 1] <= (rank + 1) * layout.part_elements());
      }
    }
    REQUIRE(end <= layout.elements());
    REQUIRE(layout.elements() < end + 128 * (ranks + 1));
  }
}

TEST_CASE("a tensor begins at a multiple of a piece where it would cross one, and only there", "[shards]") {
  const ShardLayout layout({10, 10, 1, 300, 0, 10}, /*ranks=*/1, /*piece=*/256);
  const std::vector<int64_t> begins = {0, 128, 256, 512, 896, 896};
  for (size_t t = 0; t < begins.size(); ++t) {
    CAPTURE(t);
    CHECK(layout.begin(t) == begins[t]);
  }
  CHECK(layout.elements() == 1024);
}

TEST_CASE("a gradient that comes twice before its unit is sent adds up", "[shards]") {
  const auto options = torch::TensorOptions().requires_grad(true);
  const Tensor twice = torch::zeros({3}, options), once = torch::zeros({5}, options);
  const ParameterShards::Group named = {{"twice", twice}, {"once", once}};
  ParameterShards shards(named, Communicator::in_process(1)[0]);
  shards.begin_backward();
  for (const Tensor& parameter : {twice, twice, once}) parameter.sum().backward();
  shards.end_backward();
  shards.wait();
  for (const auto& part : shards.parts()) {
    CAPTURE(part.name);
    CHECK(part.gradient.eq(part.name == "twice" ? 2 : 1).all().item<bool>());
  }
}

TEST_CASE("backward fills a unit while the sum of the one before it waits for other ranks", "[shards]") {
  const auto worlds = Communicator::in_process(2, CommunicatorOptions().timeout(std::chrono::seconds(30)));
  std::promise<void> first_is_through;
  auto through = first_is_through.get_future();
  const auto messages = run_ranks(2, [&](int rank) {
    const auto options = torch::TensorOptions().requires_grad(true);
    const ParameterShards::Group named = {{"a", torch::zeros({600}, options)},
                                          {"b", torch::zeros({600}, options)}};
    ParameterShards shards(named, worlds[static_cast<size_t>(rank)], ParameterShardsOptions().unit_bytes(1));
    require(shards.units().size() == 2, "other units");
    if (rank == 1) {
      require(through.wait_for(std::chrono::seconds(10)) == std::future_status::ready, "rank 0 waits");
    }
    shards.begin_backward();
    for (const auto& unit : shards.units()) {
      named[unit.front() == "a" ? 0 : 1].second.sum().backward();
    }
    if (rank == 0) first_is_through.set_value();
    shards.end_backward();
    shards.wait();
    for (const auto& part : shards.parts()) {
      require(part.gradient.eq(2).all().item<bool>(), "another sum");
    }
  });
  CHECK(first_of(messages) == "");
}

TEST_CASE("updates take no more memory the longer they go on", "[shards]") {
  constexpr int64_t kElements = 10'000;
  for (const bool every : {false, true}) {
    for (const bool in_groups : {false, true}) {
      CAPTURE(every, in_groups);
      const CountedCpuMemory memory;
      const auto world = Communicator::in_process(1)[0];
      const Tensor parameter = torch::zeros({kElements}, torch::TensorOptions().requires_grad(true));
      const ParameterShards::Group all = {{"parameter", parameter}};
      const auto options = ParameterShardsOptions().reduce_every_backward(every);
      const auto shards = in_groups ? std::make_unique<ParameterShards>(
                                          std::vector<ParameterShards::Group>{all}, world, options)
                                    : std::make_unique<ParameterShards>(all, world, options);
      int64_t after_first = 0;
      for (int update = 0; update < 10; ++update) {
        shards->begin_backward();
        parameter.sum().backward();
        shards->end_backward();
        shards->wait();
        if (update == 0) after_first = CountedCpuMemory::live();
      }
      // An operation may let go of its tensors a moment after it was waited for.
      CHECK(CountedCpuMemory::live() - after_first < 4 * kElements * int64_t{sizeof(float)});
    }
  }
}

// Whole numbers, whose sums are exact in any order.
TEST_CASE("parts hold the sums over ranks and backward passes, of odd parameters, too", "[shards]") {
  for (const int world_size : {1, 2, 3, 5}) {
    for (const auto& [every, unit_bytes] :
         {std::pair(false, 1000), std::pair(true, 1000), std::pair(true, 1)}) {
      CAPTURE(world_size, every, unit_bytes);
      const auto worlds = Communicator::in_process(world_size);
      const auto options_of_shards =
          ParameterShardsOptions().unit_bytes(unit_bytes).reduce_every_backward(every);
      const auto messages = run_ranks(world_size, [&](int rank) {
        const auto options = torch::TensorOptions().requires_grad(true);
        const std::vector<std::pair<std::string, Tensor>> named = {
            {"large", torch::zeros({37, 41}, options)},
            {"one", torch::zeros({}, options)},
            {"empty", torch::zeros({0, 3}, options)},
            {"double", torch::zeros({5, 60}, options.dtype(torch::kDouble))},
            {"frozen", torch::zeros({3})},
            {"late", torch::zeros({7}, options)},
            {"first window only", torch::zeros({9}, options)}};
        ParameterShards shards(named, worlds[static_cast<size_t>(rank)], options_of_shards);
        // Whether backward reaches the parameter.
        const auto reaches = [](const std::string& name, int window, int pass) {
          return name != "frozen" && (name != "late" || pass > 0) &&
                 (name != "first window only" || window == 0);
        };
        for (int window = 0; window < 2; ++window) {
          for (int pass = 0; pass < 3; ++pass) {
            ParameterShards::Pass now;
            now.is_last = pass == 2;
            Tensor loss = torch::zeros({}, torch::kDouble);
            for (const auto& [name, parameter] : named) {
              if (!reaches(name, window, pass)) {
                now.absent.push_back(parameter);
                if (window == 1 && name != "late") now.absent_in_all.push_back(parameter);
                continue;
              }
              const Tensor factor =
                  torch::arange(parameter.numel(), parameter.options().requires_grad(false));
              loss = loss + ((factor.view(parameter.sizes()) + (rank + 1) * (pass + 1)) * parameter).sum();
            }
            shards.begin_backward(now);
            loss.backward();
            for (const auto& [name, parameter] : named) {
              require(!parameter.grad().defined(), name, " kept its gradient");
            }
            shards.end_backward();
          }
          shards.wait();
          for (const auto& part : shards.parts()) {
            int passes = 0, sum_of_passes = 0;
            for (int pass = 0; pass < 3; ++pass) {
              passes += reaches(part.name, window, pass);
              sum_of_passes += reaches(part.name, window, pass) ? pass + 1 : 0;
            }
            const int sum_of_ranks = world_size * (world_size + 1) / 2;
            const Tensor wanted =
                torch::arange(part.first, part.first + part.count, part.gradient.options()) * passes *
                    world_size +
                static_cast<double>(sum_of_passes * sum_of_ranks);
            require(part.gradient.equal(wanted), part.name, " has another sum in window ", window);
          }
        }
        // New values of the parts reach all ranks.
        const at::NoGradGuard no_grad;
        for (const auto& part : shards.parts()) {
          part.parameter.view({-1}).fill_(-1);
          part.parameter.view({-1})
              .narrow(0, part.first, part.count)
              .copy_(torch::arange(part.first, part.first + part.count));
        }
        shards.gather_parameters();
        for (const auto& part : shards.parts()) {
          const Tensor wanted = torch::arange(part.parameter.numel(), part.gradient.options());
          require(part.parameter.view({-1}).equal(wanted), part.name, " has other values after the gather");
        }
      });
      REQUIRE(first_of(messages) == "");
    }
  }
}

TEST_CASE("fp16 gradients whose sum overflows are divided before they are added", "[shards]") {
  const auto worlds = Communicator::in_process(2);
  const auto messages = run_ranks(2, [&](int rank) {
    const Tensor parameter =
        torch::zeros({300}, torch::TensorOptions().dtype(torch::kHalf).requires_grad(true));
    ParameterShards shards({{"half", parameter}}, worlds[static_cast<size_t>(rank)]);
    shards.begin_backward();
    (parameter * 40'000).sum().backward();
    shards.end_backward();
    shards.wait();
    const Tensor& gradient = shards.parts()[0].gradient;
    require(shards.scale() == 0.5 && gradient.eq(40'000).all().item<bool>(), "the mean is another");
  });
  REQUIRE(first_of(messages) == "");
}

TEST_CASE("a part's gradient has memory from the sum to the update, and refuses to be read else",
          "[shards]") {
  const auto worlds = Communicator::in_process(2);
  const auto messages = run_ranks(2, [&](int rank) {
    const Tensor parameter = torch::ones({300}, torch::requires_grad());
    ParameterShards shards({{"weight", parameter}}, worlds[static_cast<size_t>(rank)]);
    const Tensor gradient = shards.parts()[0].gradient;
    const auto refusal = [&] { return message_of([&] { (void)gradient.sum(); }); };
    for (int window = 1; window <= 3; ++window) {
      require(refusal().find("to the end of the step") != std::string::npos, "read before: ", refusal());
      shards.begin_backward();
      (parameter * window).sum().backward();
      shards.end_backward();
      shards.wait();
      require(gradient.eq(2 * window).all().item<bool>(), "another sum in window ", window);
      shards.gather_parameters();
    }
    require(refusal().find("to the end of the step") != std::string::npos, "read afterwards: ", refusal());
  });
  REQUIRE(first_of(messages) == "");
}

// What all ranks together have allocated at the peak of a step. Beside the plan: a few gradients of one layer
// on their way through autograd, flat memory and the transport, activations, and padding to 128 W elements.
TEST_CASE("training takes the memory that training_memory says", "[shards][session]") {
  constexpr int kRanks = 4;
  constexpr int64_t kLayers = 40, kWide = 128, kParameters = kLayers * kWide * (kWide + 1);
  struct Case {
    std::string name;
    at::ScalarType dtype;
    MasterWeights master;
  };
  const std::vector<Case> cases = {{"fp32", at::kFloat, MasterWeights::automatic},
                                   {"bf16", at::kBFloat16, MasterWeights::automatic},
                                   {"bf16 with masters", at::kBFloat16, MasterWeights::fp32},
                                   {"bf16 in 24 bits", at::kBFloat16, MasterWeights::remainder_8},
                                   {"bf16 alone", at::kBFloat16, MasterWeights::none}};
  for (const Case& c : cases) {
    const auto layer = static_cast<int64_t>(c10::elementSize(c.dtype)) * kWide * (kWide + 1);
    for (const auto sharded :
         {std::optional<Sharded>(), std::optional(Sharded::state), std::optional(Sharded::gradients)}) {
      RankSetup setup;
      setup.widths = std::vector<int64_t>(kLayers + 1, kWide);
      setup.dtype = c.dtype;
      setup.options = FusedAdamWOptions(0.01).master_weights(c.master);
      setup.reduction = [&, sharded](Session& session) {
        if (sharded) {
          session.use(Shards(ShardsOptions().what(*sharded).unit_bytes(layer)));
        } else {
          session.use(DataParallel(DataParallelOptions().bucket_bytes(layer).first_bucket_bytes(layer)));
        }
      };
      auto options = TrainingMemoryOptions(kParameters).ranks(kRanks).dtype(c.dtype).master_weights(c.master);
      const TrainingMemory plan = training_memory(options.sharded(sharded).unit_bytes(layer));
      const CountedCpuMemory memory;
      const int64_t before = CountedCpuMemory::live();
      auto trainers = trainers_of(std::vector<RankSetup>(kRanks, setup));
      const auto step = [](RankTrainer& t, int) { t.step(); };
      REQUIRE(first_of(run_all(trainers, step)) == "");
      CountedCpuMemory::reset_peak();
      REQUIRE(first_of(run_all(trainers, step)) == "");
      const int64_t found = (CountedCpuMemory::peak() - before) / kRanks;
      CAPTURE(c.name, sharded.has_value(), plan.total(), found, layer);
      INFO("Sharded::" << (sharded == Sharded::state ? "state" : "gradients"));
      // Ranks that keep whole gradients do not all reach their peak at the same moment.
      CHECK(found > (sharded == Sharded::state ? plan.total() / 4 * 3 : plan.total() - layer));
      CHECK(found < plan.total() + plan.total() / 50 + 5 * layer);
    }
  }
  SECTION("7.125 bytes a parameter in 24 bits, with moments in 8") {
    const auto options = TrainingMemoryOptions(1 << 20)
                             .dtype(at::kBFloat16)
                             .state_bits(8)
                             .master_weights(MasterWeights::remainder_8);
    CHECK(training_memory(options).exact == 1 << 20);
    CHECK(training_memory(options).total() * 8 == (1 << 20) * int64_t{57});
  }
  SECTION("as the documentation's table") {
    const auto gigabytes = [](std::optional<Sharded> sharded) {
      const auto options = TrainingMemoryOptions(7'000'000'000).ranks(8).sharded(sharded);
      return static_cast<double>(training_memory(options).total()) / 1e9;
    };
    CHECK(gigabytes(std::nullopt) == Catch::Approx(112));
    CHECK(gigabytes(Sharded::state) == Catch::Approx(66.5));
    CHECK(gigabytes(Sharded::gradients) == Catch::Approx(38.5 + 0.0524).epsilon(1e-3));
    CHECK(training_memory(TrainingMemoryOptions(64'000).state_bits(8)).moments == 64'000 * 17 / 8);
    CHECK(training_memory(TrainingMemoryOptions(33).state_bits(8)).moments == 2 * 33 + 2 * 2 * 2);
    CHECK_THROWS_AS(training_memory(TrainingMemoryOptions(5).state_bits(8).amsgrad(true)), InvalidArgument);
    CHECK_THROWS_AS(training_memory(TrainingMemoryOptions(5).state_bits(16)), InvalidArgument);
    const auto muon = TrainingMemoryOptions(64'000).orthogonalized(32'000);
    CHECK(training_memory(muon).moments == 32'000 * 4 + 32'000 * 8);
    CHECK(training_memory(TrainingMemoryOptions(muon).state_bits(8)).moments == 32'000 * 17 / 16 * 3);
    CHECK_THROWS_AS(training_memory(TrainingMemoryOptions(5).orthogonalized(6)), InvalidArgument);
    CHECK_THROWS_AS(training_memory(TrainingMemoryOptions(muon).amsgrad(true)), InvalidArgument);
    CHECK_THROWS_AS(training_memory(TrainingMemoryOptions(5).ranks(0)), InvalidArgument);
    CHECK_THROWS_AS(training_memory(TrainingMemoryOptions(5).dtype(at::kLong)), InvalidArgument);
  }
}

}  // namespace pacer::testing
