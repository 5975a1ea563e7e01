// Norms of groups and of other orders over ranks: as one process has them that sees all data, however the ranks
// share gradients out.
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include <pacer/pacer.h>

#include "support/catch.h"
#include "support/collectives/ranks.h"
#include "support/session/small_model.h"

namespace pacer::testing::clipping_groups_ranks {
namespace {

using Use = std::function<void(Session&, SmallModel&)>;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

std::vector<torch::optim::OptimizerParamGroup> groups_of(const SmallModel& model) {
  std::vector<std::vector<Tensor>> groups(3);
  for (const auto& item : model->named_parameters()) {
    const bool is_block = contains(item.key(), "stack"), is_head = contains(item.key(), "head");
    groups[is_block ? 0 : is_head ? 1 : 2].push_back(item.value());
  }
  std::vector<torch::optim::OptimizerParamGroup> all;
  for (const auto& group : groups) all.emplace_back(group, std::make_unique<FusedSgdOptions>(0.5));
  return all;
}

void train(Session& session, SmallModel& model, int64_t first, int64_t stride, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const auto batch = small_batch(first + stride * i);
    auto [x, y] = session.begin(batch.first, batch.second);
    session.backward(model->loss(x, y));
    session.step();
  }
}

// Three steps of that many ranks.
std::vector<Tensor> trained(int world_size, const GradientClipping& clipping, const Use& use) {
  const auto worlds = Communicator::in_process(world_size);
  std::vector<SmallModel> models;
  for (int rank = 0; rank < world_size; ++rank) models.push_back(small_model());
  std::vector<std::vector<Tensor>> values(worlds.size());
  REQUIRE(first_of(run_ranks(world_size, [&](int rank) {
            const auto r = static_cast<size_t>(rank);
            FusedSgd optimizer(groups_of(models[r]), FusedSgdOptions(0.5));
            Session session(*models[r], optimizer, worlds[r]);
            session.use(GradientClipping(clipping));
            use(session, models[r]);
            train(session, models[r], rank, world_size, 3);
            const auto whole = session.whole_parameters();
            for (const Tensor& p : models[r]->parameters()) values[r].push_back(p.detach().clone());
            session.finish();
          })) == "");
  for (size_t r = 1; r < values.size(); ++r) CHECK(same_bits(values[r], values[0]));
  return values[0];
}

// One process, for which what ranks have at once are micro-batches.
std::vector<Tensor> trained_alone(int64_t micro_steps, const GradientClipping* clipping) {
  SmallModel model = small_model();
  FusedSgd optimizer(groups_of(model), FusedSgdOptions(0.5));
  Session session(*model, optimizer);
  session.use(GradientAccumulation(micro_steps));
  if (clipping != nullptr) session.use(GradientClipping(*clipping));
  train(session, model, 0, 1, 3 * micro_steps);
  session.finish();
  std::vector<Tensor> values;
  for (const Tensor& p : model->parameters()) values.push_back(p.detach().clone());
  return values;
}

}  // namespace

TEST_CASE("ranks clip groups by the norms of the mean gradient, whoever has its parts",
          "[session][clipping][clip-groups][ranks]") {
  const std::vector<std::pair<std::string, Use>> ways{
      {"whole", [](Session& session, SmallModel&) { session.use(DataParallel()); }},
      {"state",
       [](Session& session, SmallModel&) { session.use(Shards(ShardsOptions().what(Sharded::state))); }},
      {"gradients",
       [](Session& session, SmallModel&) { session.use(Shards(ShardsOptions().unit_bytes(700))); }},
      {"parameters", [](Session& session, SmallModel& model) { session.use(Shards(model->stack)); }},
      {"parameters, averaged for evaluation",
       [](Session& session, SmallModel& model) {
         session.use(Shards(model->stack)).use(WeightAverage(ema(0.9)));
       }},
  };
  for (const double order : {1.0, 2.0, 3.0, kInfinity}) {
    std::vector<GradientClipping> forms;
    forms.emplace_back(std::vector<GradientClippingOptions>{
        GradientClippingOptions(0.01).norm_type(order).group(0), GradientClippingOptions(0.02).group(2)});
    if (order != 2) forms.emplace_back(GradientClippingOptions(0.01).norm_type(order));
    for (const int world_size : {1, 2, 3}) {
      const std::vector<Tensor> free = trained_alone(world_size, nullptr);
      for (const GradientClipping& clipping : forms) {
        const std::vector<Tensor> wanted = trained_alone(world_size, &clipping);
        CHECK(distance(wanted, free) > 1e-2);
        for (const auto& [name, use] : ways) {
          CAPTURE(order, world_size, name, &clipping == &forms.front());
          CHECK(distance(trained(world_size, clipping, use), wanted) < 1e-6);
        }
      }
    }
  }
}

TEST_CASE("a rank's NaN skips the step of all ranks", "[session][clipping][clip-groups][ranks]") {
  for (const bool sharded : {false, true}) {
    const auto worlds = Communicator::in_process(2);
    std::vector<SmallModel> models{small_model(), small_model()};
    const SmallModel before = small_model();
    CHECK(first_of(run_ranks(2, [&](int rank) {
            SmallModel& model = models[static_cast<size_t>(rank)];
            FusedSgd optimizer(groups_of(model), FusedSgdOptions(0.5));
            Session session(*model, optimizer, worlds[static_cast<size_t>(rank)]);
            session.use(GradientClipping(GradientClippingOptions(0.1).norm_type(1).group(0)));
            if (sharded) session.use(Shards());
            const auto batch = small_batch(rank);
            auto [x, y] = session.begin(batch.first, batch.second);
            const Tensor loss = model->loss(x, y);
            session.backward(rank == 1 ? loss * std::numeric_limits<double>::quiet_NaN() : loss);
            session.step();
            session.finish();
            RANK_REQUIRE(optimizer.skipped_steps() == 1);
          })) == "");
    for (const SmallModel& model : models) CHECK(same_bits(model->parameters(), before->parameters()));
  }
}

TEST_CASE("ranks that clip differently are told so", "[session][clipping][clip-groups][ranks]") {
  const auto worlds = Communicator::in_process(2);
  std::vector<SmallModel> models{small_model(), small_model()};
  const std::vector<std::string> messages = run_ranks(2, [&](int rank) {
    SmallModel& model = models[static_cast<size_t>(rank)];
    FusedSgd optimizer(groups_of(model), FusedSgdOptions(0.5));
    Session session(*model, optimizer, worlds[static_cast<size_t>(rank)]);
    session.use(GradientClipping(GradientClippingOptions(0.1).norm_type(1).group(rank)));
    train(session, model, rank, 2, 1);
  });
  for (const std::string& message : messages) CHECK(contains(message, "of order 1 of group"));
}

}  // namespace pacer::testing::clipping_groups_ranks
