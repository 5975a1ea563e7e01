// Gates by sample: what kept and dropped rows give, in forward and backward, in every dtype, on several
// ranks, in regions that are recomputed, and what a Session says of them. Which rows are dropped is in
// layer_drop_shapes.cpp.
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include <torch/optim/adamw.h>

#include <pacer/hooks/gradient_accumulation.h>
#include <pacer/hooks/recompute.h>
#include <pacer/modules/recompute.h>
#include <pacer/schedulers/layer_drop.h>
#include <pacer/session/session.h>

#include "support/catch.h"
#include "support/collectives/ranks.h"
#include "support/schedulers/gate_progress.h"
#include "support/session/small_run.h"

namespace pacer::testing {
namespace {

// Rows of the last of `layers` layers are kept with theta_bar, at any step.
LayerDropOptions by_sample(double theta_bar = 0.5) {
  return LayerDropOptions().theta_bar(theta_bar).schedule(constant_schedule()).per_sample(true).seed(5);
}

LayerDrop gates_by_sample(int64_t layers, const LayerDropOptions& options) {
  LayerDrop gates(options);
  for (int64_t i = 0; i < layers; ++i) gates->add();
  return gates;
}

Tensor mask_of_rows(const std::vector<bool>& kept) {
  Tensor mask = torch::zeros({static_cast<int64_t>(kept.size())}, at::kBool);
  for (size_t i = 0; i < kept.size(); ++i) mask[static_cast<int64_t>(i)] = static_cast<bool>(kept[i]);
  return mask;
}

// Takes the numbers of each step's report.
class NumbersProbe : public Hook {
 public:
  explicit NumbersProbe(std::vector<std::pair<std::string, double>>& numbers) : numbers_(&numbers) {}
  std::string hook_name() const override { return "numbers_probe"; }
  Slot slot() const override { return Slot::record; }
  void after_step(StepReport& report) override {
    numbers_->insert(numbers_->end(), report.numbers().begin(), report.numbers().end());
  }

 private:
  std::vector<std::pair<std::string, double>>* numbers_;
};

// A rank's Session over gates by sample, and the rows that they keep in each of its steps.
std::vector<std::vector<bool>> rows_kept(const std::shared_ptr<Communicator>& world) {
  torch::manual_seed(1);
  Blocks blocks;
  blocks->push_back(torch::nn::Linear(kWidth, kWidth));
  blocks->push_back(torch::nn::Linear(kWidth, kWidth));
  torch::optim::AdamW optimizer(blocks->parameters());
  Session session(*blocks, optimizer, world);
  LayerDrop gates(blocks, by_sample());
  session.use(gates);
  std::vector<std::vector<bool>> kept;
  for (int step = 0; step < 4; ++step) {
    auto [x] = session.begin(torch::ones({32, kWidth}));
    Tensor h = x;
    for (size_t i = 0; i < 2; ++i) {
      const Tensor y = blocks->run(i, &torch::nn::LinearImpl::forward, h);
      const Tensor same = (y == h).flatten(1).all(1).to(at::kCPU);
      kept.emplace_back();
      for (int64_t row = 0; row < 32; ++row) kept.back().push_back(!same[row].item<bool>());
      h = y;
    }
    session.backward(h.square().mean());
    session.step();
  }
  session.finish();
  return kept;
}

}  // namespace

TEST_CASE("a row that is kept has what the layer adds divided by its probability, any other is x",
          "[session][layer_drop]") {
  constexpr int64_t kLayers = 4, kRows = 7;
  const LayerDropOptions options = by_sample(0.4);
  auto gates = gates_by_sample(kLayers, options);
  torch::manual_seed(1);
  int64_t kept_rows = 0;
  for (int64_t step = 0; step < 20; ++step) {
    for (int64_t i = 0; i < kLayers; ++i) {
      CAPTURE(step, i);
      gates->set_progress(gate_progress(step, step % 3));
      REQUIRE(gates->keeps(i));
      const Tensor x = torch::randn({kRows, 2, 3}).requires_grad_();
      const Tensor weight = torch::randn({3, 3}).requires_grad_();
      Tensor y;
      const Tensor output = gates->gate(i, x, [&](const Tensor& h) { return y = h + h.matmul(weight); });
      output.sum().backward();
      const double p = 1 - static_cast<double>(i + 1) / kLayers * 0.6;
      const Tensor mask =
          mask_of_rows(keeps_rows(options, i, kLayers, gate_progress(step, step % 3), 0, kRows));
      kept_rows += mask.sum().item<int64_t>();
      const Tensor wide = x.detach().to(at::kDouble);
      const Tensor factor = mask.to(at::kDouble).view({kRows, 1, 1}) / p;
      REQUIRE(distance(output, wide + (y.detach().to(at::kDouble) - wide) * factor) < 1e-5);
      REQUIRE(same_bits(output.detach().index({~mask}), x.detach().index({~mask})));
      const Tensor gradient =
          (wide * factor).reshape({-1, 3}).t().mm(torch::ones({2 * kRows, 3}, at::kDouble));
      REQUIRE(distance(weight.grad(), gradient) < 2e-5);
      REQUIRE(x.grad().index({~mask}).equal(torch::ones_like(x.grad().index({~mask}))));
      const Tensor through = 1 + factor * weight.detach().to(at::kDouble).sum(1);
      REQUIRE(distance(x.grad(), through.expand({kRows, 2, 3})) < 2e-5);
    }
  }
  // The mean of the four probabilities is 0.625; 4 sigma of 560 coins are below 47.
  CHECK(std::abs(static_cast<double>(kept_rows) - 0.625 * 560) < 47);
}

TEST_CASE("the expected output of a stack that is dropped by row is that of the whole stack",
          "[session][layer_drop]") {
  // Blocks are linear, so that expectations go through them, and every row of a batch is the same.
  constexpr int64_t kRows = 4'000, kSteps = 5;
  torch::manual_seed(3);
  const std::vector<Tensor> weights = {torch::randn({3, 3}, at::kDouble), torch::randn({3, 3}, at::kDouble)};
  auto gates = gates_by_sample(2, by_sample(0.6));
  const Tensor x = torch::randn({1, 3}, at::kDouble).expand({kRows, 3});
  std::vector<Tensor> outputs;
  Tensor whole = x.slice(0, 0, 1);
  for (const Tensor& weight : weights) whole = whole + whole.mm(weight);
  for (int64_t step = 0; step < kSteps; ++step) {
    gates->set_progress(gate_progress(step));
    Tensor h = x;
    for (int64_t i = 0; i < 2; ++i) {
      h = gates->gate(i, h, [&](const Tensor& in) { return in + in.mm(weights[static_cast<size_t>(i)]); });
    }
    outputs.push_back(h);
  }
  const Tensor all = torch::cat(outputs);
  const Tensor bound = 4 * all.std(0) / std::sqrt(static_cast<double>(kRows * kSteps));
  CHECK(((all.mean(0) - whole[0]).abs() < bound).all().item<bool>());
  CHECK(bound.max().item<double>() < 0.2);
}

TEST_CASE("rows are dropped in every dtype, and the result has that of the argument",
          "[session][layer_drop]") {
  constexpr int64_t kRows = 64;
  auto gates = gates_by_sample(1, by_sample());
  gates->set_progress(gate_progress(3));
  const Tensor mask =
      mask_of_rows(keeps_rows(by_sample(), 0, 1, gate_progress(3), 0, kRows)).view({kRows, 1});
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf, at::kComplexFloat}) {
    for (const at::ScalarType of_block : {dtype, at::kFloat}) {
      if (dtype == at::kComplexFloat && of_block == at::kFloat) continue;
      CAPTURE(dtype, of_block);
      const Tensor x = torch::ones({kRows, 2}, dtype);
      const Tensor y = gates->gate(0, x, [&](const Tensor& h) { return 3 * h.to(of_block); });
      CHECK(y.scalar_type() == dtype);
      CHECK(y.equal(at::where(mask, 5 * x, x)));  // 1 + (3 - 1) / 0.5
    }
  }
  const Tensor x = torch::ones({kRows, 2}), counts = torch::arange(kRows * 3).view({kRows, 3}),
               flags = torch::zeros({kRows}, at::kBool);
  const auto block = [](const Tensors& in) { return Tensors{in[0] + 1, in[1] + 100, ~in[2], in[3]}; };
  const Tensors y = gates->gate_tensors(0, 4, {x, counts, flags, Tensor()}, block);
  CHECK(y[0].equal(at::where(mask, x + 2, x)));
  CHECK(y[1].equal(at::where(mask, counts + 100, counts)));
  CHECK(y[2].equal(mask.view({kRows})));
  CHECK_FALSE(y[3].defined());
}

TEST_CASE("rows that are never kept give x, and probabilities of 1 the block's own result",
          "[session][layer_drop]") {
  const Tensor x = torch::randn({5, 2}), y = torch::randn({5, 2});
  const auto block = [&](const Tensor&) { return y; };
  CHECK(gates_by_sample(1, by_sample(1e-300))->gate(0, x, block).equal(x));
  CHECK(gates_by_sample(1, by_sample(1))->gate(0, x, block).is_same(y));
  CHECK(gates_by_sample(2, by_sample(0.1).last_layers(1))->gate(0, x, block).is_same(y));
  auto gates = gates_by_sample(1, by_sample(0.1));
  CHECK_FALSE(gates->gate(0, x, block).equal(y));
  gates->eval();
  CHECK(gates->gate(0, x, block).is_same(y));
  CHECK(gates->gate(0, torch::ones({0, 2}), [](const Tensor& h) { return h; }).numel() == 0);
}

TEST_CASE("a gate by sample refuses what has no rows or another kind of numbers", "[session][layer_drop]") {
  auto gates = gates_by_sample(1, by_sample());
  const auto same = [](const Tensor& h) { return h; };
  CHECK(contains(refusal([&] { gates->gate(0, torch::ones({}), same); }), "without dimensions"));
  CHECK(contains(
      refusal([&] { gates->gate(0, torch::ones({2}, at::kLong), [](const Tensor& h) { return h * 0.5; }); }),
      "turned Long into Float"));
  CHECK(contains(
      refusal([&] { gates->gate(0, torch::ones({2}), [](const Tensor& h) { return h.narrow(0, 0, 1); }); }),
      "keep the shape"));
  Blocks blocks;
  blocks->push_back(torch::nn::Linear(2, 2));
  CHECK(contains(refusal([&] { LayerDrop(blocks, LayerDropOptions().last_layers(2)); }), "1 layers"));
}

// Two micro-batches are in flight: the gates have moved on when the first one's region runs again.
TEST_CASE("a region with a gate by sample drops the same rows when it is recomputed, to the bit",
          "[session][layer_drop]") {
  torch::manual_seed(4);
  torch::nn::Linear block(kWidth, kWidth);
  auto gates = gates_by_sample(1, by_sample());
  const auto gated = [&](const Tensor& x) {
    return gates->gate(0, x, [&](const Tensor& h) { return h + torch::tanh(block(h)); });
  };
  const Tensor x = torch::randn({16, kWidth}).requires_grad_();
  const auto gradients = [&](bool again) {
    block->zero_grad();
    x.mutable_grad().reset();
    gates->set_progress(gate_progress(4));
    const Tensor y = again ? recompute(*block, gated, x) : gated(x);
    gates->set_progress(gate_progress(5));
    y.square().sum().backward();
    return std::vector<Tensor>{y.detach(), x.grad().clone(), block->weight.grad().clone()};
  };
  const auto wanted = gradients(false);
  CHECK(same_bits(gradients(true), wanted));
  gates->set_progress(gate_progress(5));
  CHECK_FALSE(same_bits(gated(x).detach(), wanted[0]));  // or nothing could be seen
}

TEST_CASE("ranks drop rows of their own, and the same again in another run", "[session][layer_drop]") {
  const auto run = [](int ranks) {
    std::vector<std::vector<std::vector<bool>>> kept(static_cast<size_t>(ranks));
    const auto worlds = Communicator::in_process(ranks);
    CHECK(first_of(run_ranks(ranks, [&](int rank) {
            kept[static_cast<size_t>(rank)] = rows_kept(worlds[static_cast<size_t>(rank)]);
          })) == "");
    return kept;
  };
  const auto kept = run(2);
  CHECK(run(2) == kept);
  CHECK(run(1)[0] == kept[0]);
  for (int64_t rank = 0; rank < 2; ++rank) {
    for (int64_t step = 0; step < 4; ++step) {
      for (int64_t i = 0; i < 2; ++i) {
        const auto expected = keeps_rows(by_sample(), i, 2, gate_progress(step), rank, 32);
        CHECK(kept[static_cast<size_t>(rank)][static_cast<size_t>(2 * step + i)] == expected);
      }
    }
  }
  CHECK(kept[0] != kept[1]);
}

TEST_CASE("a Session reports theta and the layers that a row is expected to keep, and zeroes no gradient",
          "[session][layer_drop]") {
  for (const bool per_sample : {false, true}) {
    CAPTURE(per_sample);
    SmallModel model = small_model();
    FusedAdamW optimizer(model->parameters());
    Session session(*model, optimizer);
    const auto options = LayerDropOptions()
                             .theta_bar(0.25)
                             .schedule(warmup_linear({0, 3}))
                             .per_sample(per_sample)
                             .depth(DropDepth::from_zero);
    const LayerDrop gates(model->stack, options);
    std::vector<std::pair<std::string, double>> numbers;
    session.use(gates).use(GradientAccumulation(2)).use(std::make_shared<NumbersProbe>(numbers));
    for (int64_t i = 0; i < 8; ++i) {
      const auto batch = small_batch(i);
      auto [x, y] = session.begin(batch.first, batch.second);
      if (per_sample) CHECK(gates->dropped_parameters(session.progress()).empty());
      session.backward(model->loss(x, y));
      session.step();
    }
    REQUIRE(numbers.size() == 8);
    const double thetas[] = {0.25, 0.5, 0.75, 1};
    for (size_t step = 0; step < 4; ++step) {
      CHECK(numbers[2 * step + 1].first == "theta");
      CHECK(numbers[2 * step + 1].second == Catch::Approx(thetas[step]).epsilon(1e-14));
      if (!per_sample) continue;
      CHECK(numbers[2 * step].first == "kept_layers");  // 1 + (1 + theta) / 2 + theta
      CHECK(numbers[2 * step].second == Catch::Approx(1.5 * (1 + thetas[step])).epsilon(1e-14));
    }
  }
}

TEST_CASE("blocks that are dropped by row train with Recompute as without", "[session][layer_drop]") {
  const auto trained = [](bool again) {
    SmallModel model = small_model();
    FusedAdamW optimizer(model->parameters(), FusedAdamWOptions(0.01));
    Session session(*model, optimizer);
    session.use(LayerDrop(model->stack, by_sample(0.3)));
    if (again) session.use(Recompute(model->stack));
    std::vector<double> losses;
    for (int64_t i = 0; i < 6; ++i) {
      const auto batch = small_batch(i, 8);
      auto [x, y] = session.begin(batch.first, batch.second);
      const Tensor loss = model->loss(x, y);
      losses.push_back(loss.item<double>());
      session.backward(loss);
      session.step();
    }
    return losses;
  };
  const auto plain = trained(false), again = trained(true);
  CHECK(plain[0] == again[0]);
  // A gate adds up the gradients of its argument in another order.
  for (size_t i = 1; i < plain.size(); ++i) CHECK(again[i] == Catch::Approx(plain[i]).epsilon(1e-4));
}

TEST_CASE("ranks compare every option of a LayerDrop, and a schedule that warms up is not settled",
          "[session][layer_drop]") {
  const auto hook_of = [](const LayerDropOptions& options) { return gates_by_sample(3, options).hook(); };
  const LayerDropOptions plain;
  const std::vector<LayerDropOptions> all = {plain,
                                             LayerDropOptions().theta_bar(0.6),
                                             LayerDropOptions().gamma(0.1),
                                             LayerDropOptions().seed(1),
                                             LayerDropOptions().per_sample(true),
                                             LayerDropOptions().depth(DropDepth::from_zero),
                                             LayerDropOptions().depth(DropDepth::uniform),
                                             LayerDropOptions().depth(DropDepth::exponential),
                                             LayerDropOptions().last_layers(1),
                                             LayerDropOptions().last_layers(2),
                                             LayerDropOptions().shares(std::vector<double>{0, 0.5, 1}),
                                             LayerDropOptions().shares(std::vector<double>{0, 0.25, 1}),
                                             LayerDropOptions().schedule(constant_schedule()),
                                             LayerDropOptions().schedule(constant_schedule({5})),
                                             LayerDropOptions().schedule(warmup_linear({0, 5}))};
  for (size_t i = 0; i < all.size(); ++i) {
    CHECK(hook_of(all[i])->agreement() == hook_of(all[i])->agreement());
    for (size_t k = 0; k < i; ++k) CHECK(hook_of(all[i])->agreement() != hook_of(all[k])->agreement());
  }
  CHECK(hook_of(LayerDropOptions().gamma(1e-3).depth(DropDepth::linear))->agreement() ==
        hook_of(plain)->agreement());

  CHECK(hook_of(plain)->settled(gate_progress(0)));
  const auto rising = hook_of(LayerDropOptions().schedule(constant_schedule({5})));
  CHECK_FALSE(rising->settled(gate_progress(4)));
  CHECK(rising->settled(gate_progress(5)));
  CHECK(hook_of(LayerDropOptions().schedule(warmup_linear({0, 5})))->settled(gate_progress(0)));
}

}  // namespace pacer::testing
