// Regions that keep results of operators: which calls are not computed again, what is refused, and how long results live.
#include "support/catch.h"

#include <atomic>
#include <functional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <c10/core/InferenceMode.h>
#include <torch/autograd.h>
#include <torch/library.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <pacer/core/error.h>
#include <pacer/modules/detail/operator_list.h>
#include <pacer/modules/recompute.h>

#include "support/message_of.h"

namespace pacer::testing::kept {
namespace {

using Catch::Matchers::ContainsSubstring;
using torch::Tensor;

std::atomic<int> scalings{0};  // that ran

// x * factor, counted below autograd.
Tensor scaled(const Tensor& x, double factor) {
  ++scalings;
  return x * factor;
}
Tensor call_scaled(const Tensor& x, double factor) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("pacer_test::scaled", "")
                             .typed<Tensor(const Tensor&, double)>();
  return op.call(x, factor);
}
struct ScaledNode : torch::autograd::Function<ScaledNode> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x, double factor) {
    context->saved_data["factor"] = factor;
    const at::AutoDispatchBelowADInplaceOrView below;
    return call_scaled(x, factor);
  }
  static std::vector<Tensor> backward(torch::autograd::AutogradContext* context,
                                      const std::vector<Tensor>& gradients) {
    return {gradients[0] * context->saved_data["factor"].toDouble(), Tensor()};
  }
};
Tensor scaled_with_graph(const Tensor& x, double factor) { return ScaledNode::apply(x, factor); }

const std::string kScaled = "pacer_test::scaled";

using Function = std::function<Tensor(const Tensor& x)>;

}  // namespace

TORCH_LIBRARY(pacer_test, library) {
  library.def("scaled(Tensor x, float factor) -> Tensor");
  library.impl("scaled", c10::DispatchKey::CPU, TORCH_FN(scaled));
  library.impl("scaled", c10::DispatchKey::Autograd, TORCH_FN(scaled_with_graph));
}

TEST_CASE("a kept operator runs once in place of twice", "[recompute][kept]") {
  torch::nn::Linear module(4, 4);
  const KeptOperators kept{kScaled};
  const auto f = [&](const Tensor& x) { return call_scaled(module(call_scaled(x, 3)).tanh(), 2).sin(); };
  const auto inner = [&](const KeptOperators& keep) {
    return [&, keep](const Tensor& x) { return recompute(*module, keep, f, x); };
  };
  // Calls of a forward and one or several backward passes.
  const auto runs_of = [&](const Function& run, int passes = 1) {
    scalings = 0;
    const Tensor y = run(torch::ones({2, 4}).requires_grad_()).sum();
    std::vector<Tensor> first;
    for (int i = 1; i <= passes; ++i) {
      const auto found = torch::autograd::grad({y}, module->parameters(), {}, /*retain_graph=*/i < passes);
      if (i > 1) CHECK(found[0].equal(first[0]));
      first = found;
    }
    return scalings.load();
  };
  CHECK(runs_of(f) == 2);
  CHECK(runs_of([&](const Tensor& x) { return recompute(*module, f, x); }) == 4);
  CHECK(runs_of(inner(kept)) == 2);
  CHECK(runs_of(inner(kept), 3) == 2);
  CHECK(runs_of(inner({"aten::addmm"}), 3) == 8);
  // Regions in regions: the inner one runs for the first time again in the second run of the outer one.
  for (const auto& [outer, nested, runs] : {std::make_tuple(KeptOperators(), KeptOperators(), 6),
                                            {kept, KeptOperators(), 4},
                                            {KeptOperators(), kept, 4},
                                            {kept, kept, 2}}) {
    const Function in_it = inner(nested);
    const KeptOperators keep = outer;
    CHECK(runs_of([&](const Tensor& x) { return recompute(*module, keep, in_it, x); }) == runs);
  }
  // Outside of regions, and without gradients, nothing is kept.
  const int64_t before = kept.list()->kept;
  call_scaled(torch::ones(3), 2);
  const torch::NoGradGuard no_grad;
  inner(kept)(torch::ones({2, 4}));
  CHECK(kept.list()->kept == before);
}

TEST_CASE("kept results live until backward hands them out, or as long as the graph", "[recompute][kept]") {
  using Storage = c10::weak_intrusive_ptr<c10::StorageImpl>;
  torch::nn::Linear module(4, 4);
  std::vector<Storage> made;
  const Function f = [&](const Tensor& x) {
    const Tensor y = call_scaled(module(x), 2);
    made.emplace_back(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(y.storage().unsafeGetStorageImpl()));
    return y.sin().sum();  // saves y
  };
  const auto run = [&](const KeptOperators& kept) {
    made.clear();
    return recompute(*module, kept, f, torch::ones({2, 4}));
  };
  CHECK(run({}).defined());
  CHECK(made[0].expired());
  Tensor y = run({kScaled});
  CHECK_FALSE(made[0].expired());
  y.backward({}, /*retain_graph=*/true);
  CHECK_FALSE(made[0].expired());
  y.backward();
  CHECK(made[0].expired());  // y is still there
  REQUIRE(made.size() == 3);
  y = run({kScaled});
  CHECK_FALSE(made[0].expired());
  y.reset();
  CHECK(made[0].expired());
}

TEST_CASE("a second run that fails leaves no kept results and no dispatch key behind", "[recompute][kept]") {
  torch::nn::Linear module(4, 4);
  int runs = 0;
  const Function f = [&](const Tensor& x) {
    const Tensor y = call_scaled(module(x), 2);
    if (++runs == 2) throw std::runtime_error("the second run fails");
    return call_scaled(y, 3);
  };
  const Tensor y = recompute(*module, KeptOperators{kScaled}, f, torch::ones({2, 4})).sum();
  CHECK_THROWS_WITH(y.backward(), ContainsSubstring("the second run fails"));
  CHECK_FALSE(detail::region_keeps_results());
  CHECK_THROWS_WITH(y.backward(), ContainsSubstring("freed the results that it kept"));
  const Tensor next = recompute(*module, KeptOperators{kScaled}, f, torch::ones({2, 4})).sum();
  next.backward();
  CHECK(module->weight.grad().defined());
}

TEST_CASE("what would not fit kept results is an error", "[recompute][kept]") {
  torch::nn::Linear module(4, 4);
  const KeptOperators kept{kScaled};
  int runs = 0;
  const auto error = [&](const Function& f) {
    runs = 0;
    return message_of([&] { recompute(*module, kept, f, torch::ones({2, 4})).sum().backward(); });
  };
  const auto second = [&] { return ++runs == 2; };
  const auto changed =
      ContainsSubstring("a result of pacer_test::scaled, which is kept for backward, was changed in place");
  CHECK_THAT(error([&](const Tensor& x) { return call_scaled(module(x), 2).relu_(); }), changed);
  CHECK_THAT(error([&](const Tensor& x) {
               const Tensor y = call_scaled(module(x), 2);
               y.detach().view({8}).mul_(2);
               return y;
             }),
             changed);
  CHECK_THAT(error([&](const Tensor& x) {
               return at::_unsafe_view(call_scaled(module(x), 2), {8}).relu_();  // as LibTorch's products do
             }),
             changed);
  CHECK_THAT(
      error([&](const Tensor& x) { return at::unsafe_chunk(call_scaled(module(x), 2), 2)[1].sigmoid_(); }),
      changed);
  const Tensor y = recompute(
      *module, kept, [&](const Tensor& x) { return call_scaled(module(x), 2); }, torch::ones({2, 4}));
  y.detach().add_(1);
  CHECK_THAT(message_of([&] { y.sum().backward(); }), changed);

  const auto more = ContainsSubstring("calls pacer_test::scaled more often when it is recomputed");
  CHECK_THAT(error([&](const Tensor& x) {
               const Tensor once = call_scaled(module(x), 2);
               return second() ? call_scaled(once, 2) : once;
             }),
             more);
  CHECK_THAT(error([&](const Tensor& x) { return call_scaled(module(x), second() ? 3 : 2); }), more);
  CHECK_THAT(error([&](const Tensor& x) {
               const Tensor in = module(x);
               return call_scaled(second() ? in.view({8}) : in, 2).view({2, 4});
             }),
             more);
  CHECK_THAT(error([&](const Tensor& x) { return second() ? module(x) : call_scaled(module(x), 2); }),
             ContainsSubstring("calls pacer_test::scaled less often"));
  CHECK_THAT(error([&](const Tensor& x) {
               const Tensor y_in = call_scaled(module(x), 2);
               const c10::InferenceMode inference;
               at::_unsafe_view(y_in.detach(), {8}).clone().add_(1);
               y_in.detach().add_(1);
               const c10::InferenceMode no_inference(false);
               return y_in;
             }),
             changed);
  // Results of inference mode have no version and no gradient, and are made again.
  CHECK(error([&](const Tensor& x) {
          const c10::InferenceMode inference;
          const Tensor y_of_none = call_scaled(x.detach(), 2);
          const c10::InferenceMode no_inference(false);
          return call_scaled(module(x), 2) * y_of_none.clone();
        }) == "");
}

TEST_CASE("operators that cannot be kept are refused by name", "[recompute][kept]") {
  const std::vector<std::pair<std::string, std::string>> refused = {
      {"mm", "'mm' is no name of an operator to keep; write namespace::name"},
      {"aten::", "is no name of an operator"},
      {"aten::mmm", "there is no operator aten::mmm to keep; write namespace::name"},
      {"aten::add", "there is no operator aten::add to keep; its overloads are aten::add."},
      {"aten::mm.out", "aten::mm.out changes an argument in place"},
      {"aten::relu_", "aten::relu_ changes an argument in place"},
      {"aten::view", "aten::view gives a view of its argument"},
      {"aten::_unsafe_view", "aten::_unsafe_view gives a view of its argument"},
      {"aten::equal", "aten::equal gives no tensor"},
      {"aten::linear", "aten::linear is made of other operators"},
  };
  for (const auto& [name, message] : refused) {
    CAPTURE(name);
    const std::string wrong = name;
    CHECK_THAT(message_of<InvalidArgument>([&] {
                 KeptOperators({"aten::mm", wrong});
               }),
               ContainsSubstring(message));
  }
  CHECK(KeptOperators().empty());
  CHECK(KeptOperators(std::vector<std::string>()).empty());
  CHECK(KeptOperators{"aten::mm", "aten::add.Tensor"}.names().size() == 2);
}

}  // namespace pacer::testing::kept
