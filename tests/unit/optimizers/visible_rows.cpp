// Steps over some of the rows: set_visible_rows leaves the others as they are.
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include <pacer/optimizers/detail/state_fields.h>
#include <pacer/pacer.h>

#include "support/catch.h"
#include "support/message_of.h"
#include "support/optimizers/optimizers.h"
#include "support/session/own_optimizers.h"

namespace pacer::testing::visible_rows {
namespace {

// More rows than a unit of work has elements, and rows that vectors of four and of eight numbers do not end with.
constexpr int64_t kRows = 5003;
const std::vector<std::vector<int64_t>> kShapes{{kRows, 7}, {kRows}, {kRows, 4, 3}};

bool has(const RegisteredOptimizer& form, const char* word) {
  return form.name.find(word) != std::string::npos;
}
bool has_visible_rows(const RegisteredOptimizer& form) {
  return !has(form, "Lamb") && !has(form, "Muon") && !has(form, "8 bits") && !has(form, "paged") &&
         !form.averages;
}

// The rows that are visible in a step.
Tensor mask_of(int step) {
  torch::manual_seed(50 + static_cast<uint64_t>(step));
  switch (step) {
    case 1:
      return torch::ones({kRows}, torch::kBool);
    case 2:
      return torch::zeros({kRows}, torch::kBool);
    case 3:
      return torch::arange(kRows) % 2 == 0;
    default:
      return torch::rand({kRows}) < 0.1;
  }
}

struct Run {
  explicit Run(const RegisteredOptimizer& form) {
    torch::manual_seed(3);
    for (size_t i = 0; i < kShapes.size(); ++i) {
      parameters.push_back(torch::randn(kShapes[i]).to(form.dtype).requires_grad_());
      names.insert("p" + std::to_string(i), parameters.back());
    }
    optimizer = form.make(names, nullptr);
    fused().name_parameters(names);
  }
  FusedOptimizer& fused() const { return dynamic_cast<FusedOptimizer&>(*optimizer); }
  void set_gradients(int step) const {
    torch::manual_seed(100 + static_cast<uint64_t>(step));
    for (const Tensor& parameter : parameters) {
      parameter.mutable_grad() = torch::randn(parameter.sizes()).to(parameter.scalar_type());
    }
  }
  void step(int number) const {
    set_gradients(number);
    optimizer->step();
  }
  // The tensors that have an element for each of the parameter's: its value, and its state.
  std::vector<Tensor> of(const Tensor& parameter) const {
    std::vector<Tensor> all{parameter.detach()};
    const auto state = optimizer->state().find(parameter.unsafeGetTensorImpl());
    if (state == optimizer->state().end()) return all;
    auto& fields = dynamic_cast<FusedAdamStateFields&>(*state->second);
    for (const detail::StateField& field : detail::kStateFields) {
      const Tensor& tensor = (fields.*field.read)();
      if (tensor.defined() && tensor.numel() == parameter.numel()) all.push_back(tensor);
    }
    return all;
  }
  // A step over all rows, of which those that are not visible are put back by hand.
  void step_and_put_back(int number, const Tensor& visible) const {
    std::vector<std::vector<Tensor>> before;
    for (const Tensor& parameter : parameters) {
      before.emplace_back();
      for (const Tensor& tensor : of(parameter)) before.back().push_back(tensor.clone());
    }
    step(number);
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < parameters.size(); ++i) {
      const std::vector<Tensor> now = of(parameters[i]);
      for (size_t t = 0; t < now.size(); ++t) {
        now[t].index_put_({visible.logical_not()}, before[i].at(t).index({visible.logical_not()}));
      }
    }
  }
  NamedTensors state() const { return static_cast<SessionOptimizer&>(fused()).export_state(); }

  std::vector<Tensor> parameters;
  NamedParameters names;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
};

void check_same(const Run& a, const Run& b) {
  for (size_t i = 0; i < a.parameters.size(); ++i) {
    const std::vector<Tensor> of_a = a.of(a.parameters[i]), of_b = b.of(b.parameters[i]);
    REQUIRE(of_a.size() == of_b.size());
    for (size_t t = 0; t < of_a.size(); ++t) {
      CAPTURE(i, t);
      CHECK(same_bits(of_a[t], of_b[t]));
    }
  }
}

}  // namespace

TEST_CASE("rows that are not visible keep value and state, the others take the step of all",
          "[optimizer][rows]") {
  int forms_with_rows = 0;
  for (const RegisteredOptimizer& form : own_optimizers_without_ranks()) {
    if (!has_visible_rows(form)) continue;
    CAPTURE(form.name);
    ++forms_with_rows;
    const Run masked(form), whole(form);
    for (const Run* run : {&masked, &whole}) run->step(0);  // all rows have state
    for (int step = 1; step < 6; ++step) {
      const Tensor visible = mask_of(step);
      masked.fused().set_visible_rows(masked.parameters, visible);
      masked.step(step);
      whole.step_and_put_back(step, visible);
    }
    check_same(masked, whole);
    masked.fused().set_visible_rows(masked.parameters, {});
    for (const Run* run : {&masked, &whole}) run->step(6);
    check_same(masked, whole);
  }
  CHECK(forms_with_rows >= 12);
}

TEST_CASE("rows of SGD are parameters of their own, some of which have no gradient", "[optimizer][rows]") {
  constexpr int64_t kFew = 9;
  torch::manual_seed(5);
  const Tensor table = torch::randn({kFew, 5}).requires_grad_();
  std::vector<Tensor> rows;
  for (int64_t r = 0; r < kFew; ++r) rows.push_back(table.detach().select(0, r).clone().requires_grad_());
  FusedSgd optimizer({table}, FusedSgdOptions(0.1).momentum(0.9).weight_decay(0.01));
  torch::optim::SGD peer(rows, torch::optim::SGDOptions(0.1).momentum(0.9).weight_decay(0.01));
  const Tensor visible = torch::zeros({kFew}, torch::kBool);
  optimizer.set_visible_rows({table}, visible);
  for (int step = 0; step < 20; ++step) {
    visible.copy_(torch::rand({kFew}) < 0.4);  // it is held, not copied
    table.mutable_grad() = torch::randn_like(table.detach());
    for (int64_t r = 0; r < kFew; ++r) {
      const Tensor gradient = table.grad().select(0, r).clone();
      rows[static_cast<size_t>(r)].mutable_grad() = visible[r].item<bool>() ? gradient : Tensor();
    }
    optimizer.step();
    peer.step();
  }
  CHECK((table.detach() - torch::stack(rows).detach()).abs().max().item<float>() < 1e-6F);
}

TEST_CASE("one of several parameters is updated by rows, the others as ever", "[optimizer][rows]") {
  const RegisteredOptimizer form = own_optimizers_without_ranks().front();
  const Run masked(form), whole(form);
  const Tensor visible = mask_of(7);
  masked.fused().set_visible_rows({masked.parameters[0]}, visible);
  for (const Run* run : {&masked, &whole}) run->step(0);
  CHECK(same_bits(masked.parameters[1], whole.parameters[1]));
  CHECK(same_bits(masked.parameters[2], whole.parameters[2]));
  CHECK(same_bits(masked.parameters[0].index({visible}), whole.parameters[0].index({visible})));
  torch::manual_seed(3);
  const Tensor initial = torch::randn(kShapes[0]);
  CHECK(same_bits(masked.parameters[0].detach().index({visible.logical_not()}),
                  initial.index({visible.logical_not()})));
}

TEST_CASE("masks live as long as their parameters, and are no state", "[optimizer][rows]") {
  const RegisteredOptimizer form = own_optimizers_without_ranks().front();
  Run masked(form);
  const Tensor visible = mask_of(7);
  masked.step(0);
  masked.fused().set_visible_rows(masked.parameters, visible);
  masked.step(1);

  SECTION("what is saved has none, and loads") {
    Run other(form);
    const NamedTensors state = masked.state();
    CHECK(state.size() == [&] {
      Run plain(form);
      plain.step(0);
      return plain.state().size();
    }());
    std::stringstream file;
    torch::save(*masked.optimizer, file);
    torch::load(*other.optimizer, file);
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < other.parameters.size(); ++i) other.parameters[i].copy_(masked.parameters[i]);
    other.fused().set_visible_rows(other.parameters, visible);
    masked.step(2), other.step(2);
    check_same(masked, other);
  }
  SECTION("a tensor in the place of another has all of its rows") {
    const Tensor now = masked.parameters[1].detach().clone().requires_grad_();
    const auto holders = visible.use_count();
    masked.fused().replace({{masked.parameters[1], now}}, torch::arange(kRows));
    CHECK(visible.use_count() == holders - 1);
    masked.parameters[1] = now;
    const Tensor before = now.detach().clone();
    masked.step(2);
    CHECK(before.ne(now).sum().item<int64_t>() > kRows / 2);
  }
  SECTION("a parameter that has gone to other memory is found, one of other rows is not") {
    masked.parameters[1].set_data(masked.parameters[1].detach().clone());
    const Tensor before = masked.parameters[1].detach().clone();
    masked.step(2);
    CHECK(same_bits(masked.parameters[1].detach().index({visible.logical_not()}),
                    before.index({visible.logical_not()})));
    visible.resize_({3});
    masked.set_gradients(3);
    const Tensor still = masked.parameters[1].detach().clone();
    CHECK(message_of([&] { masked.optimizer->step(); }).find("call set_visible_rows after") !=
          std::string::npos);
    CHECK(same_bits(masked.parameters[1], still));
    masked.fused().set_visible_rows(masked.parameters, {});
    masked.step(3);
  }
}

TEST_CASE("a Session clips, accumulates and saves beside rows that are not visible", "[session][rows]") {
  torch::manual_seed(2);
  torch::nn::Embedding model(torch::nn::EmbeddingOptions(40, 3));
  FusedAdam optimizer(model->named_parameters(), FusedAdamOptions(0.1));
  Session session(model, optimizer);
  session.use(GradientClipping(1.0)).use(GradientAccumulation(2));
  const Tensor before = model->weight.detach().clone();
  const Tensor visible = torch::arange(40) < 10;
  optimizer.set_visible_rows({model->weight}, visible);
  for (int i = 0; i < 4; ++i) {
    const auto [ids] = session.begin(torch::arange(20));
    session.backward(model->forward(ids).square().sum());
    session.step();
  }
  session.finish();
  CHECK(same_bits(model->weight.detach().narrow(0, 10, 30), before.narrow(0, 10, 30)));
  CHECK(before.narrow(0, 0, 10).ne(model->weight.detach().narrow(0, 0, 10)).all().item<bool>());
  CHECK(session.gradient_norm() > 0);
}

TEST_CASE("what set_visible_rows refuses changes nothing", "[optimizer][rows][mistakes]") {
  const Tensor visible = mask_of(3);
  for (const RegisteredOptimizer& form : own_optimizers_without_ranks()) {
    if (has_visible_rows(form)) continue;
    CAPTURE(form.name);
    const Run run(form);
    CHECK_THROWS_AS(run.fused().set_visible_rows(run.parameters, visible), InvalidArgument);
    run.step(0);
  }
  const Run run(own_optimizers_without_ranks().front());
  const Tensor table = run.parameters[0], apart = torch::zeros({kRows, 2}).requires_grad_();
  struct Mistake {
    const char* says;
    std::vector<Tensor> parameters;
    Tensor visible;
  };
  for (const Mistake& mistake : std::vector<Mistake>{
           {"not one of its parameters", {table, apart}, visible},
           {"vector of Bool", {table}, visible.to(torch::kByte)},
           {"vector of Bool", {table}, visible.view({1, kRows})},
           {"vector of Bool", {table}, torch::ones({2 * kRows}, torch::kBool).slice(0, 0, 2 * kRows, 2)},
           {"p0 has 5003 rows on cpu, but which are visible is said by 5002 numbers on cpu",
            {table},
            visible.narrow(0, 0, kRows - 1)}}) {
    CAPTURE(mistake.says);
    const std::string message =
        message_of([&] { run.fused().set_visible_rows(mistake.parameters, mistake.visible); });
    CAPTURE(message);
    CHECK(message.find(mistake.says) != std::string::npos);
  }
  const Run plain(own_optimizers_without_ranks().front());
  run.step(0), plain.step(0);
  check_same(run, plain);

  const Tensor number = torch::ones({}).requires_grad_();
  const Tensor columns = torch::ones({4, 6}).t().requires_grad_();
  FusedAdam optimizer({number, columns}, FusedAdamOptions(0.1));
  CHECK(message_of([&] {
          optimizer.set_visible_rows({number}, torch::ones({1}, torch::kBool));
        }).find("a single number") != std::string::npos);
  CHECK(message_of([&] {
          optimizer.set_visible_rows({columns}, torch::ones({6}, torch::kBool));
        }).find("make it contiguous()") != std::string::npos);
  const Tensor coded = torch::ones({4, 32}).requires_grad_();
  FusedAdam later({coded}, FusedAdamOptions(0.1));
  later.set_visible_rows({coded}, torch::ones({4}, torch::kBool));
  static_cast<FusedAdamOptions&>(later.param_groups()[0].options()).state_bits(8);
  coded.mutable_grad() = torch::ones({4, 32});
  CHECK(message_of([&] { later.step(); }).find("set state_bits(32)") != std::string::npos);
  CHECK(coded.eq(1).all().item<bool>());
}

// What a captured step would do again.
TEST_CASE("masks that go from tensors of one dtype to those of another need another kernel",
          "[optimizer][rows]") {
  const Tensor a = torch::ones({4, 3}).requires_grad_(),
               b = torch::ones({4, 3}).to(torch::kBFloat16).requires_grad_();
  FusedAdam optimizer({a, b}, FusedAdamOptions(0.1));
  const Tensor visible = torch::tensor({true, false, true, false}, torch::kBool);
  const auto version_of_step = [&] {
    for (const Tensor& parameter : {a, b})
      parameter.mutable_grad() = torch::ones(parameter.sizes(), parameter.options().requires_grad(false));
    optimizer.step();
    return static_cast<SessionOptimizer&>(optimizer).enqueue_version();
  };
  optimizer.set_visible_rows({a}, visible);
  const int64_t of_a = version_of_step();
  CHECK(version_of_step() == of_a);
  optimizer.set_visible_rows({a}, visible.logical_not());  // other rows, the same kernel
  CHECK(version_of_step() == of_a);
  optimizer.set_visible_rows({a}, {});
  optimizer.set_visible_rows({b}, visible);
  const int64_t of_b = version_of_step();
  CHECK(of_b != of_a);
  optimizer.set_visible_rows({b}, {});
  CHECK(version_of_step() != of_b);
}

TEST_CASE("rows are not for the 1-bit optimizers, OneBitMuon among them", "[optimizer][rows][mistakes]") {
  const auto world = Communicator::in_process(1).front();
  const Tensor matrix = torch::ones({8, 4}).requires_grad_();
  OneBitMuonOptions options(0.1);
  OneBitMuon optimizer({matrix}, options.orthogonalize(false), world);
  matrix.mutable_grad() = torch::ones({8, 4});
  optimizer.step();
  const Tensor before = matrix.detach().clone();
  CHECK(message_of([&] {
          optimizer.set_visible_rows({matrix}, torch::ones({8}, torch::kBool));
        }).find("not for 1-bit optimizers") != std::string::npos);
  CHECK(message_of([&] {
          (void)optimizer.append_rows({{matrix, torch::ones({2, 4})}});
        }).find("append_rows is not for 1-bit optimizers") != std::string::npos);
  const Tensor now = torch::ones({8, 4}).requires_grad_();
  CHECK(message_of([&] {
          optimizer.replace({{matrix, now}}, torch::arange(8));
        }).find("replace is not for 1-bit optimizers") != std::string::npos);
  CHECK(same_bits(matrix, before));
}

}  // namespace pacer::testing::visible_rows
