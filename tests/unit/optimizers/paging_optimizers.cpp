// Paged optimizers against plain ones, to the bit, on a simulated device: every dtype set, any residency,
// lists and states that change, memory pressure.
#include "support/catch.h"

#include <cmath>

#include <pacer/core/tile.h>
#include <pacer/optimizers/detail/page_plan.h>

#include "support/both_devices.h"
#include "support/checkpoints/archives.h"
#include "support/kernels/lamb.h"
#include "support/optimizers/contract.h"
#include "support/optimizers/late_page_device.h"
#include "support/optimizers/paged_pair.h"

namespace pacer::testing {
namespace {

template <class Optimizer>
OptionsOf<Optimizer> decaying_options(bool check) {
  auto options = OptionsOf<Optimizer>(0.01).weight_decay(0.1).finite_check(check).seed(3);
  if constexpr (std::is_same_v<Optimizer, FusedSgd>) options.momentum(0.9);
  if constexpr (std::is_same_v<Optimizer, FusedRmsprop>) options.centered(true);
  return options;
}

}  // namespace

TEMPLATE_TEST_CASE("a paged step has the bits of a plain one, in every mode", "[paging]", FusedAdam,
                   FusedAdamW, FusedLamb, FusedSgd, FusedRmsprop) {
  unsigned seed = 0;
  for (const Mode& mode : all_modes()) {
    for (const int64_t resident : {int64_t{0}, int64_t{100'000}, kEverything}) {
      for (const bool check : {false, true}) {
        CAPTURE(mode.name, resident, check);
        torch::manual_seed(4);
        auto options = with_mode(decaying_options<TestType>(check), mode);
        if constexpr (std::is_same_v<TestType, FusedSgd>) {
          options.nesterov(check);
        } else if constexpr (std::is_same_v<TestType, FusedRmsprop>) {
          options.momentum(check ? 0.9 : 0);
        } else if constexpr (!std::is_same_v<TestType, FusedLamb>) {
          options.amsgrad(check);
        }
        PagedPair<TestType> pair(odd_parameters(mode.dtype), options, paging_of(resident), ++seed);
        for (int step = 0; step < 12; ++step) {
          pair.set_gradients();
          if (step % 4 == 1) pair.clear_gradient(static_cast<size_t>(step) % pair.plain.size());
          if (step % 5 == 2) {
            for (size_t i = 0; i < pair.plain.size(); i += 2) pair.clear_gradient(i);
          }
          if (check && step % 6 == 4) {
            for (auto* list : {&pair.plain, &pair.paged}) {
              (*list)[3].mutable_grad() = torch::zeros_like((*list)[3]);
              (*list)[3].grad()[step * 1000].fill_(HUGE_VAL);
            }
          }
          contract(pair.other).expect_step();
          pair.step();
          if (step % 5 == 4) CHECK(pair.differs() == "");
        }
        CHECK(pair.differs() == "");
        CHECK(pair.other.skipped_steps() == (check ? 2 : 0));
        CHECK(state_of(pair.other.base(), pair.paged[3]).exp_avg().is_cpu());
        if constexpr (std::is_same_v<TestType, FusedLamb>) {
          for (size_t i = 0; i < pair.plain.size(); ++i) {
            CHECK(pair.one.trust_ratio(pair.plain[i]) == pair.other.trust_ratio(pair.paged[i]));
          }
        }
      }
    }
  }
}

TEST_CASE("resident state is not copied, and all of it can stay", "[paging]") {
  torch::manual_seed(5);
  PagedPair<FusedAdamW> none(random_parameters({{30, 40}, {2000}, {3}}, at::kFloat), FusedAdamWOptions(0.01),
                             paging_of());
  none.train(3);
  CHECK(none.other.device->copied_bytes == 3 * 2 * 8 * (1200 + 2000 + 3));
  PagedPair<FusedAdamW> some(random_parameters({{30, 40}, {2000}, {3}}, at::kFloat), FusedAdamWOptions(0.01),
                             paging_of(12'000));
  some.train(3);
  CHECK(some.other.device->copied_bytes == 3 * 2 * 8 * 2000 + 8 * 1203);
  PagedPair<FusedAdamW> all(random_parameters({{30, 40}, {2000}, {3}}, at::kFloat), FusedAdamWOptions(0.01),
                            paging_of(kEverything));
  all.train(3);
  CHECK(all.other.device->copied_bytes == 8 * 3203);
  for (auto* pair : {&none, &some, &all}) CHECK(pair->differs() == "");
}

TEMPLATE_TEST_CASE("archives and named state pass between paged and plain optimizers", "[paging]", FusedAdamW,
                   FusedLamb, FusedSgd, FusedRmsprop) {
  for (const Mode& mode : all_modes()) {
    for (const int64_t resident : {int64_t{0}, int64_t{60'000}}) {
      CAPTURE(mode.name, resident);
      torch::manual_seed(6);
      const auto options = with_mode(decaying_options<TestType>(false), mode);
      PagedPair<TestType> first(odd_parameters(mode.dtype), options, paging_of(resident), 3);
      first.train(3);
      PagedPair<TestType> by_archive(clones(first.plain), options, paging_of(resident), 4);
      by_archive.train(1);  // so that there is a state to replace
      by_archive.plain = first.plain, by_archive.paged = first.paged;
      PagedPair<TestType> by_name(clones(first.plain), options, paging_of(resident), 5);
      by_name.train(2);
      for (size_t i = 0; i < first.plain.size(); ++i) {
        by_name.plain[i].data().copy_(first.plain[i]);
        by_name.paged[i].data().copy_(first.plain[i]);
      }
      contract(first.other).expect_step();  // what is under way must not be lost, nor come too late
      contract(by_name.other).expect_step();
      by_name.other.import_state(first.one.export_state());
      by_name.one.import_state(first.other.export_state());
      const int64_t host_memories = by_name.other.device->host_memories;
      for (int step = 0; step < 3; ++step) {
        first.set_gradients();
        for (size_t i = 0; i < first.plain.size(); ++i) {
          by_name.plain[i].mutable_grad() = first.plain[i].grad();
          by_name.paged[i].mutable_grad() = first.plain[i].grad();
        }
        first.step();
        by_name.step();
      }
      CHECK(first.differs() == "");
      CHECK(by_name.differs() == "");
      CHECK(difference(snapshot(first.one), snapshot(by_name.other.base())) == "");
      CHECK(by_name.other.device->host_memories == host_memories);  // the memory served again

      std::vector<Tensor> a = clones(first.plain), b = clones(first.plain);
      TestType plain(a, options);
      PagedOnHost<TestType> paged(b, options, paging_of(resident), 6);
      const std::string from_paged = saved(first.other.base()), from_plain = saved(first.one);
      load_from(plain, from_paged);
      load_from(paged.base(), from_plain);
      for (int step = 0; step < 3; ++step) {
        set_random_gradients(a, b);
        plain.step();
        paged.step();
      }
      paged.sync_state();
      CHECK(difference(snapshot(plain), snapshot(paged.base())) == "");
    }
  }
}

TEST_CASE("groups are added, parameters begin late, options move state: the bits stay", "[paging]") {
  for (unsigned seed = 0; seed < 8; ++seed) {
    for (const int64_t resident : {int64_t{0}, int64_t{30'000}}) {
      CAPTURE(seed, resident);
      torch::manual_seed(7 + seed);
      PagedPair<FusedAdamW> pair(random_parameters({{40, 50}, {0}, {700}, {3000}}, at::kBFloat16),
                                 FusedAdamWOptions(0.01), paging_of(resident), seed);
      pair.set_gradients();
      pair.clear_gradient(3);
      pair.step();
      CHECK(pair.differs() == "");
      const int64_t host_memories = pair.other.device->host_memories;
      const int64_t host_bytes = pair.other.device->host_bytes;  // of 2,000 and 700 elements
      pair.train(2);  // the last one comes in, and nobody else moves
      CHECK(pair.other.device->host_memories == host_memories + 1);
      const auto places = [](int64_t elements) { return round_up(elements, detail::kStateAlignment); };
      CHECK((pair.other.device->host_bytes - host_bytes) * (places(2000) + places(700)) ==
            host_bytes * places(3000));
      contract(pair.other).expect_step();
      const auto more = random_parameters({{900}, {33, 3}}, at::kFloat), same = moved_to(more, at::kCPU);
      pair.one.add_param_group(torch::optim::OptimizerParamGroup(more));
      pair.other.add_param_group(torch::optim::OptimizerParamGroup(same));
      for (size_t i = 0; i < more.size(); ++i) {
        pair.plain.push_back(more[i]);
        pair.paged.push_back(same[i]);
      }
      pair.train(2);
      CHECK(pair.differs() == "");
      for (auto* optimizer : std::initializer_list<FusedAdamW*>{&pair.one, &pair.other}) {
        options_of(*optimizer, 0).master_weights(MasterWeights::fp32);
        options_of(*optimizer, 1).amsgrad(true);
      }
      pair.train(2);
      CHECK(pair.differs() == "");
      for (auto* optimizer : std::initializer_list<FusedAdamW*>{&pair.one, &pair.other}) {
        options_of(*optimizer, 0).master_weights(MasterWeights::remainder);
        options_of(*optimizer, 1).amsgrad(false);
      }
      pair.train(2);
      CHECK(pair.differs() == "");
      for (const auto width : {MasterWeights::remainder_8, MasterWeights::remainder}) {
        for (auto* optimizer : std::initializer_list<FusedAdamW*>{&pair.one, &pair.other}) {
          options_of(*optimizer, 0).master_weights(width);
        }
        pair.train(2);
        CHECK(pair.differs() == "");
      }
    }
  }
}

TEST_CASE("under memory pressure resident state moves out, for good, and the bits stay", "[paging]") {
  for (unsigned seed = 0; seed < 12; ++seed) {
    CAPTURE(seed);
    torch::manual_seed(8);
    constexpr int64_t kHeadroom = 100'000;
    const auto paging = paging_of(kEverything).on_pressure(true).headroom(kHeadroom);
    PagedPair<FusedAdamW> pair(random_parameters({{40, 50}, {700}, {3000}, {20}}, at::kFloat),
                               FusedAdamWOptions(0.01), paging, seed);
    pair.train(2);
    LatePageDevice& device = *pair.other.device;
    REQUIRE(device.is_watched());
    const int64_t before = device.copied_bytes;
    device.press();  // there is room
    CHECK(device.copied_bytes == before);
    if (seed % 2 == 0) device.set_free_bytes(kHeadroom - 20'000);  // one block is enough
    if (seed % 2 == 1) device.set_free_bytes(0);
    if (seed % 3 == 0) contract(pair.other).expect_step();
    pair.set_gradients();
    if (seed % 3 == 1) {
      contract(pair.other).prepare({});
      device.press();  // the step is about to use what it has: nothing moves
      CHECK(device.copied_bytes == before);
      contract(pair.other).conclude(contract(pair.other).enqueue());
      pair.one.step();
    }
    device.press();
    CHECK(device.copied_bytes > before);
    CHECK(pair.other.resident_state_bytes() < 50'000);
    CHECK(device.free_bytes() > (seed % 2 == 0 ? kHeadroom - 1 : 0));
    if (seed % 4 == 3) CHECK(pair.differs() == "");
    pair.train(3);
    const int64_t a_step = device.copied_bytes;
    pair.train(1);
    CHECK(device.copied_bytes > a_step);  // some is streamed now
    CHECK(pair.differs() == "");
    device.set_free_bytes(kEverything);
    pair.train(1);
    CHECK(pair.differs() == "");
  }
}

TEST_CASE("a device with less room than resident_bytes keeps less, or says so", "[paging]") {
  torch::manual_seed(9);
  const auto parameters = random_parameters({{40, 50}, {700}, {3000}}, at::kFloat);
  PagedPair<FusedAdamW> less(parameters, FusedAdamWOptions(0.01),
                             paging_of(kEverything).on_pressure(true).headroom(0), 1,
                             /*room=*/80'000);
  less.train(3);
  CHECK(less.differs() == "");
  CHECK(less.other.device->free_bytes() >= 0);
  PagedPair<FusedAdamW> refused(parameters, FusedAdamWOptions(0.01), paging_of(kEverything), 1,
                                /*room=*/30'000);
  refused.set_gradients();
  CHECK_THROWS_WITH(refused.other.step(), Catch::Matchers::ContainsSubstring("resident_bytes(1073741824)"));
}

TEST_CASE("state may be changed by hand after sync_state, and at no other time", "[paging]") {
  for (const int64_t resident : {int64_t{0}, kEverything}) {
    torch::manual_seed(10);
    PagedPair<FusedAdamW> pair(random_parameters({{40, 50}, {700}}, at::kFloat), FusedAdamWOptions(0.01),
                               paging_of(resident));
    pair.train(2);
    const torch::NoGradGuard no_grad;
    for (int step = 0; step < 2; ++step) {  // where it lies; behind it a tensor is replaced
      contract(pair.other).expect_step();
      pair.other.sync_state();
      state_of(pair.one, pair.plain[0]).exp_avg().zero_();
      state_of(pair.other.base(), pair.paged[0]).exp_avg().zero_();
      if (step == 0) pair.train(1);
    }
    state_of(pair.one, pair.plain[1]).exp_avg_sq(torch::ones({700}));
    state_of(pair.other.base(), pair.paged[1]).exp_avg_sq(torch::ones({700}));
    pair.train(2);
    CHECK(pair.differs() == "");
    pair.train(1);
    state_of(pair.other.base(), pair.paged[0]).exp_avg().mul_(2);
    CHECK(contains(refusal([&] { pair.other.step(); }), "sync_state()"));
  }
}

TEST_CASE("groups whose states have other tensors have pages of their own", "[paging]") {
  for (const int64_t resident : {int64_t{0}, int64_t{6000}, kEverything}) {
    torch::manual_seed(15);
    const auto options = FusedRmspropOptions(0.01).alpha(0.9);
    PagedPair<FusedRmsprop> pair(random_parameters({{40, 50}, {700}}, at::kFloat), options,
                                 paging_of(resident));
    const std::vector<Tensor> more = random_parameters({{30, 30}, {9}}, at::kFloat), same = clones(more);
    const auto add = [&](FusedRmsprop& to, std::vector<Tensor>& all, const std::vector<Tensor>& added) {
      all.insert(all.end(), added.begin(), added.end());
      to.add_param_group(
          {added, std::make_unique<FusedRmspropOptions>(FusedRmspropOptions(options).momentum(0.9))});
    };
    add(pair.one, pair.plain, more);
    add(pair.other, pair.paged, same);
    pair.train(3);
    CHECK(pair.differs() == "");
    for (FusedRmsprop* each : {&pair.one, &pair.other.base()}) {
      options_of(*each, 0).momentum(0.5);
      options_of(*each, 1).momentum(0).centered(true);
    }
    pair.train(3);
    CHECK(pair.differs() == "");
  }
}

TEST_CASE("an optimizer of parts of tensors pages them", "[paging]") {
  torch::manual_seed(11);
  for (const Mode& mode : all_modes()) {
    CAPTURE(mode.name);
    PagedPair<FusedAdamW> pair({torch::randn({90, 25}, at::kDouble).to(mode.dtype).requires_grad_()},
                               with_mode(FusedAdamWOptions(0.01).seed(3), mode), paging_of());
    pair.other.own_engine().update_only(pair.paged[0], {0, 1333, {0, 1333, 2250}});
    PagedOnHost<FusedAdamW> rest(pair.paged, with_mode(FusedAdamWOptions(0.01).seed(3), mode),
                                 paging_of(5000), 2);
    rest.own_engine().update_only(pair.paged[0], {1333, 917, {0, 1333, 2250}});
    for (int step = 0; step < 4; ++step) {
      pair.set_gradients();
      pair.one.step();
      for (auto* part : {&pair.other, &rest}) {
        contract(*part).prepare({});
        contract(*part).conclude(contract(*part).enqueue());
      }
      CHECK(same_bits(pair.plain, pair.paged));
    }
  }
}

}  // namespace pacer::testing
