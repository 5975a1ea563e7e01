// Merges that fail: what they name, and that they leave no layer merged.
#include <limits>

#include <torch/nn/modules/linear.h>

#include <pacer/core/error.h>
#include <pacer/modules/linear.h>
#include <pacer/modules/lora.h>

#include "support/catch.h"
#include "support/message_of.h"

namespace pacer::testing::lora_merge {
namespace {

using Catch::Matchers::ContainsSubstring;
using torch::Tensor;

struct PartImpl : torch::nn::Module {
  PartImpl() {
    up = register_module("up", modules::Linear(6, 5));
    down = register_module("down", modules::Linear(5, 6));
    modules::add_lora(*this, modules::LoraOptions(2).targets({"up", "down"}));
    const torch::NoGradGuard no_grad;
    for (const Tensor& parameter : parameters()) parameter.fill_(0.5);
  }
  modules::Linear up = nullptr, down = nullptr;
};
TORCH_MODULE(Part);

std::vector<Tensor> values_of(const torch::nn::Module& model) {
  std::vector<Tensor> values;
  for (const Tensor& parameter : model.parameters()) values.push_back(parameter.detach().clone());
  return values;
}

void check_unmerged(Part& part, const std::vector<Tensor>& before) {
  CHECK_FALSE(part->up->is_merged());
  CHECK_FALSE(part->down->is_merged());
  const auto after = values_of(*part);
  for (size_t i = 0; i < before.size(); ++i) CHECK(at::equal(before[i].nan_to_num(), after[i].nan_to_num()));
}

}  // namespace

TEST_CASE("a merge of numbers that are not finite is told from one that its dtype cannot hold", "[lora]") {
  const torch::NoGradGuard no_grad;
  for (const auto dtype : {at::kFloat, at::kHalf}) {
    for (const bool is_of_adapter : {false, true}) {
      CAPTURE(dtype, is_of_adapter);
      Part part;
      part->to(dtype);
      const Tensor spoilt = is_of_adapter ? part->down->adapter("default")->B : part->down->weight;
      spoilt[1][0] = std::numeric_limits<double>::quiet_NaN();
      const auto before = values_of(*part);
      const std::string message = message_of<InvalidArgument>([&] { modules::merge(*part); });
      CHECK_THAT(message, ContainsSubstring("weight of down") && ContainsSubstring("not finite"));
      CHECK_THAT(message, ContainsSubstring("the weight or the adapter holds numbers that are not finite"));
      CHECK_THAT(message, !ContainsSubstring("move the model"));
      check_unmerged(part, before);
    }
  }
}

TEST_CASE("whatever fails in a merge, no layer stays merged", "[lora]") {
  Part part;
  const torch::NoGradGuard no_grad;
  part->down->adapter("default")->A = at::ones({2, 7});  // LibTorch refuses the product
  const auto before = values_of(*part);
  CHECK_THROWS(modules::merge(*part));
  check_unmerged(part, before);
}

}  // namespace pacer::testing::lora_merge
