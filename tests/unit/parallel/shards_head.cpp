// Shards that deal out a CausalLm's head by its rows: it trains as with a whole one, but for rounding.
#include "support/session/causal_lm_runs.h"

#include <torch/nn/functional/loss.h>

#include "support/captured_stderr.h"
#include "support/message_of.h"
#include "support/session/mistakes.h"
#include "support/session/small_model.h"
#include "support/temporary_folder.h"

namespace pacer::testing::causal_lm {
namespace {

ShardsOptions by_rows() { return ShardsOptions().split_head(true); }

Use split(const ShardsOptions& options = by_rows(), const Use& more = plain) {
  return [=](Session& session, CausalLm& model) {
    session.use(Shards(model->layers, options));
    more(session, model);
  };
}
Use whole(const Use& more = plain) { return split({}, more); }

// Adam's first steps are the signs of gradients, of which hardly any is as small as its rounding.
constexpr double kClose = 1e-4;

void require_close(const Trained& found, const Trained& wanted, double bound = kClose) {
  CHECK(largest_distance(found, wanted) < bound);
  REQUIRE(found.losses.size() == wanted.losses.size());
  for (size_t i = 0; i < wanted.losses.size(); ++i) {
    CHECK(found.losses[i] == Catch::Approx(wanted.losses[i]).epsilon(bound));
  }
}

}  // namespace

TEST_CASE("ranks with rows of the head train what ranks with a whole one do", "[shards][split_head]") {
  for (const int ranks : {1, 2, 3, 4}) {
    CAPTURE(ranks);
    require_close(train(split(), ranks), train(whole(), ranks));
  }
  const auto accumulates = [](Session& s, CausalLm&) { s.use(GradientAccumulation(3)); };
  const auto recomputes = [](Session& s, CausalLm& m) { s.use(Recompute(m->layers)); };
  const auto drops = [](Session& s, CausalLm& m) {
    s.use(LayerDrop(m->layers, LayerDropOptions().theta_bar(0.1).gamma(10)));
  };
  const auto averages = [](Session& s, CausalLm&) {
    s.use(WeightAverage(WeightAverageOptions().decay(0.9)));
  };
  for (const Use& more : {Use(accumulates), Use(recomputes), Use(drops), Use(averages)}) {
    require_close(train(split(by_rows(), more), 2), train(whole(more), 2));
  }
  require_close(train(split(by_rows().keep_after_forward(true)), 2), train(whole(), 2));
  require_close(train(split(by_rows().reduce_every_micro_step(false), accumulates), 2),
                train(whole(accumulates), 2));
  // A head that is not trained.
  require_close(train(split(), 2, false, Trains::lora), train(whole(), 2, false, Trains::lora));
  // Rows on the ranks of a node, and sums over nodes.
  const auto nodes = CommunicatorOptions().ranks_per_node(2);
  const ShardsOptions over_nodes = ShardsOptions().over(ShardGroup::node);
  require_close(train(split(ShardsOptions(over_nodes).split_head(true)), 4, false, Trains::all, nodes),
                train(split(over_nodes), 4, false, Trains::all, nodes));
  const auto bf16 = [](Session& s, CausalLm&) { s.use(Precision::bf16()); };
  require_close(train(split(by_rows(), bf16), 2), train(whole(bf16), 2), 0.05);
}

TEST_CASE("the head's weight never travels where ranks have its rows", "[shards][split_head]") {
  const auto groups_sent = [](const ShardsOptions& options) {
    const Ranks worlds = Communicator::in_process(2, {});
    std::vector<CausalLm> models = {make_model(), make_model()};
    std::vector<int64_t> bytes(2);
    const auto messages = run_ranks(2, [&](int rank) {
      const auto r = static_cast<size_t>(rank);
      FusedAdamW optimizer(models[r]->parameters(), FusedAdamWOptions(0.01));
      Session session(*models[r], optimizer, worlds[r]);
      session.use(Shards(models[r]->layers, options));
      const auto [ids, targets] = batch_of(2, rank);
      for (int step = 0; step < 2; ++step) {
        auto [x, y] = session.begin(ids.narrow(1, 0, 2), targets.narrow(1, 0, 2));
        if (step == 1) bytes[r] = worlds[r]->bytes_sent();
        session.backward(models[r]->loss(x, y));
        if (step == 1) bytes[r] = worlds[r]->bytes_sent() - bytes[r];
        session.step();
      }
      session.finish();
    });
    REQUIRE(first_of(messages) == "");
    return bytes[0];
  };
  // The gradient of the whole weight [32, 32] in fp32, of which half is sent, is larger than 4 rows of hidden states and as
  // many of gradients, and four numbers and a target for each.
  const int64_t of_weight = 32 * 32 * 4 / 2, of_hidden = 2 * 4 * 32 * 4;
  const int64_t saved = groups_sent({}) - groups_sent(by_rows());
  CHECK(saved > of_weight - of_hidden - 400);
  CHECK(saved < of_weight - of_hidden + 400);
}

TEST_CASE("checkpoints hold a whole head, and any number of ranks resumes them",
          "[shards][split_head][resume]") {
  const auto run = [](const std::string& folder, int ranks, bool is_split, int64_t steps, bool resumes) {
    const Ranks worlds = Communicator::in_process(ranks, {});
    std::vector<CausalLm> models;
    for (int rank = 0; rank < ranks; ++rank) models.push_back(make_model());
    Trained result;
    const auto messages = run_ranks(ranks, [&](int rank) {
      CausalLm& model = models[static_cast<size_t>(rank)];
      FusedAdamW optimizer(modules::trainable(*model), FusedAdamWOptions(0.01));
      Session session(*model, optimizer, worlds[static_cast<size_t>(rank)]);
      session.use(Checkpoints(CheckpointsOptions(folder).every(2).synchronous(true)));
      session.use(Shards(model->layers, ShardsOptions().split_head(is_split)));
      if (resumes) require(session.resume() == 2, "nothing was resumed");
      while (session.progress().step < steps) {
        const auto [ids, targets] = batch_of(ranks, session.progress().step);
        auto [x, y] = session.begin(ids.narrow(0, rank, 1), targets.narrow(0, rank, 1));
        session.backward(model->loss(x, y));
        session.step();
      }
      session.finish();
      const auto everything = session.whole_parameters();
      if (rank == 0) copy_weights(model, result);
    });
    REQUIRE(first_of(messages) == "");
    return result;
  };
  const TemporaryFolder folder;
  const CapturedStderr quiet;
  const Trained saved = run(folder.path(), 2, true, 2, false);
  for (const int ranks : {1, 2, 3}) {
    for (const bool is_split : {false, true}) {
      CAPTURE(ranks, is_split);
      CHECK(largest_distance(run(folder.path(), ranks, is_split, 2, true), saved) == 0);
    }
  }
  // The same run goes on to the bit.
  const TemporaryFolder whole_run;
  const Trained wanted = run(whole_run.path(), 2, true, 4, false);
  CHECK(largest_distance(run(folder.path(), 2, true, 4, true), wanted) == 0);
}

TEST_CASE("evaluation computes with rows of the head, and whole parameters give logits",
          "[shards][split_head]") {
  const Ranks worlds = Communicator::in_process(2, {});
  std::vector<CausalLm> models = {make_model(), make_model()};
  const auto messages = run_ranks(2, [&](int rank) {
    const auto r = static_cast<size_t>(rank);
    CausalLm& model = models[r];
    FusedAdamW optimizer(model->parameters(), FusedAdamWOptions(0.01));
    Session session(*model, optimizer, worlds[r]);
    session.use(Shards(model->layers, by_rows()));
    const auto [ids, targets] = batch_of(2, rank);
    const auto loss = [&, x = ids, y = targets] { return model->loss(x, y).item<double>(); };
    const double before = session.evaluate(loss);
    auto [x, y] = session.begin(ids, targets);
    session.backward(model->loss(x, y));
    session.step();
    const double found = session.evaluate(loss);
    require(found != before, "the step did nothing");
    const std::string message =
        message_of([&, a = ids] { session.evaluate([&] { (void)model->forward(a); }); });
    require(message.find("head.weight") != std::string::npos, "logits were made of nothing: ", message);
    const auto everything = session.whole_parameters();
    const double wanted = session.evaluate([&, a = ids, b = targets] {
      return torch::nn::functional::cross_entropy(model->forward(a).flatten(0, 1), b.flatten())
          .item<double>();
    });
    require(std::abs(found - wanted) < 1e-6, "the loss is ", found, ", not ", wanted);
    require(std::abs(session.evaluate(loss) - wanted) < 1e-6, "in the scope it is another one");
  });
  CHECK(first_of(messages) == "");
}

TEST_CASE("mistakes with a head in parts are told in a sentence", "[shards][split_head][mistakes]") {
  using Step = std::function<void(Session&, CausalLm&, const Tensor&, const Tensor&)>;
  const auto training = [](bool tied, const Step& step) {
    return [=] {
      const CapturedStderr quiet;
      const Ranks worlds =
          Communicator::in_process(2, CommunicatorOptions().timeout(std::chrono::seconds(20)));
      std::vector<CausalLm> models = {make_model(tied), make_model(tied)};
      const auto messages = run_ranks(2, [&](int rank) {
        const auto r = static_cast<size_t>(rank);
        FusedAdamW optimizer(models[r]->parameters(), FusedAdamWOptions(0.01));
        Session session(*models[r], optimizer, worlds[r]);
        session.use(Shards(models[r]->layers, by_rows()));
        const auto [ids, targets] = batch_of(2, 0);
        auto [x, y] = session.begin(ids, targets);
        try {
          step(session, models[r], x, y);
        } catch (
            const c10::Error& error) {  // of LibTorch's operations, whose messages go on with a back trace
          throw Error(error.what_without_backtrace());
        }
      });
      if (const std::string message = first_of(messages); !message.empty()) throw Error(message);
    };
  };
  const auto nothing = [](Session&, CausalLm&, const Tensor&, const Tensor&) {};
  struct TwoHeads : torch::nn::Module {
    TwoHeads() : a(register_module("a", make_model())), b(register_module("b", make_model())) {}
    CausalLm a, b;
  };
  // By ParameterShards, without a Session.
  const auto shared_out = [](const std::vector<std::vector<int64_t>>& sizes_of_group, bool with_groups) {
    return [=] {
      ParameterShards::Group group;
      for (const auto& sizes : sizes_of_group) group.emplace_back("w", torch::ones(sizes).requires_grad_());
      ParameterShardsOptions options;
      options.split_by_rows({group.empty() ? torch::ones({2, 2}) : group.front().second});
      const auto world = Communicator::in_process(1)[0];
      if (with_groups) {
        ParameterShards(std::vector<ParameterShards::Group>{group}, world, options);
      } else {
        ParameterShards(group, world, options);
      }
    };
  };
  const std::vector<Mistake> mistakes = {
      {"a vector by rows", {"split_by_rows", "for matrices"}, shared_out({{4}}, true)},
      {"two in a group", {"split_by_rows", "alone in its group"}, shared_out({{4, 4}, {4, 4}}, true)},
      {"one that is in no group", {"split_by_rows", "0 are in the groups"}, shared_out({}, true)},
      {"rows without groups", {"split_by_rows", "groups"}, shared_out({{4, 4}}, false)},
      {"without blocks", {"split_head", "Blocks"}, [] { Shards{by_rows()}; }},
      {"tied", {"weight of its own", "tied", "leave split_head out"}, training(true, nothing)},
      {"a model without a head",
       {"modules::WithHead", "head_loss"},
       [] {
         SmallModel model = small_model();
         FusedAdamW optimizer(model->parameters());
         Session(*model, optimizer, Communicator::in_process(1)[0]).use(Shards(model->stack, by_rows()));
       }},
      {"two heads",
       {"one head", "leave split_head out"},
       [] {
         TwoHeads model;
         FusedAdamW optimizer(model.parameters());
         Session(model, optimizer, Communicator::in_process(1)[0]).use(Shards(model.a->layers, by_rows()));
       }},
      {"logits of a weight that is not there",
       {"head.weight", "is shared out"},
       training(false,
                [](Session&, CausalLm& model, const Tensor& x, const Tensor&) { (void)model->forward(x); })},
      {"a loss of its own",
       {"head.weight", "is shared out"},
       training(false,
                [](Session&, CausalLm& model, const Tensor& x, const Tensor& y) {
                  (void)modules::linear_cross_entropy(model->hidden_states(x), model->head_weight(), y);
                })},
      {"a backward pass of one's own",
       {"head.weight", "Session::backward"},
       training(false, [](Session&, CausalLm& model, const Tensor& x,
                          const Tensor& y) { model->loss(x, y).backward(); })},
  };
  CHECK(faults_of(mistakes) == "");
}

}  // namespace pacer::testing::causal_lm
