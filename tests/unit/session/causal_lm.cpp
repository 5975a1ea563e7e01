// A CausalLm with the hooks that act on a model's blocks, layers and window, and on ranks: that they find what they look
// for in it. What they do to layers is tested with the SmallModel, whose layers are the same.
#include "support/session/causal_lm_runs.h"

namespace pacer::testing::causal_lm {
TEST_CASE("hooks find the blocks, the layers and the window of a CausalLm", "[session][causal_lm]") {
  const Trained wanted = train(plain);
  for (const KeptOperators& keep : {KeptOperators(), KeptOperators::attention(), KeptOperators::products()}) {
    CAPTURE(keep.names());
    const auto recompute = [&](Session& s, CausalLm& m) {
      s.use(Recompute(m->layers, RecomputeOptions().keep(keep)));
    };
    CHECK(largest_distance(train(recompute), wanted) == 0);
  }
  // What changes the numbers does so, and the run goes on.
  const std::vector<std::pair<std::string, Use>> others = {
      {"layer drop",
       [](Session& s, CausalLm& m) {
         s.use(LayerDrop(m->layers, LayerDropOptions().theta_bar(0.1).gamma(10)));
       }},
      {"bf16", [](Session& s, CausalLm&) { s.use(Precision::bf16()); }},
      {"fp8",
       [](Session& s, CausalLm& m) {
         CHECK(Fp8Scaling(*m).layers() == 4 * 4);  // qkv, projection, fc1 and fc2, not the head
         s.use(Precision::fp8());
       }},
      {"window", [](Session& s, CausalLm& m) {
         s.use(WindowLength(*m->options.window(), LengthSchedule(4, kLength).ramp_steps(10)));
       }}};
  for (const auto& [name, use] : others) {
    CAPTURE(name);
    const double distance = largest_distance(train(use), wanted);
    CHECK(distance > 0);
    CHECK(distance < 0.1);
  }
}

TEST_CASE("a Recompute that would keep nothing is an error", "[session][causal_lm][mistakes]") {
  CausalLm model = make_model(false, Trains::all);
  FusedAdamW optimizer(model->parameters(), FusedAdamWOptions(0.01));
  Session session(*model, optimizer);
  session.use(Recompute(model->layers, RecomputeOptions().keep({"aten::convolution", "aten::addmm"})));
  const auto batch = batch_of(2, 0);
  const auto [ids, targets] = session.begin(batch.first, batch.second);
  const Tensor loss = model->loss(ids, targets);  // its layers have no bias
  CHECK_THROWS_WITH(session.backward(loss), Catch::Matchers::ContainsSubstring(
                                                "RecomputeOptions::keep (aten::convolution, aten::addmm)"));
}

TEST_CASE("ranks with parts of a CausalLm train what one rank does", "[session][causal_lm][ranks]") {
  for (const bool tied : {false, true}) {
    const Trained wanted = train(plain, 2, tied);
    // Adam's first steps are the signs of gradients.
    CHECK(largest_distance(train(plain, 1, tied), wanted) < 1e-4);
    CHECK(largest_distance(train([](Session& s, CausalLm& m) { s.use(Shards(m->layers)); }, 2, tied),
                           wanted) == 0);
  }
}

TEST_CASE("a pipeline of a CausalLm trains what one rank does", "[session][causal_lm][pipeline]") {
  using Kind = std::pair<bool, Trains>;
  for (const auto& [is_tied, trained] : {Kind(false, Trains::all), Kind(true, Trains::all),
                                         Kind(false, Trains::lora), Kind(true, Trains::qlora)}) {
    const bool tied = is_tied;
    CAPTURE(tied, trained == Trains::lora);
    const Trained wanted =
        train([](Session& s, CausalLm&) { s.use(GradientAccumulation(1)); }, 1, tied, trained);
    const Ranks worlds = Communicator::in_process(2, {});
    std::vector<CausalLm> models = {make_model(tied, trained), make_model(tied, trained)};
    std::vector<double> losses;
    const auto messages = run_ranks(2, [&](int rank) {
      CausalLm& model = models[static_cast<size_t>(rank)];
      const auto& world = worlds[static_cast<size_t>(rank)];
      std::vector<std::string> last = {"norm"};
      last.emplace_back(tied ? "embedding" : "head");
      Pipeline pipeline(
          *model, model->layers, [&](size_t i, const Tensor& x) { return model->run_layer(i, x); },
          Grid(world, 2), one_f_one_b(2), PipelineOptions().first({"embedding"}).last(last));
      std::vector<Tensor> parameters;
      for (const auto& item : pipeline.named_parameters()) {
        if (item.value().requires_grad()) parameters.push_back(item.value());
      }
      FusedAdamW optimizer(parameters, FusedAdamWOptions(0.01));
      Session session(*model, optimizer, world);
      session.use(pipeline).use(GradientClipping(1.0));
      for (int64_t step = 0; step < 3; ++step) {
        const auto [ids, targets] = batch_of(4, step);
        const Tensor loss = pipeline.step(
            session, ids, targets, [&](const Tensor& x) { return model->embed(x); },
            [&](const Tensor& h, const Tensor& y) { return model->loss_behind_layers(h, y); });
        session.step();
        if (rank == 0) losses.push_back(loss.item<double>());
      }
      session.finish();
    });
    REQUIRE(first_of(messages) == "");
    REQUIRE(losses.size() == wanted.losses.size());
    for (size_t i = 0; i < losses.size(); ++i)
      CHECK(losses[i] == Catch::Approx(wanted.losses[i]).epsilon(1e-4));
  }
}

TEST_CASE("adapters of a CausalLm are trained with its hooks, by one rank as by several",
          "[session][causal_lm][lora]") {
  for (const Trains trains : {Trains::lora, Trains::qlora}) {
    CAPTURE(trains == Trains::qlora);
    CausalLm model = make_model(false, trains);
    CHECK(modules::trainable(*model).size() == size_t{4} * 4 * 2);
    const auto run = [&](const Use& use, int ranks = 1) { return train(use, ranks, false, trains); };
    const Trained wanted = run(plain);
    for (const auto& item : modules::trainable(*model)) {
      CAPTURE(item.key());
      CHECK_FALSE(item.value().equal(wanted.weights.at(item.key())));
    }
    for (const KeptOperators& keep : {KeptOperators(), KeptOperators::products()}) {
      const auto recompute = [&](Session& s, CausalLm& m) {
        s.use(Recompute(m->layers, RecomputeOptions().keep(keep)));
      };
      CHECK(largest_distance(run(recompute), wanted) == 0);
    }
    const Trained by_two = run(plain, 2);
    CHECK(largest_distance(by_two, wanted) < 1e-4);
    const auto shards = [](Session& s, CausalLm& m) { s.use(Shards(m->layers)); };
    CHECK(largest_distance(run(shards, 2), by_two) == 0);
    const auto bf16 = [](Session& s, CausalLm&) { s.use(Precision::bf16()); };
    const auto fp8 = [&](Session& s, CausalLm&) {
      s.use(Precision::fp8(Fp8Options().quantized_weights(trains == Trains::qlora)));
    };
    for (const Use& use : {Use(bf16), Use(fp8)}) {
      const double distance = largest_distance(run(use), wanted);
      CHECK(distance > 0);
      CHECK(distance < 0.1);
    }
  }
}

}  // namespace pacer::testing::causal_lm
