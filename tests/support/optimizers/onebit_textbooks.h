// How 1-bit optimizers on threads as ranks are compared with their textbooks. What only one of them has is in
// its Family (onebit_adam_ranks.h, onebit_lamb_ranks.h):
//
//   Textbook                      what it must equal
//   set_rules(options, rules)     the textbook's own rules
//   set_parameter(options, p)     and those of a parameter
//   difference(p, optimizer, parameter, frozen)
//                                 the name of what differs in that, "" where nothing does; `frozen`: what the
//                                 optimizer exports, where the parameter's variance is frozen
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <pacer/kernels/math/onebit.h>

#include "support/optimizers/onebit_method_reference.h"
#include "support/optimizers/onebit_ranks.h"

namespace pacer::testing {

template <class Optimizer>
using TextbookOf = typename Family<Optimizer>::Textbook;

// What textbooks of all 1-bit optimizers need to know.
template <class Optimizer>
void set_rules(const OneBitRanks<Optimizer>& ranks, const OptionsOf<Optimizer>& options,
               OneBitMethodRules& rules) {
  rules.world_size = static_cast<int64_t>(ranks.size());
  rules.exchanges = options.one_bit() && (ranks.size() > 1 || options.compress_alone());
  rules.freeze_step = options.freeze_step().value_or(0);
  rules.variance_floor = options.variance_floor();
  rules.l1 = options.scale() == ScaleNorm::l1;
  rules.block_scales = options.block_scales();
  const at::ScalarType dtype = ranks.parameters[0][0].scalar_type();
  if (dtype == at::kBFloat16) rules.stored = [](float sum) { return static_cast<float>(c10::BFloat16(sum)); };
  if (dtype == at::kHalf) rules.stored = [](float sum) { return static_cast<float>(c10::Half(sum)); };
  rules.divides_first = dtype == at::kHalf;
}
template <class Options>
void set_parameter(const Options& options, const Tensor& initial, OneBitMethodParameter& p) {
  p.lr = options.lr();
  std::tie(p.beta1, p.beta2) = options.betas();
  p.eps = options.eps();
  p.weight_decay = options.weight_decay();
  p.bias_correction = options.bias_correction();
  p.compress = options.compress();
  p.value = fp32_values(initial);
}

// The textbook of these ranks, from where they start.
template <class Optimizer>
TextbookOf<Optimizer> textbook_of(const OneBitRanks<Optimizer>& ranks, const GroupsOf<Optimizer>& groups) {
  typename TextbookOf<Optimizer>::Rules rules;
  set_rules(ranks, groups.front().options, rules);
  Family<Optimizer>::set_rules(groups.front().options, rules);
  std::vector<typename TextbookOf<Optimizer>::Parameter> parameters;
  for (const auto& group : groups) {
    for (size_t i = 0; i < group.shapes.size(); ++i) {
      const Tensor& initial = ranks.parameters[0][parameters.size()];
      auto& p = parameters.emplace_back();
      set_parameter(group.options, initial, p);
      Family<Optimizer>::set_parameter(group.options, p);
    }
  }
  return {std::move(rules), std::move(parameters)};
}

inline TextbookGradients textbook_gradients(const std::vector<std::vector<Tensor>>& gradients) {
  TextbookGradients all;
  for (const auto& of_rank : gradients) {
    auto& row = all.emplace_back();
    for (const Tensor& g : of_rank) {
      row.push_back(g.defined() ? std::optional(fp32_values(g)) : std::nullopt);
    }
  }
  return all;
}

// What differs between the textbook and any rank, "" where nothing does. `whole`: state and errors, too.
template <class Optimizer>
std::string difference_from(const TextbookOf<Optimizer>& textbook, const OneBitRanks<Optimizer>& ranks,
                            bool whole = true) {
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    const Optimizer& optimizer = *ranks.optimizers[rank];
    const std::string at_rank = " at rank " + std::to_string(rank);
    if (optimizer.frozen_at() != textbook.frozen_at) return "frozen_at" + at_rank;
    if (optimizer.attempts() != textbook.attempts) return "attempts" + at_rank;
    const NamedTensors state = whole ? optimizer.export_state() : NamedTensors{};
    const NamedTensors errors = whole ? optimizer.export_rank_state() : NamedTensors{};
    for (size_t i = 0; i < textbook.parameters.size(); ++i) {
      const auto& p = textbook.parameters[i];
      const Tensor& parameter = ranks.parameters[rank][i];
      const std::string name = optimizer.parameter_name(parameter);
      if (!equals_bits(ranks.value(rank, i), p.value)) return "value of " + name + at_rank;
      if (!whole) continue;
      if (p.steps > 0) {
        if (!equals_bits(state.at(name + "/exp_avg"), p.momentum)) return "exp_avg of " + name + at_rank;
        if (!equals_bits(state.at(name + "/exp_avg_sq"), p.variance))
          return "exp_avg_sq of " + name + at_rank;
      }
      const Tensor steps = state.at(name + "/step");
      if (steps.template item<int64_t>() != p.steps) return "step of " + name + at_rank;
      const bool is_frozen = p.compress && textbook.frozen_at;
      const std::string own =
          Family<Optimizer>::difference(p, optimizer, parameter, is_frozen ? &state : nullptr);
      if (!own.empty()) return own + " of " + name + at_rank;
      if (errors.count(name + "/worker_error") == 0) continue;
      if (!equals_bits(errors.at(name + "/worker_error"), textbook.exchange.worker_errors[rank], p.offset)) {
        return "worker_error of " + name + at_rank;
      }
      const size_t begin = std::max(p.offset, rank * textbook.exchange.chunk);
      const size_t end = std::min(p.offset + p.value.size(), (rank + 1) * textbook.exchange.chunk);
      const auto served = errors.find(name + "/server_error");
      if ((served != errors.end()) != (begin < end)) return "existence of server_error of " + name + at_rank;
      if (begin < end && (served->second.numel() != static_cast<int64_t>(end - begin) ||
                          !equals_bits(served->second, textbook.exchange.server_error, begin))) {
        return "server_error of " + name + at_rank;
      }
    }
  }
  return "";
}

// Both take `attempts` steps; `edit` may change the gradients of an attempt. What differs, and when.
using GradientEdit = std::function<void(int64_t, std::vector<std::vector<Tensor>>&)>;
template <class Optimizer>
std::string differ_after(OneBitRanks<Optimizer>& ranks, TextbookOf<Optimizer>& textbook, int64_t attempts,
                         const GradientEdit& edit = nullptr, int64_t whole_every = 1) {
  for (int64_t last = textbook.attempts + attempts; textbook.attempts < last;) {
    auto gradients = ranks.gradients(textbook.attempts);
    if (edit) edit(textbook.attempts, gradients);
    const std::string message = ranks.step(gradients);
    textbook.step(textbook_gradients(gradients));
    const bool whole = textbook.attempts % whole_every == 0 || textbook.attempts == last;
    const std::string what = message.empty() ? difference_from(textbook, ranks, whole) : message;
    if (!what.empty()) return what + " after attempt " + std::to_string(textbook.attempts);
  }
  return "";
}

}  // namespace pacer::testing
