// Structs of options share templates: setters chain in any order, and each struct has defaults of its own.
#include "support/catch.h"

#include <type_traits>

#include <pacer/optimizers/detail/optimizer_traits.h>
#include <pacer/optimizers/detail/option_visitors.h>
#include <pacer/parallel/data_parallel.h>
#include <pacer/parallel/shards.h>

namespace pacer::testing {
namespace {

// Whether options differ as soon as one field does, whichever.
template <class Options>
int64_t count_fields_that_count() {
  int64_t fields = 0, seen = 0;
  const Options untouched;
  detail::visit_options([&](const auto&, const auto&) { ++fields; }, untouched);
  for (int64_t changed = 0; changed < fields; ++changed) {
    Options options;
    int64_t field = 0;
    const auto change = [&](const auto&, auto& value) {
      using Value = std::decay_t<decltype(value)>;
      if (field++ != changed) return;
      if constexpr (std::is_same_v<Value, bool>) {
        value = !value;
      } else if constexpr (std::is_same_v<Value, detail::Betas>) {
        std::get<1>(value) = 0.5;
      } else if constexpr (std::is_enum_v<Value>) {
        value = static_cast<Value>(1);
      } else {
        value = 7;
      }
    };
    detail::visit_options(change, options);
    seen += !(options == untouched);
  }
  return seen == fields ? fields : -1;
}

}  // namespace

TEST_CASE("setters of shared and of own options chain in any order", "[fused_adam]") {
  auto adam = OneBitAdamOptions(1e-3).betas({0.8, 0.9}).compress(false).refresh_variance_every(3).eps(1e-4);
  static_assert(std::is_same_v<decltype(adam), OneBitAdamOptions>);
  adam.hierarchical(true).weight_decay(0).freeze_step(5).bucket_bytes(100).lr(2);
  CHECK((adam.lr() == 2 && std::get<0>(adam.betas()) == 0.8 && adam.eps() == 1e-4));
  CHECK((!adam.compress() && adam.refresh_variance_every() == 3 && adam.freeze_step() == 5));
  CHECK((adam.hierarchical() && adam.compression().hierarchical() && adam.bucket_bytes() == 100));

  const auto lamb = OneBitLambOptions().max_coeff(3).coeff_beta(0.5).scale(ScaleNorm::l1).lr(1).adapt(false);
  static_assert(std::is_same_v<std::decay_t<decltype(lamb)>, OneBitLambOptions>);
  CHECK((lamb.max_coeff() == 3 && lamb.coeff_beta() == 0.5 && lamb.scale() == ScaleNorm::l1));

  const auto adamw = FusedAdamWOptions().amsgrad(true).seed(7).betas({0.5, 0.6}).paged(Paging()).eps(1);
  static_assert(std::is_same_v<std::decay_t<decltype(adamw)>, FusedAdamWOptions>);
  CHECK((adamw.amsgrad() && adamw.wants_amsgrad() && adamw.seed() == 7 && adamw.paged() && adamw.eps() == 1));

  const auto parallel = DataParallelOptions().in_place(true).sync_buffers(false).wire_dtype(at::kBFloat16);
  CHECK((parallel.in_place() == true && parallel.buckets().wire_dtype() == at::kBFloat16));
  const auto shards = ShardsOptions().unit_bytes(8).prefetch(2).unused_is_zero(true).keep_after_forward(true);
  CHECK((shards.parts().unit_bytes() == 8 && shards.parts().unused_is_zero() && shards.prefetch() == 2));
}

TEST_CASE("optimizers that share options have defaults of their own", "[fused_adam]") {
  CHECK((FusedAdamOptions().weight_decay() == 0 && FusedAdamWOptions().weight_decay() == 1e-2));
  CHECK((FusedAdamWOptions().eps() == 1e-8 && FusedLambOptions().eps() == 1e-6));
  CHECK((FusedLambOptions().weight_decay() == 1e-2 && FusedLambOptions().bias_correction()));
  CHECK((OneBitAdamOptions().weight_decay() == 1e-2 && OneBitAdamOptions().eps() == 1e-8));
  CHECK((OneBitAdamOptions().block_scales() && OneBitAdamOptions().bias_correction()));
  CHECK((OneBitLambOptions().weight_decay() == 1e-2 && OneBitLambOptions().eps() == 1e-6));
  CHECK((!OneBitLambOptions().block_scales() && !OneBitLambOptions().bias_correction()));
  CHECK((FusedAdamOptions(3).get_lr() == 3 && OneBitLambOptions(3).get_lr() == 3));
}

TEST_CASE("options differ where one field does", "[fused_adam]") {
  CHECK(count_fields_that_count<FusedAdamOptions>() == 12);
  CHECK(count_fields_that_count<FusedAdamWOptions>() == 12);
  CHECK(count_fields_that_count<FusedLambOptions>() == 14);
  CHECK(count_fields_that_count<FusedSgdOptions>() == 11);
  CHECK(count_fields_that_count<FusedRmspropOptions>() == 12);
  CHECK(count_fields_that_count<MuonOptions>() == 22);
  CHECK(count_fields_that_count<OneBitAdamOptions>() == 21);
  CHECK(count_fields_that_count<OneBitLambOptions>() == 27);
}

TEST_CASE("the options of a 1-bit optimizer are what it plans with", "[onebit]") {
  const auto options = OneBitAdamOptions()
                           .freeze_step(5)
                           .refresh_variance_every(3)
                           .variance_floor(0.5)
                           .scale(ScaleNorm::l1)
                           .block_scales(false)
                           .hierarchical(true)
                           .overlap_backward(true)
                           .bucket_bytes(100);
  const detail::OneBitGroupSettings plan = detail::traits_of(options).settings(options).onebit;
  CHECK((plan.freeze_step() == 5 && plan.refresh_variance_every() == 3 && plan.variance_floor() == 0.5));
  CHECK((plan.compression().scale() == ScaleNorm::l1 && !plan.compression().block_scales()));
  CHECK((plan.compression().hierarchical() && plan.overlap_backward() && plan.bucket_bytes() == 100));
}

}  // namespace pacer::testing
