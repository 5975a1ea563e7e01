// A user of libpacer.so across its border: it catches errors thrown inside by their types, its own Hook is
// called from inside, and options made inside are cast outside. Each needs types that are the same on both
// sides.
#include <cstdio>
#include <string>

#include <torch/nn/modules/linear.h>

#include <pacer/pacer.h>

namespace {

int failures = 0;

void check(bool holds, const char* what) {
  std::printf("%s: %s\n", holds ? "holds" : "FAILS", what);
  if (!holds) ++failures;
}

class StepCounter : public pacer::Hook {
 public:
  std::string hook_name() const override { return "step_counter"; }
  pacer::Slot slot() const override { return pacer::Slot::record; }
  void after_step(pacer::StepReport& /*report*/) override { ++steps; }

  int steps = 0;
};

void errors_are_caught_by_type(torch::nn::Linear& model) {
  bool caught = false;
  try {
    pacer::FusedAdamW refused(model->parameters(), pacer::FusedAdamWOptions(-1));
  } catch (const pacer::InvalidArgument& error) {
    caught = std::string(error.what()).find("lr") != std::string::npos;
  }
  check(caught, "an InvalidArgument thrown inside is caught as one");
  caught = false;
  try {
    pacer::load_weights(*model, "no such folder");
  } catch (const pacer::Error&) {
    caught = true;
  }
  check(caught, "an error thrown inside is caught by its base");
}

void hooks_and_options_cross(torch::nn::Linear& model) {
  pacer::FusedAdamW optimizer(model->parameters(), pacer::FusedAdamWOptions(0.1));
  auto* options = dynamic_cast<pacer::FusedAdamWOptions*>(&optimizer.param_groups()[0].options());
  check(options != nullptr && options->lr() == 0.1, "options made inside are cast outside");
  check(dynamic_cast<pacer::FusedAdamOptions*>(&optimizer.param_groups()[0].options()) == nullptr,
        "a cast to another optimizer's options is refused");

  const auto counter = std::make_shared<StepCounter>();
  pacer::Session session(model, optimizer);
  session.use(counter);
  const auto [x] = session.begin(torch::ones({2, 3}));
  session.backward(model->forward(x).sum());
  check(session.step(), "a step is taken");
  session.finish();
  check(counter->steps == 1, "a Hook derived outside is called from inside");
}

}  // namespace

int main() {
  torch::nn::Linear model(3, 1);
  errors_are_caught_by_type(model);
  hooks_and_options_cross(model);
  return failures;
}
