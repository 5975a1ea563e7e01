// The fields of every options struct, listed once: name, range, and since which version of the state they are
// saved. Archives, state by name, checks, equality and comparison over ranks are all made from these lists
// (option_visitors.h), so that a field cannot be forgotten in one. What a field means, its type and its default
// stand where it is declared.
#pragma once

#include <optional>
#include <type_traits>

#include <pacer/optimizers/adam_options.h>
#include <pacer/optimizers/lamb_options.h>
#include <pacer/optimizers/muon_options.h>
#include <pacer/optimizers/onebit_adam_options.h>
#include <pacer/optimizers/onebit_lamb_options.h>
#include <pacer/optimizers/own_rule.h>
#include <pacer/optimizers/rmsprop_options.h>
#include <pacer/optimizers/schedule_free_options.h>
#include <pacer/optimizers/sgd_options.h>

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
template <class... Options>
constexpr bool kIsMuon = kIs<MuonOptions, Options...> || kIs<OneBitMuonOptions, Options...>;
template <class... Options>
constexpr bool kIsSgd = kIs<FusedSgdOptions, Options...>;
template <class... Options>
constexpr bool kIsRmsprop = kIs<FusedRmspropOptions, Options...>;
// Whether the options are those of Adam's moments.
template <class... Options>
constexpr bool kHasBetas = !kIsSgd<Options...> && !kIsRmsprop<Options...>;
// Whether there is an optimizer of the same rule in torch, whose options and states are taken for its own.
template <class... Options>
constexpr bool kHasTorch = kIsAdam<Options...> || !kHasBetas<Options...>;
template <class... Options>
constexpr bool kIsScheduleFree = kIs<ScheduleFreeAdamWOptions, Options...>;

// Calls visit(OptionField, value) for every field of the options, const or not; of several structs
// visit(OptionField, value, other value ...). These are the options that say when the variance freezes,
// and how often it is refreshed then.
template <class Visit, class... Options>
void visit_freeze_options(const Visit& visit, Options&... o) {
  visit(OptionField{"freeze_step"}, o.freeze_step()...);
  visit(OptionField{"freeze_automatically"}, o.freeze_automatically()...);
  visit(OptionField{"allow_early_freeze"}, o.allow_early_freeze()...);
  if constexpr ((!kIs<OneBitLambOptions, Options> && ...)) {
    visit(OptionField{"refresh_variance_every"}, o.refresh_variance_every()...);
  }
}

// Those of CompressionOptions.
template <class Visit, class... Options>
void visit_compression_options(const Visit& visit, Options&... o) {
  visit(OptionField{"scale"}, o.scale()...);
  visit(OptionField{"block_scales"}, o.block_scales()...);
  visit(OptionField{"compress_alone"}, o.compress_alone()...);
  visit(OptionField{"hierarchical"}, o.hierarchical()...);
}

// Those that say how momentum is exchanged.
template <class Visit, class... Options>
void visit_exchange_options(const Visit& visit, Options&... o) {
  OptionField vectors{"compress_vectors"}, bytes{"bucket_bytes"}, overlap{"overlap_backward"};
  vectors.since = 3;
  bytes.is_saved = overlap.is_saved = false;
  visit(OptionField{"variance_floor"}, o.variance_floor()...);
  visit_compression_options(visit, o...);
  visit(vectors, o.compress_vectors()...);
  visit(OptionField{"one_bit"}, o.one_bit()...);
  visit(bytes, o.bucket_bytes()...);
  visit(overlap, o.overlap_backward()...);
}

// All fields; the structs are of one type.
template <class Visit, class... Options>
void visit_options(const Visit& visit, Options&... o) {
  constexpr bool kOfTorch = true;
  visit(OptionField{"lr", Range::at_least_zero, kOfTorch}, o.lr()...);
  if constexpr (kIsSgd<Options...>) {
    visit(OptionField{"momentum", Range::below_one, kOfTorch}, o.momentum()...);
    visit(OptionField{"dampening", Range::below_one, kOfTorch}, o.dampening()...);
    visit(OptionField{"nesterov", Range::any, kOfTorch}, o.nesterov()...);
    visit(OptionField{"maximize"}, o.maximize()...);
  } else if constexpr (kIsRmsprop<Options...>) {
    visit(OptionField{"alpha", Range::below_one, kOfTorch}, o.alpha()...);
    visit(OptionField{"eps", Range::at_least_zero, kOfTorch}, o.eps()...);
    visit(OptionField{"momentum", Range::below_one, kOfTorch}, o.momentum()...);
    visit(OptionField{"centered", Range::any, kOfTorch}, o.centered()...);
    visit(OptionField{"maximize"}, o.maximize()...);
  } else {
    visit(OptionField{"betas", Range::below_one, kOfTorch}, o.betas()...);
    visit(OptionField{"eps", Range::at_least_zero, kOfTorch}, o.eps()...);
    visit(OptionField{"bias_correction"}, o.bias_correction()...);
  }
  visit(OptionField{"weight_decay", Range::at_least_zero, kOfTorch}, o.weight_decay()...);
  if constexpr (kIsAdam<Options...>) visit(OptionField{"amsgrad", Range::any, kOfTorch}, o.amsgrad()...);
  visit(OptionField{"initial_lr", Range::at_least_zero}, o.initial_lr()...);
  visit(OptionField{"master_weights"}, o.master_weights()...);
  if constexpr (!kIsOneBit<Options...>) {
    visit(OptionField{"finite_check"}, o.finite_check()...);
    visit(OptionField{"rounding"}, o.rounding()...);
    visit(OptionField{"seed"}, o.seed()...);
  }
  if constexpr (!kIsOneBit<Options...> && kHasBetas<Options...>) {
    OptionField bits{"state_bits"};
    bits.is_saved = false;
    visit(bits, o.state_bits()...);
  }
  if constexpr (kIsLamb<Options...>) {
    visit(OptionField{"min_coeff", Range::at_least_zero}, o.min_coeff()...);
    visit(OptionField{"max_coeff", Range::at_least_zero}, o.max_coeff()...);
    visit(OptionField{"adapt"}, o.adapt()...);
  }
  if constexpr (kIs<OneBitLambOptions, Options...>) {
    visit(OptionField{"coeff_beta", Range::below_one}, o.coeff_beta()...);
    visit(OptionField{"factor_min", Range::above_zero}, o.factor_min()...);
    visit(OptionField{"factor_max", Range::above_zero}, o.factor_max()...);
    visit(OptionField{"factor_threshold", Range::below_one}, o.factor_threshold()...);
  }
  if constexpr (kIsMuon<Options...>) {
    visit(OptionField{"orthogonalize"}, o.orthogonalize()...);
    visit(OptionField{"momentum", Range::below_one}, o.momentum()...);
    visit(OptionField{"nesterov"}, o.nesterov()...);
    visit(OptionField{"adjust_lr_fn"}, o.adjust_lr_fn()...);
    visit(OptionField{"ns_steps"}, o.ns_steps()...);
    visit(OptionField{"ns_coefficients"}, o.ns_coefficients()...);
    visit(OptionField{"precision"}, o.precision()...);
    visit(OptionField{"split"}, o.split()...);
    visit(OptionField{"normalize_rows"}, o.normalize_rows()...);
    visit(OptionField{"row_beta", Range::below_one}, o.row_beta()...);
    visit(OptionField{"cautious_decay"}, o.cautious_decay()...);
  }
  if constexpr (kIsScheduleFree<Options...>) {
    visit(OptionField{"warmup_steps"}, o.warmup_steps()...);
    visit(OptionField{"r"}, o.r()...);
    visit(OptionField{"weight_lr_power"}, o.weight_lr_power()...);
  }
  if constexpr (kIs<OneBitMuonOptions, Options...>) visit_compression_options(visit, o...);
  if constexpr (kIsOneBit<Options...>) {
    visit(OptionField{"compress"}, o.compress()...);
    visit_freeze_options(visit, o...);
    visit_exchange_options(visit, o...);
  }
}

}  // namespace pacer::detail
