// Gradients on several ranks between two calls of a Session: while they are added up nobody reads or changes
// them, and what is written before is averaged.
#include <string>

#include <torch/nn/utils/clip_grad.h>

#include "support/catch.h"
#include "support/message_of.h"
#include "support/parallel/rank_gradients.h"

namespace pacer::testing::rank_gradients {
namespace {

struct Form {
  std::string name;
  MakeOptimizer optimizer;
  Use use;
};

// All in which gradients travel between backward and step.
std::vector<Form> travelling_forms() {
  return {{"flat", kSgd, data_parallel(false)},
          {"in place", kFused, data_parallel(true)},
          {"shards of gradients", kFused, [](Session& s, Model&) { s.use(Shards()); }},
          {"shards of parameters", kFused, [](Session& s, Model& m) { s.use(Shards(m->blocks)); }},
          {"shards of parameters, reduced once", kFused,
           [](Session& s, Model& m) {
             s.use(Shards(m->blocks, ShardsOptions().reduce_every_micro_step(false)));
           }},
          {"1-bit, warm-up", onebit(false), data_parallel(false)}};
}

void require_says(const std::string& text, const std::vector<std::string>& parts) {
  for (const std::string& part : parts) {
    require<Error>(text.find(part) != std::string::npos, "no \"", part, "\" in: ", text);
  }
}

}  // namespace

TEST_CASE("a gradient on its way is neither read nor changed, and the step goes on without harm",
          "[session][ranks][gradients]") {
  struct Line {
    std::string name;
    std::function<void(Rank&)> run;
  };
  const std::vector<Line> lines = {
      {"clip", [](Rank& r) { torch::nn::utils::clip_grad_norm_(r.model->parameters(), 0.01); }},
      {"mul", [](Rank& r) { r.parameter(0).grad().mul_(2); }},
      {"clone", [](Rank& r) { r.parameter(0).mutable_grad() = r.parameter(0).grad().clone(); }},
      {"item", [](Rank& r) { (void)r.parameter(0).grad().norm().item<double>(); }},
      {"another backward", [](Rank& r) { (r.parameter(0) * 2).sum().backward(); }},
  };
  for (const Form& form : travelling_forms()) {
    CAPTURE(form.name);
    Ranked ranks = ranks_of(2, form.optimizer, form.use), twins = ranks_of(2, form.optimizer, form.use);
    // With their values, where ranks keep parts of them.
    const auto values = [](Rank& r) {
      const auto whole = r.session->whole_parameters();
      std::vector<Tensor> all;
      for (const Tensor& parameter : r.model->parameters()) all.push_back(parameter.detach().clone());
      return all;
    };
    std::vector<std::vector<Tensor>> expected(2), trained(2);
    REQUIRE(run(twins, [&](Rank& r, int rank) {
              for (int64_t t = 0; t < 2; ++t) r.micro_step(2 * t + rank);
              expected[static_cast<size_t>(rank)] = values(r);
            }) == "");
    CHECK(run(ranks, [&](Rank& r, int rank) {
            for (int64_t t = 0; t < 2; ++t) {
              r.backward(2 * t + rank);
              for (const Line& line : lines) {
                // A forward pass is refused before, because the values of parameters have left.
                if (line.name == "another backward" && form.name.find("parameters") != std::string::npos)
                  continue;
                const std::string message = message_of([&] { line.run(r); });
                require_says(line.name + ": " + message,
                             {"gradient of parameter first.weight", "GradientClipping", "gradients_ready"});
              }
              r.session->step();
            }
            trained[static_cast<size_t>(rank)] = values(r);
          }) == "");
    for (size_t rank = 0; rank < 2; ++rank) {
      REQUIRE(trained[rank].size() == expected[rank].size());
      for (size_t i = 0; i < expected[rank].size(); ++i)
        CHECK(same_bits(trained[rank][i], expected[rank][i]));
    }
  }
}

TEST_CASE("a gradient that is cleared or replaced on its way is refused by name",
          "[session][ranks][gradients]") {
  for (const Form& form : travelling_forms()) {
    CAPTURE(form.name);
    for (const bool is_cleared : {true, false}) {
      Ranked ranks = ranks_of(2, form.optimizer, form.use);
      std::vector<std::string> said(2);
      // A rank may hear of the other's before it finds its own.
      REQUIRE(run(ranks, [&](Rank& r, int rank) {
                said[static_cast<size_t>(rank)] = message_of([&] {
                  r.micro_step(rank);
                  r.backward(2 + rank);
                  if (is_cleared) {
                    r.optimizer->zero_grad();
                  } else {
                    r.parameter(0).mutable_grad() = torch::ones({4, 3});
                  }
                  r.session->step();
                });
              }) == "");
      for (const std::string& message : said) {
        CHECK(contains(message, "first.weight"));
        CHECK(contains(message, is_cleared ? "delete zero_grad()" : "gradient of its own"));
      }
    }
  }
}

TEST_CASE("the optimizer's own step is refused while gradients travel", "[session][ranks][gradients]") {
  for (const MakeOptimizer& make : {kSgd, kAdamW, kFused}) {
    Ranked ranks = ranks_of(2, make, data_parallel(false)), twins = ranks_of(2, make, data_parallel(false));
    CHECK(
        run(ranks, [&](Rank& r, int rank) {
          r.backward(rank);
          require_says(message_of([&] { r.optimizer->step(); }), {"gradient of parameter", "Session::step"});
          r.session->step();
        }) == "");
    CHECK(distance(*ranks[0], *ranks[1]) == 0);
    // LibTorch's AdamW has decayed its first parameter and its first moment before it reads a gradient.
    if (dynamic_cast<torch::optim::AdamW*>(ranks[0]->optimizer.get()) != nullptr) continue;
    CHECK(run(twins, [](Rank& r, int rank) { r.micro_step(rank); }) == "");
    CHECK(distance(*ranks[0], *twins[0]) == 0);
  }
}

TEST_CASE("gradients are there again where a Session ends before its step", "[session][ranks][gradients]") {
  for (const bool in_place : {false, true}) {
    Ranked ranks = ranks_of(2, kSgd, data_parallel(in_place));
    CHECK(run(ranks, [&](Rank& r, int rank) {
            r.micro_step(rank);
            r.backward(2 + rank);
            r.world->barrier();  // a rank that leaves first would stop the other
            r.session.reset();
            RANK_REQUIRE(r.parameter(0).grad().isfinite().all().item<bool>());
            r.optimizer->zero_grad();
            RANK_REQUIRE(!r.parameter(0).grad().defined());
          }) == "");
  }
}

TEST_CASE("what is written to gradients between micro-steps is averaged", "[session][ranks][gradients]") {
  for (const bool in_place : {false, true}) {
    CAPTURE(in_place);
    const Use use = [&](Session& session, Model& model) {
      session.use(GradientAccumulation(2));
      data_parallel(in_place)(session, model);
    };
    Ranked ranks = ranks_of(2, kSgd, use);
    Ranked alone = ranks_of(1, kSgd, [](Session& s, Model&) { s.use(GradientAccumulation(4)); });
    const auto write = [](Rank& r) {
      for (const Tensor& parameter : r.model->parameters())
        parameter.mutable_grad() = parameter.grad().clone().mul_(3);
    };
    for (int64_t t = 0; t < 3; ++t) {
      CHECK(run(ranks, [&](Rank& r, int rank) {
              r.micro_step(4 * t + rank);
              write(r);
              r.micro_step(4 * t + 2 + rank);
            }) == "");
      for (int64_t k = 0; k < 4; ++k) {
        alone[0]->micro_step(4 * t + k);
        if (k == 1) write(*alone[0]);
      }
    }
    CHECK(distance(*ranks[0], *ranks[1]) == 0);
    CHECK(distance(*ranks[0], *alone[0]) < 1e-5);
  }
}

TEST_CASE("what one rank writes to gradients in the compressed phase of a 1-bit optimizer counts",
          "[session][ranks][gradients]") {
  const auto use = data_parallel(/*in_place=*/false);
  const auto onebit_adam = [](bool vectors) -> MakeOptimizer {
    return [vectors](const std::vector<Tensor>& parameters, const std::shared_ptr<Communicator>& world) {
      return std::make_unique<OneBitAdam>(
          parameters, OneBitAdamOptions(0.01).freeze_step(2).compress_vectors(vectors), world);
    };
  };
  const MakeOptimizer onebit_lamb = [](const auto& parameters, const auto& world) {
    return std::make_unique<OneBitLamb>(parameters,
                                        OneBitLambOptions(0.01).freeze_step(2).compress_vectors(true), world);
  };
  for (const MakeOptimizer& make : {onebit_adam(true), onebit_lamb}) {
    Ranked ranks = ranks_of(2, make, use), twins = ranks_of(2, make, use), plain = ranks_of(2, make, use);
    const auto train = [](bool writes, double factor) {
      return [=](Rank& r, int rank) {
        for (int64_t t = 0; t < 5; ++t) {
          const bool is_changed = rank == 1 && t >= 3;  // compressed since step 2
          r.backward(2 * t + rank, is_changed ? factor : 1);
          if (is_changed && writes) {
            for (const Tensor& parameter : r.model->parameters()) parameter.grad().mul_(4);
          }
          r.session->step();
        }
      };
    };
    CHECK(run(ranks, train(/*writes=*/true, 1)) == "");
    CHECK(run(twins, train(/*writes=*/false, 4)) == "");
    CHECK(run(plain, train(/*writes=*/false, 1)) == "");
    CHECK(distance(*ranks[0], *ranks[1]) == 0);
    CHECK(distance(*ranks[0], *twins[0]) == 0);
    CHECK(distance(*ranks[0], *plain[0]) > 1e-4);
  }

  // Vectors in full precision are averaged, and travel.
  Ranked ranks = ranks_of(2, onebit_adam(false), use);
  CHECK(run(ranks, [](Rank& r, int rank) {
          for (int64_t t = 0; t < 4; ++t) {
            r.backward(2 * t + rank);
            if (t == 3) {
              r.parameter(0).grad().mul_(4);
              require_says(message_of([&] { r.parameter(1).grad().mul_(4); }),
                           {"gradient of parameter first.bias"});
            }
            r.session->step();
          }
        }) == "");
}

TEST_CASE("a hook reads and changes the sum of all ranks", "[session][ranks][gradients]") {
  class Halve : public Hook {
   public:
    std::string hook_name() const override { return "halve"; }
    Slot slot() const override { return Slot::clip; }
    void attach(SessionParts& parts) override { parts_ = &parts; }
    void gradients_ready(const Progress&) override {
      for (const Tensor& parameter : parts_->model().parameters()) parameter.grad().mul_(0.5);
    }

   private:
    SessionParts* parts_ = nullptr;
  };
  const MakeOptimizer slower = [](const std::vector<Tensor>& parameters, const auto&) {
    return std::make_unique<torch::optim::SGD>(parameters, torch::optim::SGDOptions(0.25));
  };
  Ranked ranks = ranks_of(2, kSgd, [](Session& s, Model&) { s.use(Halve()); });
  Ranked reference = ranks_of(2, slower, [](Session&, Model&) {});
  const auto train = [](Rank& r, int rank) {
    for (int64_t t = 0; t < 3; ++t) r.micro_step(2 * t + rank);
  };
  CHECK(run(ranks, train) == "");
  CHECK(run(reference, train) == "");
  CHECK(distance(*ranks[0], *reference[0]) < 1e-6);
}

}  // namespace pacer::testing::rank_gradients
