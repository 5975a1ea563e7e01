// Micro-batches of no tokens leave nothing behind: neither gradients nor magnitudes for 8-bit scales nor a
// loss, with and without weights by tokens, alone and in a pipeline.
#include <cmath>

#include "support/captured_stderr.h"
#include "support/hooks/empty_micro_batches.h"
#include "support/parallel/pipeline_runs.h"
#include "support/session/small_run.h"

namespace pacer::testing::empty_micro_batches {
namespace {

void check_same(const Trained& a, const Trained& b) {
  CHECK(first_difference(a.scales, b.scales) == "");
  CHECK(a.scales.size() == b.scales.size());
  CHECK(a.norms == b.norms);
  CHECK(same_bits(a.weights, b.weights));
}

// Micro-batch number 1 of each window has targets that count for nothing, as a hook that masks would have it.
class Masked : public Hook {
 public:
  std::string hook_name() const override { return "masked"; }
  Slot slot() const override { return Slot::data; }
  void begin(const Progress& progress, MicroBatch& batch) override {
    if (progress.micro_step != 1) return;
    batch.tensors[1] = torch::full_like(batch.tensors[1], -100);
    batch.tokens = 0;
  }
};

}  // namespace

TEST_CASE("a micro-batch of no tokens whose loss is 0 / 0 leaves no trace in 8-bit scales and gradients",
          "[session][fp8][padding]") {
  for (const bool by_tokens : {true, false}) {
    CAPTURE(by_tokens);
    const Trained real = trained({{true}, {true}, {true}, {true}}, by_tokens);
    REQUIRE(real.scales.size() > 0);
    check_same(real, trained({{true, false}, {false, true}, {true, false}, {false, true}}, by_tokens));
    check_same(
        real,
        trained({{false, true, false}, {true, false, false}, {false, false, true}, {true, false, false}},
                by_tokens));
  }
}

TEST_CASE("a window of no tokens changes nothing and is warned of, without weights by tokens, too",
          "[session][padding]") {
  for (const bool by_tokens : {true, false}) {
    for (const bool in_8_bits : {true, false}) {
      const Trained real = trained({{true}, {true}}, by_tokens, in_8_bits);
      const Trained with = trained({{true}, {false}, {true}, {false}}, by_tokens, in_8_bits);
      CHECK(same_bits(real.weights, with.weights));
      CHECK(first_difference(real.scales, with.scales) == "");
      CHECK(with.said.find("trains on no token") != std::string::npos);
      CHECK(real.said.find("trains on no token") == std::string::npos);
    }
  }
}

TEST_CASE("a batch without rows changes nothing and is warned of", "[session][padding]") {
  torch::nn::Linear model(3, 2);
  FusedAdamW optimizer(model->parameters());
  const auto before = model->weight.detach().clone();
  const CapturedStderr captured;
  Session session(model, optimizer);
  for (int i = 0; i < 2; ++i) {
    auto [x] = session.begin(torch::ones({0, 3}));
    session.backward(model->forward(x).square().mean());
    session.step();
  }
  session.finish();
  CHECK(model->weight.equal(before));
  CHECK(captured.text().find("trains on no token") != std::string::npos);
}

TEST_CASE("in a pipeline a micro-batch of no tokens leaves no trace either", "[pipeline][padding][fp8]") {
  for (const bool by_tokens : {true, false}) {
    for (const bool in_8_bits : {true, false}) {
      CAPTURE(by_tokens, in_8_bits);
      pipelines::Setup setup;
      setup.rows = 4;  // with 12 positions a multiple of 16
      setup.options.weight_by_tokens(by_tokens);
      setup.use = [in_8_bits](Session& session, pipelines::LanguageModel&) {
        session.use(Masked());
        if (in_8_bits) session.use(Precision::fp8());
      };
      const pipelines::Result whole = pipelines::run_whole(setup);
      for (const auto& [name, gradient] : whole.gradients.back()) {
        CAPTURE(name);
        REQUIRE(gradient.isfinite().all().item<bool>());
      }
      for (const PipelineSchedule& schedule : {one_f_one_b(4), zero_bubble(4)}) {
        const pipelines::Result piped = pipelines::run_piped(setup, schedule, /*stages=*/2);
        pipelines::require_same(whole, piped);
        for (const double loss : piped.losses) CHECK(std::isfinite(loss));
      }
    }
  }
}

TEST_CASE("Pipeline::evaluate under NoGradGuard is one in Session::evaluate", "[pipeline]") {
  pipelines::Setup setup;
  const auto worlds = Communicator::in_process(2, CommunicatorOptions().timeout(setup.timeout));
  std::vector<pipelines::LanguageModel> models = {pipelines::make_model(setup), pipelines::make_model(setup)};
  const auto messages = run_ranks(2, [&](int r) {
    const auto at = static_cast<size_t>(r);
    pipelines::PipelineRank rank(setup, one_f_one_b(4), 2, worlds[at], models[at]);
    rank.step(0);
    const auto before = rank.weights();
    const double inside = rank.session->evaluate([&] { return rank.evaluate(); });
    const double plain = rank.evaluate();
    double guarded = 0;
    {
      const torch::NoGradGuard no_grad;
      guarded = rank.evaluate();
    }
    RANK_REQUIRE(guarded == inside);
    RANK_REQUIRE(plain == inside);
    RANK_REQUIRE(pipelines::difference(before, rank.weights()) == "");  // running statistics, too
    RANK_REQUIRE(rank.model->is_training());
    rank.step(1);
    rank.session->finish();
  });
  CHECK(first_of(messages) == "");
}

TEST_CASE("a pass without gradients in train() moves no 8-bit scale", "[session][fp8]") {
  const auto scales_after = [](bool teaches) {
    SmallModel model = small_model();
    FusedAdamW optimizer(model->named_parameters(), FusedAdamWOptions(0.01));
    SessionParts* parts = nullptr;
    Session session(model, optimizer);
    session.use(PartsProbe(parts)).use(Precision::fp8());
    for (int step = 0; step < 3; ++step) {
      const auto [ids, targets] = small_batch(step);
      auto [x, y] = session.begin(ids, targets);
      if (teaches) {
        const torch::NoGradGuard no_grad;
        model->blocks[1](torch::full({16, kWidth}, 1000.0));
      }
      session.backward(model->loss(x, y));
      session.step();
    }
    NamedTensors scales;
    parts->find<Precision>()->save(scales);
    for (auto& [name, tensor] : scales) tensor = tensor.clone();
    session.finish();
    return scales;
  };
  CHECK(first_difference(scales_after(true), scales_after(false)) == "");
}

}  // namespace pacer::testing::empty_micro_batches
