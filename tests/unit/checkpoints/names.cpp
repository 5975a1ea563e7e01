// R4: state belongs to names, not positions. A checkpoint finds its parameters in any order; one that does
// not fit is refused with the name of what differs, and nothing is loaded.
#include <torch/nn/modules/batchnorm.h>

#include "support/catch.h"
#include "support/session/small_run.h"
#include "support/temporary_folder.h"

namespace pacer::testing {
namespace {

using Named = std::vector<std::pair<std::string, Tensor>>;

// A model that is nothing but named parameters.
struct ListModelImpl : torch::nn::Module {
  explicit ListModelImpl(const Named& parameters) {
    for (const auto& [name, value] : parameters) register_parameter(name, value);
  }
  Tensor loss() {
    Tensor sum = torch::zeros({});
    double weight = 1;
    // In the order of names, so that the loss does not depend on the order of registration.
    std::map<std::string, Tensor> sorted;
    for (const auto& item : named_parameters()) sorted.emplace(item.key(), item.value());
    for (const auto& [name, value] : sorted) sum = sum + weight++ * value.to(at::kFloat).square().mean();
    return sum;
  }
};
TORCH_MODULE(ListModel);

Named reference_parameters() {
  torch::manual_seed(3);
  return {{"a", torch::randn({3, 2})},
          {"b", torch::randn({4})},
          {"c", torch::randn({2, 2})},
          {"d", torch::randn({})}};
}

// A model, an optimizer over it in the order given, and a Session.
struct ListRun {
  ListRun(const RegisteredOptimizer& entry, const Named& parameters) : model(parameters) {
    optimizer = entry.make(model->named_parameters(), nullptr);
    session = std::make_unique<Session>(*model, *optimizer);
    session->use(PartsProbe(parts));
  }
  void step() {
    auto [x] = session->begin(torch::zeros({1}));
    session->backward(model->loss());
    session->step();
  }
  detail::TrainingState state() const { return copied(detail::export_state(*parts)); }

  ListModel model;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  std::unique_ptr<Session> session;
  SessionParts* parts = nullptr;
};

// Each changes the parameters that a checkpoint is loaded into; `names`: what the message must have.
struct Misfit {
  std::string what;
  std::vector<std::string> names;
  std::function<void(Named&)> change;
};

std::vector<Misfit> misfits() {
  std::vector<Misfit> cases;
  for (size_t i = 0; i < 4; ++i) {
    const std::string name(1, static_cast<char>('a' + i));
    cases.push_back({"renamed " + name, {name}, [i](Named& p) { p[i].first = "renamed"; }});
    cases.push_back(
        {"removed " + name, {name}, [i](Named& p) { p.erase(p.begin() + static_cast<long>(i)); }});
    cases.push_back({"another shape of " + name, {name}, [i](Named& p) { p[i].second = torch::zeros({7}); }});
    cases.push_back({"bf16 " + name, {name}, [i](Named& p) { p[i].second = p[i].second.to(at::kBFloat16); }});
    cases.push_back({"fp64 " + name, {name}, [i](Named& p) { p[i].second = p[i].second.to(at::kDouble); }});
    cases.push_back({"added before " + name, {"new"}, [i](Named& p) {
                       p.insert(p.begin() + static_cast<long>(i), {"new", torch::zeros({2, 2})});
                     }});
  }
  cases.push_back({"flattened", {"a"}, [](Named& p) { p[0].second = p[0].second.flatten(); }});
  cases.push_back({"transposed", {"a"}, [](Named& p) { p[0].second = p[0].second.t().contiguous(); }});
  cases.push_back({"two exchanged names", {"a"}, [](Named& p) { std::swap(p[0].first, p[2].first); }});
  cases.push_back({"all renamed", {"a"}, [](Named& p) {
                     for (auto& item : p) item.first = "x" + item.first;
                   }});
  return cases;
}

// Whether the state of that parameter has more than its group and a count: without a momentum FusedSgd keeps nothing
// that has a shape or a dtype.
bool has_tensors(const NamedTensors& state, const std::string& name) {
  return std::any_of(state.begin(), state.end(), [&](const auto& item) {
    if (item.first.compare(0, name.size() + 1, name + "/") != 0 || contains(item.first, "/exists"))
      return false;
    const std::string field = item.first.substr(name.size() + 1);
    return field != "step" && field != "group" && field != "has_state";
  });
}

}  // namespace

TEST_CASE("R4: permuted parameters get the state of their names", "[session][resume]") {
  for (const RegisteredOptimizer& entry : all_optimizers()) {
    if (entry.dtype != at::kFloat) continue;
    INFO(entry.name);
    ListRun source(entry, reference_parameters());
    for (int step = 0; step < 3; ++step) source.step();
    const detail::TrainingState saved = source.state();
    ListRun same(entry, reference_parameters());
    detail::import_state(*same.parts, saved);
    same.step();
    const detail::TrainingState next = same.state();
    Named order = reference_parameters();
    const auto by_name = [](const auto& a, const auto& b) { return a.first < b.first; };
    std::sort(order.begin(), order.end(), by_name);
    do {
      ListRun target(entry, order);
      for (auto& item : target.model->named_parameters()) item.value().detach().zero_();
      detail::import_state(*target.parts, saved);
      CHECK(first_difference(target.state(), saved) == "");
      target.step();
      CHECK(first_difference(target.state(), next) == "");
    } while (std::next_permutation(order.begin(), order.end(), by_name));
  }
}

TEST_CASE("R4: parameters that do not fit are named and nothing is loaded", "[session][resume]") {
  for (const RegisteredOptimizer& entry : all_optimizers()) {
    if (entry.dtype != at::kFloat) continue;
    ListRun source(entry, reference_parameters());
    for (int step = 0; step < 3; ++step) source.step();
    for (const Misfit& misfit : misfits()) {
      INFO(entry.name << ", " << misfit.what);
      Named parameters = reference_parameters();
      misfit.change(parameters);
      // Refused when it is built, or in its first step.
      const bool refuses_fp64 = entry.has_ranks || contains(entry.name, "8 bits");
      if (refuses_fp64 && contains(misfit.what, "fp64")) continue;
      ListRun target(entry, parameters);
      target.step();
      const detail::TrainingState before = target.state();
      const std::string message = refusal([&] { detail::import_state(*target.parts, source.state()); });
      for (const std::string& name : misfit.names) CHECK(contains(message, "\"" + name + "\""));
      CHECK(first_difference(target.state(), before) == "");
      // The optimizer alone, whose parameters the model check has not looked at.
      if (!entry.is_own || misfit.what == "two exchanged names") continue;
      if (contains(misfit.what, "bf16")) continue;  // may have the same state as fp32: see the next case
      auto& own = dynamic_cast<SessionOptimizer&>(*target.optimizer);
      const detail::TrainingState state = source.state();
      const bool is_of_values = contains(misfit.what, "shape") || contains(misfit.what, "fp64");
      if (is_of_values && !has_tensors(state.optimizer, misfit.names.front())) continue;
      const std::string alone = refusal([&] { own.import_states(state.optimizer, state.rank_optimizer); });
      for (const std::string& name : misfit.names)
        CHECK((contains(alone, name) || contains(alone, "renamed")));
      CHECK(first_difference(target.state(), before) == "");
    }
  }
}

TEST_CASE("R4: an optimizer refuses the state of another dtype of its parameters", "[session][resume]") {
  const auto optimizers = all_optimizers();
  const auto state_of = [&](at::ScalarType dtype) {
    Named parameters = reference_parameters();
    for (auto& item : parameters) item.second = item.second.to(dtype);
    auto run = std::make_unique<ListRun>(optimizers[0], parameters);
    run->step();
    return run;
  };
  const at::ScalarType dtypes[] = {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble};
  for (const at::ScalarType from : dtypes) {
    const auto source = state_of(from);
    for (const at::ScalarType to : dtypes) {
      const auto target = state_of(to);
      auto& own = dynamic_cast<SessionOptimizer&>(*target->optimizer);
      INFO(from << " to " << to);
      const std::string message = refusal([&] { own.import_state(source->state().optimizer); });
      CHECK((message == "<no exception>") == (from == to));
    }
  }
}

TEST_CASE("R4: tied parameters are one, and say so where the checkpoint has two", "[session][resume]") {
  for (const RegisteredOptimizer& entry : all_optimizers()) {
    if (entry.dtype != at::kFloat) continue;
    INFO(entry.name);
    const auto untied = [] {
      torch::manual_seed(3);
      return Named{{"a", torch::randn({3, 2})}, {"b", torch::randn({3, 2})}};
    };
    struct Tied : torch::nn::Module {
      Tied() {
        const Tensor shared = register_parameter("a", torch::zeros({3, 2}));
        named = shared;
        register_parameter("b", shared);
      }
      Tensor named;
    } tied;
    ListRun source(entry, untied());
    source.step();
    torch::OrderedDict<std::string, Tensor> once;
    once.insert("a", tied.named);
    auto optimizer = entry.make(once, nullptr);
    Session session(tied, *optimizer);
    SessionParts* parts = nullptr;
    session.use(PartsProbe(parts));
    const auto before = copied(detail::export_state(*parts));
    const std::string message = refusal([&] { detail::import_state(*parts, source.state()); });
    CHECK(contains(message, "\"a\" and \"b\" are one tensor"));
    CHECK(first_difference(detail::export_state(*parts), before) == "");
  }
}

TEST_CASE("buffers are saved with the model", "[session][resume]") {
  const auto make = [] {
    torch::manual_seed(1);
    return torch::nn::BatchNorm1d(3);
  };
  auto source = make(), target = make();
  FusedAdamW first(source->parameters()), second(target->parameters());
  const TemporaryFolder folder;
  const auto train = [](Session& session, torch::nn::BatchNorm1d& model) {
    auto [x] = session.begin(torch::randn({4, 3}));
    session.backward(model->forward(x).square().sum());
    session.step();
  };
  Session one(*source, first);
  one.use(Checkpoints(CheckpointsOptions(folder.path("deep/er"))));
  train(one, source);
  one.finish();
  Session two(*target, second);
  two.use(Checkpoints(CheckpointsOptions(folder.path("deep/er"))));
  REQUIRE(two.resume() == 1);
  CHECK(same_bits(source->running_mean, target->running_mean));
  CHECK(same_bits(source->running_var, target->running_var));
  CHECK(target->num_batches_tracked.item<int64_t>() == 1);
}

}  // namespace pacer::testing
