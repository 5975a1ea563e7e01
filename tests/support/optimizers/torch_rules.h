// The optimizers whose rule is torch's but not Adam's, as a table for tests that are the same for each of them: its options,
// groups that take other loops, and options that are refused.
#pragma once

#include <cmath>
#include <string>
#include <vector>

#include "support/optimizers/twins.h"

namespace pacer::testing {

template <class Options>
struct BadOption {
  void (*apply)(Options&);
  std::vector<std::string> parts;  // of the sentence
};

template <class Optimizer>
struct TorchRule;

template <>
struct TorchRule<FusedSgd> {
  using Options = FusedSgdOptions;
  static constexpr const char* kName = "FusedSgd";
  static constexpr const char* kNameInTorch = "torch::optim::SGD";

  // Every option of the rule away from its default, so that losing one shows.
  static Options rich() {
    return Options(0.02).momentum(0.8).dampening(0.25).weight_decay(0.05).maximize(true);
  }
  // Others that need other loops or other tensors.
  static std::vector<Options> kinds_of(const Options& rich) {
    return {Options(rich), Options(rich).momentum(0.5).dampening(0).nesterov(true),
            Options(rich).momentum(0)};
  }
  // How many elements of state a parameter has for each of its own.
  static int64_t tensors(const Options& options) { return options.momentum() > 0; }
  static torch::optim::SGDOptions of_torch() {
    return torch::optim::SGDOptions(0.1).momentum(0.9).dampening(0.2).weight_decay(0.01);
  }
  static std::vector<BadOption<Options>> bad_options() {
    return {
        {[](Options& o) { o.momentum(1); }, {"FusedSgd", "momentum", "1", "[0, 1)"}},
        {[](Options& o) { o.momentum(std::nan("")); }, {"momentum", "nan"}},
        {[](Options& o) { o.dampening(-0.5); }, {"dampening", "-0.5", "[0, 1)"}},
        {[](Options& o) { o.nesterov(true); }, {"Nesterov", "momentum above 0", "not 0 and 0"}},
        {[](Options& o) { o.nesterov(true).momentum(0.5).dampening(0.25); }, {"Nesterov", "0.5 and 0.25"}},
        {[](Options& o) { o.paged(Paging()); }, {"no buffer that could be paged"}},
    };
  }
};

template <>
struct TorchRule<FusedRmsprop> {
  using Options = FusedRmspropOptions;
  static constexpr const char* kName = "FusedRmsprop";
  static constexpr const char* kNameInTorch = "torch::optim::RMSprop";

  static Options rich() {
    auto options = Options(0.02).alpha(0.9).eps(1e-3).weight_decay(0.05);
    return options.momentum(0.8).centered(true).maximize(true);
  }
  static std::vector<Options> kinds_of(const Options& rich) {
    return {Options(rich), Options(rich).momentum(0.5).centered(false), Options(rich).momentum(0),
            Options(rich).momentum(0).centered(false)};
  }
  static int64_t tensors(const Options& options) { return 1 + (options.momentum() > 0) + options.centered(); }
  static torch::optim::RMSpropOptions of_torch() {
    auto options = torch::optim::RMSpropOptions(0.1).alpha(0.9).eps(1e-3).weight_decay(0.01);
    return options.momentum(0.9).centered(true);
  }
  static std::vector<BadOption<Options>> bad_options() {
    return {
        {[](Options& o) { o.alpha(1); }, {"FusedRmsprop", "alpha", "1", "[0, 1)"}},
        {[](Options& o) { o.alpha(std::nan("")); }, {"alpha", "nan"}},
        {[](Options& o) { o.eps(-1e-8); }, {"eps", "-1e-08", ">= 0"}},
        {[](Options& o) { o.momentum(1.5); }, {"momentum", "1.5", "[0, 1)"}},
    };
  }
};

}  // namespace pacer::testing
