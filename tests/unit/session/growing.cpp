// A program whose parameters grow and shrink by FusedOptimizer::replace, stops, and goes on.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torch/optim/adam.h>

#include <pacer/pacer.h>

#include "support/captured_stderr.h"
#include "support/catch.h"
#include "support/collectives/ranks.h"
#include "support/optimizers/optimizers.h"
#include "support/temporary_folder.h"

namespace pacer::testing::growing {
namespace {

// Points with a place and a weight each.
struct CloudImpl : torch::nn::Module {
  explicit CloudImpl(int64_t points, at::ScalarType dtype = at::kFloat) {
    register_parameter("place", torch::linspace(-1, 1, points * 3).view({points, 3}).to(dtype));
    register_parameter("weight", torch::linspace(0, 1, points).to(dtype));
  }
  const Tensor& get(const char* name) { return parameters_[name]; }
  void set(const char* name, const Tensor& value) { parameters_[name] = value; }
  Tensor loss(const Tensor& x) {
    return (get("place").sum(1) * get("weight") * x).square().mean() + get("place").square().sum();
  }
};
TORCH_MODULE(Cloud);

const char* const kNames[] = {"place", "weight"};

// Which rows a step begins with: fewer in every third one, two more in every second; empty where all stay.
std::vector<int64_t> rows_of_step(int64_t step, int64_t points) {
  std::vector<int64_t> rows;
  if (step == 0 || (step % 2 == 1 && step % 3 != 0)) return rows;
  for (int64_t row = step % 3 == 0 ? 1 : 0; row < points; ++row) rows.push_back(row);
  if (step % 2 == 0) rows.insert(rows.begin() + 1, 2, -1);
  return rows;
}

Tensor with_rows(const Tensor& tensor, const std::vector<int64_t>& rows, double of_new) {
  std::vector<Tensor> all;
  for (const int64_t row : rows) {
    all.push_back(row < 0 ? torch::full_like(tensor.select(0, 0), of_new) : tensor.select(0, row));
  }
  return torch::stack(all).detach();
}

void select(Cloud& cloud, FusedOptimizer& optimizer, const std::vector<int64_t>& rows) {
  std::vector<std::pair<Tensor, Tensor>> pairs;
  for (const char* name : kNames) {
    pairs.emplace_back(cloud->get(name), with_rows(cloud->get(name), rows, 0.25).requires_grad_());
    cloud->set(name, pairs.back().second);
  }
  optimizer.replace(pairs, torch::tensor(rows, torch::kLong));
}

// What a program does with torch's optimizer.
void select_by_hand(Cloud& cloud, torch::optim::Adam& optimizer, const std::vector<int64_t>& rows) {
  for (size_t i = 0; i < 2; ++i) {
    const Tensor old = cloud->get(kNames[i]), now = with_rows(old, rows, 0.25).requires_grad_();
    auto state = std::move(optimizer.state()[old.unsafeGetTensorImpl()]);
    optimizer.state().erase(old.unsafeGetTensorImpl());
    auto& adam = static_cast<torch::optim::AdamParamState&>(*state);
    adam.exp_avg(with_rows(adam.exp_avg(), rows, 0)).exp_avg_sq(with_rows(adam.exp_avg_sq(), rows, 0));
    optimizer.state()[now.unsafeGetTensorImpl()] = std::move(state);
    optimizer.param_groups()[0].params()[i] = now;
    cloud->set(kNames[i], now);
  }
}

Tensor batch(int64_t step) { return torch::full({1}, 0.5 + 0.1 * static_cast<double>(step % 7)); }

struct Program {
  std::string folder;
  FusedAdamOptions options = FusedAdamOptions(0.05);
  at::ScalarType dtype = at::kFloat;

  // Goes on from the newest checkpoint of the folder; points at the end.
  std::vector<Tensor> run(int64_t steps, const std::shared_ptr<Communicator>& world = nullptr) const {
    const auto saved = saved_shapes(folder);
    Cloud cloud(saved.empty() ? 5 : saved.at("weight").front(), dtype);
    FusedAdam optimizer(cloud->named_parameters(), options);
    Session session(cloud, optimizer, world);
    session.use(Checkpoints(CheckpointsOptions(folder).every(4)));
    for (int64_t step = session.resume().value_or(0); step < steps; ++step) {
      const auto rows = rows_of_step(step, cloud->get("weight").size(0));
      if (!rows.empty()) select(cloud, optimizer, rows);
      auto [x] = session.begin(batch(step).to(dtype));
      session.backward(cloud->loss(x));
      session.step();
    }
    session.finish();
    return {cloud->get("place").detach(), cloud->get("weight").detach()};
  }
};

const std::vector<std::pair<at::ScalarType, FusedAdamOptions>>& forms() {
  static const std::vector<std::pair<at::ScalarType, FusedAdamOptions>> all{
      {at::kFloat, FusedAdamOptions(0.05)},
      {at::kFloat, FusedAdamOptions(0.05).amsgrad(true).weight_decay(0.1)},
      {at::kFloat, FusedAdamOptions(0.05).state_bits(8)},
      {at::kBFloat16, FusedAdamOptions(0.05)},
      {at::kBFloat16, FusedAdamOptions(0.05).master_weights(MasterWeights::fp32)}};
  return all;
}

}  // namespace

TEST_CASE("a model that grows and shrinks trains as torch's Adam with its state moved by hand",
          "[session][rows]") {
  const TemporaryFolder folder;
  const CapturedStderr quiet;
  Cloud wanted(5);
  torch::optim::Adam by_hand(wanted->parameters(), torch::optim::AdamOptions(0.05));
  for (int64_t step = 0; step < 300; ++step) {
    const auto rows = rows_of_step(step, wanted->get("weight").size(0));
    if (!rows.empty()) select_by_hand(wanted, by_hand, rows);
    by_hand.zero_grad();
    wanted->loss(batch(step)).backward();
    by_hand.step();
  }
  const std::vector<Tensor> found = Program{folder.path("run")}.run(300);
  for (size_t i = 0; i < 2; ++i) {
    REQUIRE(found[i].sizes() == wanted->get(kNames[i]).sizes());
    CHECK((found[i] - wanted->get(kNames[i])).abs().max().item<double>() <= 1e-6);
  }
}

TEST_CASE("a run whose parameters grow goes on from any checkpoint, to the bit", "[resume][rows]") {
  for (const auto& [dtype, options] : forms()) {
    for (const int64_t stopped : {1, 5, 9, 12, 18}) {
      CAPTURE(dtype, options.amsgrad(), options.state_bits(), stopped);
      const TemporaryFolder folder;
      const CapturedStderr quiet;
      const std::vector<Tensor> wanted = Program{folder.path("whole"), options, dtype}.run(20);
      const Program program{folder.path("stopped"), options, dtype};
      CHECK(saved_shapes(program.folder).empty());
      (void)program.run(stopped);
      CHECK(saved_shapes(program.folder).at("place").size() == 2);
      CHECK(same_bits(program.run(20), wanted));
    }
  }
}

TEST_CASE("ranks whose parameters grow alike stay the same", "[ranks][rows]") {
  const TemporaryFolder folder;
  const CapturedStderr quiet;
  const std::vector<Tensor> wanted = Program{folder.path("one")}.run(20);
  for (const bool is_resumed : {false, true}) {
    const auto worlds = Communicator::in_process(2);
    std::vector<std::vector<Tensor>> found(2);
    const Program program{folder.path("two")};
    CHECK(first_of(run_ranks(2, [&](int rank) {
            found[static_cast<size_t>(rank)] =
                program.run(is_resumed ? 20 : 10, worlds[static_cast<size_t>(rank)]);
          })) == "");
    CHECK(same_bits(found[0], found[1]));
    if (is_resumed) CHECK(same_bits(found[0], wanted));
  }
}

TEST_CASE("a run whose parameters are appended to goes on from its checkpoints, to the bit",
          "[resume][rows]") {
  const CapturedStderr quiet;
  const TemporaryFolder folder;
  const auto run = [&](const std::string& name, int64_t steps) {
    const auto saved = saved_shapes(folder.path(name));
    Cloud cloud(saved.empty() ? 5 : saved.at("weight").front());
    FusedAdam optimizer(cloud->named_parameters(), FusedAdamOptions(0.05));
    Session session(cloud, optimizer);
    session.use(Checkpoints(CheckpointsOptions(folder.path(name)).every(3)));
    for (int64_t step = session.resume().value_or(0); step < steps; ++step) {
      if (step % 2 == 1) {
        const auto now = optimizer.append_rows({{cloud->get("place"), torch::full({2, 3}, 0.25)},
                                                {cloud->get("weight"), torch::full({2}, 0.25)}});
        cloud->set("place", now[0]), cloud->set("weight", now[1]);
      }
      auto [x] = session.begin(batch(step));
      session.backward(cloud->loss(x));
      session.step();
    }
    session.finish();
    return std::vector<Tensor>{cloud->get("place").detach(), cloud->get("weight").detach()};
  };
  const std::vector<Tensor> wanted = run("whole", 20);
  for (const int64_t stopped : {2, 7, 12}) {
    CAPTURE(stopped);
    const std::string name = "stopped-" + std::to_string(stopped);
    (void)run(name, stopped);
    CHECK(same_bits(run(name, 20), wanted));
  }
}

}  // namespace pacer::testing::growing
