// The fields of every options struct, listed once: name, range, meaning, and since which version of the state
// they are saved. Archives, state by name, checks, equality, comparison over ranks, help texts and the tables
// in docs are all made from these lists (option_visitors.h, option_table.h), so that a field cannot be
// forgotten in one.
#pragma once

#include <optional>
#include <type_traits>

#include <pacer/optimizers/adam_options.h>
#include <pacer/optimizers/lamb_options.h>
#include <pacer/optimizers/onebit_adam_options.h>
#include <pacer/optimizers/onebit_lamb_options.h>

namespace pacer::detail {

// The version of options and state as they are saved. Version 2 says its version, says where the memory order
// of a 1-bit error is not row-major, and refuses keys that it does not know. Version 3 knows
// compress_vectors: before, all of a compressed group was compressed. Version 4 says which optimizer saved
// it, and archives have the parameters' names. Files without a version are of version 1.
constexpr int64_t kStateVersion = 4;
constexpr int64_t kNamesSince = 4;  // the first version with both

enum class Range { any, at_least_zero, above_zero, below_one };

struct OptionField {
  const char* name;
  const char* help;  // a sentence without its full stop
  Range range = Range::any;
  bool of_torch = false;  // torch's optimizers have and save it, too
  int64_t since = 1;      // the first version of the state that holds it
  bool is_saved = true;   // false: it belongs to the run, and a state neither holds nor changes it
};

template <class Value>
inline constexpr bool kIsOptional = false;
template <class Value>
inline constexpr bool kIsOptional<std::optional<Value>> = true;

template <class Struct, class... Options>
constexpr bool kIs = (std::is_same_v<std::remove_const_t<Options>, Struct> && ...);
template <class... Options>
constexpr bool kIsAdam = kIs<FusedAdamOptions, Options...> || kIs<FusedAdamWOptions, Options...>;
template <class... Options>
constexpr bool kIsLamb = kIs<FusedLambOptions, Options...> || kIs<OneBitLambOptions, Options...>;
template <class... Options>
constexpr bool kIsOneBit = kIs<OneBitAdamOptions, Options...> || kIs<OneBitLambOptions, Options...>;

// Calls visit(OptionField, value) for every field of the options, const or not; of several structs of one
// type visit(OptionField, value, other value ...).
template <class Visit, class... Options>
void visit_options(const Visit& visit, Options&... o) {
  visit(OptionField{"lr", "learning rate", Range::at_least_zero, /*of_torch=*/true}, o.lr()...);
  visit(OptionField{"betas", "decay rates of the first and second moment, each in [0, 1)", Range::below_one,
                    /*of_torch=*/true},
        o.betas()...);
  visit(OptionField{"eps", "added to the denominator, outside the square root", Range::at_least_zero,
                    /*of_torch=*/true},
        o.eps()...);
  visit(OptionField{"weight_decay",
                    kIs<FusedAdamOptions, Options...> ? "times the parameter, added to the gradient (L2)"
                    : kIsLamb<Options...>             ? "times the parameter, part of the update"
                                                      : "times the learning rate, taken from the parameter",
                    Range::at_least_zero, /*of_torch=*/true},
        o.weight_decay()...);
  if constexpr (kIsAdam<Options...>) {
    visit(OptionField{"amsgrad", "divide by the running maximum of the second moment", Range::any,
                      /*of_torch=*/true},
          o.amsgrad()...);
  }
  visit(OptionField{"initial_lr", "the rate that a schedule scales; the first schedule sets it to `lr`",
                    Range::at_least_zero},
        o.initial_lr()...);
  visit(OptionField{"bias_correction", "correct the moments for their start at zero"},
        o.bias_correction()...);
  visit(OptionField{"master_weights",
                    kIsOneBit<Options...>
                        ? "of 16-bit parameters: remainder or fp32 copy; none is refused"
                        : "how 16-bit parameters keep the digits that their dtype cannot hold"},
        o.master_weights()...);
  if constexpr (!kIsOneBit<Options...>) {
    visit(OptionField{"finite_check",
                      "check all gradients first; where any, or the sum of their squares, is not finite, "
                      "change nothing"},
          o.finite_check()...);
    visit(OptionField{"rounding", "how bf16 parameters without master weights are rounded"}, o.rounding()...);
    visit(OptionField{"seed", "of stochastic rounding"}, o.seed()...);
  }
  if constexpr (kIsLamb<Options...>) {
    visit(OptionField{"min_coeff", "smallest trust ratio", Range::at_least_zero}, o.min_coeff()...);
    visit(OptionField{"max_coeff", "largest trust ratio, >= min_coeff", Range::at_least_zero},
          o.max_coeff()...);
    visit(OptionField{"adapt", "false: the trust ratio is 1, customary for biases and normalisations"},
          o.adapt()...);
  }
  if constexpr (kIs<OneBitLambOptions, Options...>) {
    visit(
        OptionField{"coeff_beta", "decay rate, in [0, 1), of the mean of the trust ratios", Range::below_one},
        o.coeff_beta()...);
    visit(OptionField{"factor_min", "smallest factor of the mean ratio after the freeze", Range::above_zero},
          o.factor_min()...);
    visit(OptionField{"factor_max", "largest factor of the mean ratio, >= factor_min", Range::above_zero},
          o.factor_max()...);
    visit(OptionField{"factor_threshold",
                      "share, in [0, 1), by which the factor may change from one step to the next",
                      Range::below_one},
          o.factor_threshold()...);
  }
  if constexpr (kIsOneBit<Options...>) {
    visit(OptionField{"compress", "false: the group stays in full precision for ever"}, o.compress()...);
    // The same in all groups:
    visit(OptionField{"freeze_step", "steps of warm-up, >= 1, after which the variance freezes"},
          o.freeze_step()...);
    visit(OptionField{"freeze_automatically",
                      "steps planned in all, >= 4: freezes between 15 and 30 % of them, when the variance "
                      "stands still"},
          o.freeze_automatically()...);
    visit(OptionField{"allow_early_freeze",
                      "freeze though a curriculum or the learning-rate warm-up still moves"},
          o.allow_early_freeze()...);
    if constexpr (kIs<OneBitAdamOptions, Options...>) {
      visit(OptionField{"refresh_variance_every",
                        "every K-th step travels in full precision and updates the variance; 0: never"},
            o.refresh_variance_every()...);
    }
    visit(
        OptionField{
            "variance_floor",
            "no element divides by less than the root of this share, 0 to 1, of its tensor's mean variance; "
            "0: no guard"},
        o.variance_floor()...);
    visit(OptionField{"scale", "what a sign stands for: root of the mean square, or mean magnitude"},
          o.scale()...);
    visit(
        OptionField{
            "block_scales",
            "a scale for every 2,048 elements, 1.6 % more bytes, instead of one for the whole buffer"},
        o.block_scales()...);
    visit(OptionField{"compress_vectors",
                      "compress parameters of less than two dimensions (biases, norms), too", Range::any,
                      /*of_torch=*/false, /*since=*/3},
          o.compress_vectors()...);
    visit(OptionField{"compress_alone", "round to signs with a single rank, too"}, o.compress_alone()...);
    visit(OptionField{"hierarchical", "nodes are the workers: signs between them, full precision inside"},
          o.hierarchical()...);
    visit(OptionField{"one_bit",
                      "false: gradients are averaged in full precision after the freeze, too; a control"},
          o.one_bit()...);
    visit(OptionField{"bucket_bytes",
                      "momentum travels in buckets of so many bytes, 4 an element, one behind the other; "
                      "unset: in one; not part of the state",
                      Range::any, /*of_torch=*/false, /*since=*/1, /*is_saved=*/false},
          o.bucket_bytes()...);
    visit(
        OptionField{
            "overlap_backward",
            "in a Session buckets travel while backward runs, and gradients that are not finite are an "
            "error; not part of the state",
            Range::any, /*of_torch=*/false, /*since=*/1, /*is_saved=*/false},
        o.overlap_backward()...);
  }
}

}  // namespace pacer::detail
