// Messages under a locale whose numbers have dots between thousands.
#include <locale>

#include <torch/nn/modules/linear.h>

#include <pacer/pacer.h>

#include "support/catch.h"
#include "support/checkpoints/weight_files.h"
#include "support/session/mistakes_trainer.h"
#include "support/temporary_folder.h"

namespace pacer::testing::messages_locale {
namespace {

class GermanNumbers : public std::numpunct<char> {
  char do_decimal_point() const override { return ','; }
  char do_thousands_sep() const override { return '.'; }
  std::string do_grouping() const override { return "\3"; }
};

struct GermanLocale {
  GermanLocale() : before(std::locale::global(std::locale(std::locale::classic(), new GermanNumbers))) {}
  ~GermanLocale() { std::locale::global(before); }
  std::locale before;
};

}  // namespace

TEST_CASE("numbers in messages are those of the C locale", "[core]") {
  const GermanLocale german;
  const TemporaryFolder folder;
  put_tensors_in(folder.path("w"), {{"weight", torch::ones({2000})}, {"bias", torch::ones({2})}});
  torch::nn::Linear model(3, 2);
  CHECK(contains(heard_of([&] { load_weights(*model, folder.path("w")); }), "shape [2000]"));
  std::vector<Tensor> parameters(2000, torch::ones({1}));
  for (Tensor& parameter : parameters) parameter = torch::ones({1}, torch::requires_grad());
  FusedAdamW optimizer(std::vector<Tensor>{parameters.front()});
  struct Many : torch::nn::Module {
  } many;
  for (size_t i = 0; i < parameters.size(); ++i) {
    many.register_parameter("p" + std::to_string(i), parameters[i]);
  }
  const std::string warned = heard_of([&] {
    Session session(many, optimizer);
    auto [x] = session.begin(torch::ones({1}));
  });
  CHECK(contains(warned, "1999 parameters of the model"));
}

}  // namespace pacer::testing::messages_locale
