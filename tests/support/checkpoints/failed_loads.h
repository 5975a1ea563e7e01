// Loads into a model that must fail, for programs of Catch2.
#pragma once

#include <functional>
#include <string>

#include "support/catch.h"
#include "support/checkpoints/weight_files.h"
#include "support/message_of.h"

namespace pacer::testing {

// `load`, on this model, fails with all of these parts in one sentence, and changes nothing.
inline void check_load_fails(const torch::nn::Module& model, const Names& parts,
                             const std::function<void()>& load) {
  const ModelState before = state_of_model(model);
  const std::string message = message_of<Error>(load);
  for (const std::string& part : parts) CHECK_THAT(message, Catch::Matchers::ContainsSubstring(part));
  CHECK(changed_since(model, before) == "");
}

}  // namespace pacer::testing
