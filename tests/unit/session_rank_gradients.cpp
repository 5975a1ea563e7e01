// Gradients on several ranks between two calls of a Session: while they are added up nobody reads or changes
// them, what is written before is averaged, and parameters may join and leave between any two micro-steps.
#include <chrono>
#include <functional>
#include <memory>

#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <pacer/modules/blocks.h>
#include <pacer/pacer.h>

#include "support/catch.h"
#include "support/message_of.h"
#include "support/optimizers.h"
#include "support/ranks.h"

namespace pacer::testing::session_rank_gradients {
namespace {

using Optimizer = std::unique_ptr<torch::optim::Optimizer>;
using MakeOptimizer = std::function<Optimizer(const std::vector<Tensor>&, std::shared_ptr<Communicator>)>;

struct ModelImpl : torch::nn::Module {
  ModelImpl() {
    torch::manual_seed(11);
    first = register_module("first", torch::nn::Linear(3, 4));
    for (int i = 0; i < 2; ++i) blocks->push_back(torch::nn::Linear(4, 4));
    register_module("blocks", blocks);
    last = register_module("last", torch::nn::Linear(4, 2));
  }
  Tensor loss(const Tensor& x) {
    Tensor h = torch::tanh(first->forward(x));
    for (size_t i = 0; i < blocks->size(); ++i) h = blocks->run(i, &torch::nn::LinearImpl::forward, h);
    return last->forward(h).square().mean();
  }
  torch::nn::Linear first{nullptr}, last{nullptr};
  Blocks blocks;
};
TORCH_MODULE(Model);

struct Rank {
  Rank(std::shared_ptr<Communicator> ranks, const MakeOptimizer& make,
       const std::function<void(Session&, Model&)>& use, bool leaves_out_last = false)
      : world(std::move(ranks)) {
    std::vector<Tensor> parameters = model->parameters();
    if (leaves_out_last) parameters.resize(parameters.size() - 2);
    optimizer = make(parameters, world);
    session = std::make_unique<Session>(*model, *optimizer, world);
    use(*session, model);
  }
  // Of global micro-batch `number`.
  void backward(int64_t number) {
    const Tensor data =
        torch::arange(6, at::kFloat).view({2, 3}).mul(0.1).add(0.07 * static_cast<double>(number));
    auto [x] = session->begin(data);
    session->backward(model->loss(x));
  }
  void micro_step(int64_t number) {
    backward(number);
    session->step();
  }
  Tensor parameter(size_t i) const { return model->parameters()[i]; }

  std::shared_ptr<Communicator> world;
  Model model;
  Optimizer optimizer;
  std::unique_ptr<Session> session;
};

const MakeOptimizer kSgd = [](const std::vector<Tensor>& parameters, const auto&) {
  return std::make_unique<torch::optim::SGD>(parameters, torch::optim::SGDOptions(0.5));
};
const MakeOptimizer kAdamW = [](const std::vector<Tensor>& parameters, const auto&) {
  return std::make_unique<torch::optim::AdamW>(parameters, torch::optim::AdamWOptions(0.01));
};
const MakeOptimizer kFused = [](const std::vector<Tensor>& parameters, const auto&) {
  return std::make_unique<FusedAdamW>(parameters, FusedAdamWOptions(0.01));
};
MakeOptimizer onebit(bool overlap) {
  return [overlap](const std::vector<Tensor>& parameters, const std::shared_ptr<Communicator>& world) {
    return std::make_unique<OneBitAdam>(
        parameters, OneBitAdamOptions(0.01).freeze_step(3).overlap_backward(overlap), world);
  };
}

using Use = std::function<void(Session&, Model&)>;
Use data_parallel(bool in_place) {
  return
      [=](Session& session, Model&) { session.use(DataParallel(DataParallelOptions().in_place(in_place))); };
}

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

using Ranked = std::vector<std::unique_ptr<Rank>>;
Ranked ranks_of(int count, const MakeOptimizer& make, const Use& use, bool leaves_out_last = false) {
  // A minute, so that ranks that wait for each other are told instead of hanging.
  const auto worlds = Communicator::in_process(count, CommunicatorOptions().timeout(std::chrono::minutes(1)));
  Ranked ranks;
  for (const auto& world : worlds) ranks.push_back(std::make_unique<Rank>(world, make, use, leaves_out_last));
  return ranks;
}

std::vector<std::string> messages_of(Ranked& ranks, const std::function<void(Rank&, int)>& f) {
  return run_ranks(static_cast<int>(ranks.size()),
                   [&](int rank) { f(*ranks[static_cast<size_t>(rank)], rank); });
}

std::string run(Ranked& ranks, const std::function<void(Rank&, int)>& f) {
  return first_of(messages_of(ranks, f));
}

double distance(const Rank& a, const Rank& b) {
  return testing::distance(a.model->parameters(), b.model->parameters());
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

TEST_CASE("parameters that join or leave between micro-steps train as on one rank",
          "[session][ranks][gradients]") {
  const std::vector<std::pair<std::string, MakeOptimizer>> optimizers = {
      {"torch", kAdamW},
      {"fused", kFused},
      {"1-bit, warm-up", [](const auto& parameters, const auto& world) {
         return std::make_unique<OneBitAdam>(parameters, OneBitAdamOptions(0.01).freeze_step(100), world);
       }}};
  for (const auto& [name, make] : optimizers) {
    for (const std::string change : {"unfreeze", "freeze", "add"}) {
      CAPTURE(name, change);
      const auto use = [](int64_t count) {
        return [=](Session& s, Model&) { s.use(GradientAccumulation(count)); };
      };
      Ranked ranks = ranks_of(2, make, use(2), change == "add"),
             alone = ranks_of(1, make, use(4), change == "add");
      for (Ranked* all : {&ranks, &alone}) {
        for (auto& r : *all) {
          if (change == "unfreeze") r->parameter(6).requires_grad_(false);
        }
      }
      const auto make_change = [&](Rank& r) {
        if (change == "add") {
          r.optimizer->add_param_group(torch::optim::OptimizerParamGroup(
              {r.parameter(6), r.parameter(7)}, r.optimizer->param_groups()[0].options().clone()));
        } else {
          r.parameter(6).requires_grad_(change == "unfreeze");
        }
      };
      for (int64_t t = 0; t < 3; ++t) {
        REQUIRE(run(ranks, [&](Rank& r, int rank) {
                  r.micro_step(4 * t + rank);
                  if (t == 1) make_change(r);
                  r.micro_step(4 * t + 2 + rank);
                }) == "");
        for (int64_t k = 0; k < 4; ++k) {
          alone[0]->micro_step(4 * t + k);
          if (t == 1 && k == 1) make_change(*alone[0]);
        }
      }
      CHECK(distance(*ranks[0], *ranks[1]) == 0);
      CHECK(distance(*ranks[0], *alone[0]) < 1e-5);
    }
  }
}

TEST_CASE(
    "in a compressed run a parameter may be unfrozen inside a window, and a group that is added is refused",
    "[session][ranks][gradients]") {
  for (const bool overlap : {false, true}) {
    for (const bool adds : {false, true}) {
      CAPTURE(overlap, adds);
      Ranked ranks = ranks_of(
          2, onebit(overlap), [](Session& s, Model&) { s.use(GradientAccumulation(2)); }, adds);
      const auto messages = messages_of(ranks, [&](Rank& r, int rank) {
        if (!adds) r.parameter(6).requires_grad_(false);
        for (int64_t t = 0; t < 8; ++t) {
          r.micro_step(4 * t + rank);
          if (t == 5 && adds) {
            r.optimizer->add_param_group(torch::optim::OptimizerParamGroup(
                {r.parameter(6), r.parameter(7)}, r.optimizer->param_groups()[0].options().clone()));
          } else if (t == 5) {
            r.parameter(6).requires_grad_(true);
          }
          r.micro_step(4 * t + 2 + rank);
        }
      });
      for (const std::string& message : messages) {
        if (adds) {
          CHECK(contains(message, "a parameter group was added after the variance froze"));
        } else {
          CHECK(message == "");
        }
      }
      if (!adds) CHECK(distance(*ranks[0], *ranks[1]) == 0);
    }
  }
}

}  // namespace pacer::testing::session_rank_gradients
