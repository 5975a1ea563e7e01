// An option that calls for one more tensor of state, set between two steps, and a save before the next step: the
// tensor has not begun, and a load takes the state as it is.
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <pacer/optimizers/fused_rmsprop.h>
#include <pacer/optimizers/fused_sgd.h>

#include "support/catch.h"
#include "support/checkpoints/archives.h"
#include "support/message_of.h"
#include "support/optimizers/optimizers.h"

namespace pacer::testing::between_steps_saved {
namespace {

using Made = std::unique_ptr<torch::optim::Optimizer>;

struct Late {
  std::string name;
  std::function<Made(const std::vector<Tensor>&)> make;
  std::function<void(torch::optim::OptimizerOptions&)> set;
};

template <class Optimizer, class Options>
Late late(const std::string& name, const Options& options, void (*set)(Options&)) {
  return {name,
          [options](const std::vector<Tensor>& parameters) -> Made {
            return std::make_unique<Optimizer>(parameters, options);
          },
          [set](torch::optim::OptimizerOptions& base) { set(static_cast<Options&>(base)); }};
}

std::vector<Late> all_late() {
  return {
      late<FusedSgd, FusedSgdOptions>("momentum of SGD", FusedSgdOptions(0.1),
                                      [](FusedSgdOptions& o) { o.momentum(0.9); }),
      late<FusedRmsprop, FusedRmspropOptions>("momentum of RMSprop", FusedRmspropOptions(0.1),
                                              [](FusedRmspropOptions& o) { o.momentum(0.9); }),
      late<FusedRmsprop, FusedRmspropOptions>("centered", FusedRmspropOptions(0.1),
                                              [](FusedRmspropOptions& o) { o.centered(true); }),
      late<FusedAdamW, FusedAdamWOptions>("amsgrad", FusedAdamWOptions(0.1),
                                          [](FusedAdamWOptions& o) { o.amsgrad(true); }),
      late<FusedAdam, FusedAdamOptions>("amsgrad of Adam", FusedAdamOptions(0.1),
                                        [](FusedAdamOptions& o) { o.amsgrad(true); }),
  };
}

std::vector<Tensor> initial(at::ScalarType dtype) {
  torch::manual_seed(3);
  return {torch::randn({5, 3}).to(dtype).requires_grad_(), torch::randn({4}).to(dtype).requires_grad_()};
}

void step(torch::optim::Optimizer& optimizer, int64_t number) {
  torch::manual_seed(100 + static_cast<uint64_t>(number));
  for (const Tensor& parameter : optimizer.param_groups()[0].params()) {
    const Tensor gradient = torch::randn(parameter.sizes()).to(parameter.scalar_type());
    if (number == 1 && parameter.dim() == 1) continue;  // which sits a step out
    parameter.mutable_grad() = gradient;
  }
  optimizer.step();
  optimizer.zero_grad();
}

}  // namespace

TEST_CASE("a save between an option that calls for more state and the next step is loaded",
          "[fused][resume]") {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    for (const Late& row : all_late()) {
      for (const bool by_name : {true, false}) {
        CAPTURE(row.name, by_name, dtype);
        const auto values = initial(dtype), others = initial(dtype);
        const Made whole = row.make(values);
        for (int64_t t = 0; t < 2; ++t) step(*whole, t);
        row.set(whole->param_groups()[0].options());
        const Made resumed = row.make(others);
        for (size_t i = 0; i < values.size(); ++i) others[i].detach().copy_(values[i].detach());
        const std::string refused = message_of([&] {
          if (by_name) {
            dynamic_cast<SessionOptimizer&>(*resumed).import_state(
                dynamic_cast<SessionOptimizer&>(*whole).export_state());
          } else {
            load_from(*resumed, saved(*whole));
          }
        });
        CHECK(refused == "");
        if (!refused.empty()) continue;
        for (int64_t t = 2; t < 5; ++t) {
          step(*whole, t);
          step(*resumed, t);
          CHECK(same_bits(values, others));
        }
      }
    }
  }
}

}  // namespace pacer::testing::between_steps_saved
