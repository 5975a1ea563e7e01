// A parameter of an fp64 restatement, with the options of its group and all state that any optimizer of pacer
// keeps for it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <pacer/optimizers/named_tensors.h>

namespace pacer::testing {

using Doubles = std::vector<double>;

// Returns the sum of the squares.
inline double squares(const Doubles& values) {
  double sum = 0;
  for (const double x : values) sum += x * x;
  return sum;
}

// Options of one group, by name as they are exported.
struct LifecycleOptions {
  LifecycleOptions(const NamedTensors& state, size_t group, bool is_l2) : l2(is_l2) {
    const auto get = [&](const char* name, double otherwise) {
      const auto found = state.find("group/" + std::to_string(group) + "/" + name);
      return found == state.end() ? otherwise : found->second.to(at::kDouble).item<double>();
    };
    lr = get("lr", 0), beta1 = get("beta1", 0), beta2 = get("beta2", 0), eps = get("eps", 0);
    decay = get("weight_decay", 0), bias_correction = get("bias_correction", 0) != 0;
    amsgrad = get("amsgrad", 0) != 0;
    is_lamb = get("min_coeff", -1) >= 0;
    min_coeff = get("min_coeff", 0), max_coeff = get("max_coeff", 0), adapt = get("adapt", 1) != 0;
    coeff_beta = get("coeff_beta", 0), factor_min = get("factor_min", 0), factor_max = get("factor_max", 0);
    factor_threshold = get("factor_threshold", 0);
    freeze_step = static_cast<int64_t>(get("freeze_step", 0));
    compress = get("compress", 0) != 0;
    refresh_every = static_cast<int64_t>(get("refresh_variance_every", 0));
    floor_share = get("variance_floor", 0);
    by_blocks = get("block_scales", 0) != 0;
    exchanges = get("compress_alone", 0) != 0 && get("one_bit", 1) != 0;
    is_muon = get("orthogonalize", 0) != 0, momentum = get("momentum", 0), nesterov = get("nesterov", 0) != 0;
    matches_adamw = get("adjust_lr_fn", 0) == 0, iterations = static_cast<int64_t>(get("ns_steps", 0));
    split = static_cast<size_t>(get("split", 1));
    normalizes_rows = get("normalize_rows", 0) != 0, row_beta = get("row_beta", 0);
    is_cautious = get("cautious_decay", 0) != 0;
    is_sgd = get("dampening", -1) >= 0, dampening = get("dampening", 0), maximizes = get("maximize", 0) != 0;
    is_rmsprop = get("centered", -1) >= 0, alpha = get("alpha", 0), centered = get("centered", 0) != 0;
    averages = get("weight_lr_power", -1) >= 0, weight_lr_power = get("weight_lr_power", 0);
    r = get("r", 0), warmup_steps = get("warmup_steps", 0);
  }
  double correction(double beta, int64_t t) const {
    return bias_correction ? 1 - std::pow(beta, static_cast<double>(t)) : 1;
  }
  // The largest |m| / sqrt(v) of Adam.
  double largest_direction() const {
    const double single = 1 / std::sqrt(1 - beta2), ratio = beta1 * beta1 / beta2;
    return ratio < 1 ? std::min(single, (1 - beta1) * single / std::sqrt(1 - ratio)) : single;
  }

  double lr, beta1, beta2, eps, decay, min_coeff, max_coeff, coeff_beta, factor_min, factor_max,
      factor_threshold;
  double floor_share;
  int64_t freeze_step, refresh_every;
  bool bias_correction, amsgrad, l2, is_lamb, adapt, compress, by_blocks, exchanges;
  bool is_muon, nesterov, matches_adamw, normalizes_rows, is_cautious, averages;
  double momentum, row_beta, dampening, weight_lr_power, r, warmup_steps;
  double alpha;
  bool is_sgd, is_rmsprop, centered, maximizes;
  int64_t iterations;
  size_t split;
  bool travels_alone = false;  // in a bucket of its own
  bool is_lion = false;        // by name: its options are those of AdamW
};

struct LifecycleParameter {
  LifecycleParameter(LifecycleOptions of_group, size_t its_group, Doubles values)
      : options(std::move(of_group)),
        group(its_group),
        p(std::move(values)),
        m(p.size(), 0),
        v(p.size(), 0),
        largest_v(p.size(), 0) {}

  LifecycleOptions options;
  size_t group;
  size_t rows = 1;  // of what Muon takes for a matrix
  Doubles p, m, v, largest_v, fresh, worker_error, server_error;
  Doubles row_moment;  // Muon's, empty before its first step
  int64_t t = 0;
  bool trained = true;
  double weight_sum = 0, lr_max = 0;  // of Schedule-Free AdamW, whose z is m
  double average = 0, averaged = 0, coefficient = 1, factor = 1, scale = 1, floor = 0;
  bool is_new = false;  // no variance at all

  double direction(size_t k, double divisor, bool from_signs) const {
    if (from_signs && v[k] == 0 && !is_new) return 0;
    const double most = options.largest_direction();
    return std::min(std::max(m[k] / divisor, -most), most);
  }
};

// Values plus the errors they carry become signs, times the root of their mean square: of all, or of each 2,048
// elements, which lie one behind the other, each parameter's from a multiple of `alignment` on. The errors are
// what that lost.
inline void round_to_signs(const std::vector<LifecycleParameter*>& all, std::vector<Doubles>& values,
                           Doubles LifecycleParameter::*error, size_t alignment) {
  const bool by_blocks = all.front()->options.by_blocks;
  std::vector<double> sums(1, 0), counts(1, 0);
  std::vector<size_t> begins;
  size_t position = 0;
  const auto block_of = [&](size_t j, size_t k) { return by_blocks ? (begins[j] + k) / 2048 : 0; };
  for (size_t j = 0; j < all.size(); ++j) {
    begins.push_back(position);
    for (size_t k = 0; k < values[j].size(); ++k) {
      values[j][k] += (all[j]->*error)[k];
      sums.resize(std::max(sums.size(), block_of(j, k) + 1), 0);
      counts.resize(sums.size(), 0);
      sums[block_of(j, k)] += values[j][k] * values[j][k];
      counts[block_of(j, k)] += 1;
    }
    position += (values[j].size() + alignment - 1) / alignment * alignment;
  }
  for (size_t j = 0; j < all.size(); ++j) {
    for (size_t k = 0; k < values[j].size(); ++k) {
      const double scale = std::sqrt(sums[block_of(j, k)] / counts[block_of(j, k)]);
      const double sent = values[j][k] < 0 ? -scale : scale;
      (all[j]->*error)[k] = values[j][k] - sent;
      values[j][k] = sent;
    }
  }
}

}  // namespace pacer::testing
