// Paging with state_bits(8): codes travel, scales stay on the device. The bits are a plain optimizer's.
#include "support/catch.h"

#include <cmath>

#include "support/checkpoints/archives.h"
#include "support/kernels/lamb.h"
#include "support/optimizers/contract.h"
#include "support/optimizers/paged_pair.h"

namespace pacer::testing {
namespace {

template <class Optimizer>
OptionsOf<Optimizer> coded_options(bool check = false) {
  return OptionsOf<Optimizer>(0.01).weight_decay(0.1).finite_check(check).seed(3).state_bits(8);
}

// Options that hold from the next step on, for both.
template <class Pair, class Change>
void change_both(Pair& pair, const Change& change) {
  change(options_of(pair.one));
  change(options_of(pair.other.base()));
}

}  // namespace

TEMPLATE_TEST_CASE("a paged step in 8 bits has the bits of a plain one, in every mode", "[paging][adam8]",
                   FusedAdam, FusedAdamW, FusedLamb) {
  unsigned seed = 0;
  for (const Mode& mode : all_modes()) {
    if (mode.dtype == at::kDouble) continue;
    for (const int64_t resident : {int64_t{0}, int64_t{25'000}, kEverything}) {
      const bool check = resident != 25'000;
      CAPTURE(mode.name, resident, check);
      torch::manual_seed(4);
      PagedPair<TestType> pair(odd_parameters(mode.dtype), with_mode(coded_options<TestType>(check), mode),
                               paging_of(resident), ++seed);
      for (int step = 0; step < 9; ++step) {
        pair.set_gradients();
        if (step % 4 == 1) pair.clear_gradient(static_cast<size_t>(step) % pair.plain.size());
        if (check && step % 6 == 4) {
          for (auto* list : {&pair.plain, &pair.paged}) (*list)[3].grad()[1000].fill_(HUGE_VAL);
        }
        contract(pair.other).expect_step();
        pair.step();
        if (step % 5 == 4) CHECK(pair.differs() == "");
      }
      CHECK(pair.differs() == "");
      CHECK(pair.other.skipped_steps() == (check ? 1 : 0));
      const auto& state = state_of(pair.other.base(), pair.paged[3]);
      CHECK(state.exp_avg().scalar_type() == at::kChar);
      if constexpr (std::is_same_v<TestType, FusedLamb>) {
        CHECK(pair.one.trust_ratio(pair.plain[3]) == pair.other.trust_ratio(pair.paged[3]));
      }
    }
  }
}

TEST_CASE("codes are a quarter of the bytes that travel, and corrections one more", "[paging][adam8]") {
  torch::manual_seed(5);
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    const auto options = coded_options<FusedAdamW>().master_weights(
        dtype == at::kFloat ? MasterWeights::automatic : MasterWeights::remainder_8);
    const int64_t bytes = dtype == at::kFloat ? 2 : 3;
    PagedPair<FusedAdamW> none(random_parameters({{30, 40}, {2000}, {3}}, dtype), options, paging_of());
    none.train(3);
    CHECK(none.other.device->copied_bytes == 3 * 2 * bytes * (1200 + 2000 + 3));
    PagedPair<FusedAdamW> all(random_parameters({{30, 40}, {2000}, {3}}, dtype), options,
                              paging_of(kEverything));
    all.train(3);
    CHECK(all.other.device->copied_bytes == bytes * 3203);
    CHECK(none.differs() == "");
    CHECK(all.differs() == "");
  }
}

TEMPLATE_TEST_CASE("moments change between 8 and 32 bits while they are paged", "[paging][adam8]", FusedAdamW,
                   FusedLamb) {
  for (const int64_t resident : {int64_t{0}, int64_t{8'000}}) {
    torch::manual_seed(6);
    PagedPair<TestType> pair(random_parameters({{50, 31}, {700}, {3000}, {20}}, at::kBFloat16),
                             coded_options<TestType>(), paging_of(resident), 2);
    pair.train(3);
    for (const int64_t bits : {32, 8, 32, 8}) {
      change_both(pair, [bits](auto& options) { options.state_bits(bits); });
      contract(pair.other).expect_step();  // what is under way must not be lost
      pair.train(2);
      CHECK(pair.differs() == "");
    }
    // Another list, and a parameter in another memory order.
    const auto more = random_parameters({{900}, {33, 3}}, at::kBFloat16), same = moved_to(more, at::kCPU);
    pair.one.add_param_group(torch::optim::OptimizerParamGroup(more));
    pair.other.add_param_group(torch::optim::OptimizerParamGroup(same));
    pair.plain.insert(pair.plain.end(), more.begin(), more.end());
    pair.paged.insert(pair.paged.end(), same.begin(), same.end());
    pair.train(2);
    CHECK(pair.differs() == "");
    for (auto* list : {&pair.plain, &pair.paged}) {
      (*list)[0].set_data((*list)[0].detach().t().contiguous().t());
    }
    pair.train(2);
    CHECK(pair.differs() == "");
  }
}

TEMPLATE_TEST_CASE("archives and named state in 8 bits pass between paged and plain optimizers",
                   "[paging][adam8]", FusedAdamW, FusedLamb) {
  for (const int64_t bits : {8, 32}) {
    CAPTURE(bits);
    torch::manual_seed(7);
    const auto options = coded_options<TestType>();
    PagedPair<TestType> first(odd_parameters(at::kBFloat16), options, paging_of(20'000), 3);
    first.train(3);
    auto wanted = options;
    wanted.state_bits(bits);
    PagedPair<TestType> by_name(clones(first.plain), wanted, paging_of(20'000), 5);
    by_name.train(1);
    for (size_t i = 0; i < first.plain.size(); ++i) {
      by_name.plain[i].data().copy_(first.plain[i]);
      by_name.paged[i].data().copy_(first.plain[i]);
    }
    by_name.other.import_state(first.one.export_state());
    by_name.one.import_state(first.other.export_state());
    by_name.train(3);
    CHECK(by_name.differs() == "");
    PagedPair<TestType> by_archive(clones(by_name.plain), wanted, paging_of(20'000), 6);
    load_from(by_archive.other.base(), saved(by_name.one));
    load_from(by_archive.one, saved(by_name.other.base()));
    by_archive.train(3);
    CHECK(by_archive.differs() == "");
    const auto& state = state_of(by_archive.one, by_archive.plain[3]);
    CHECK(state.exp_avg().scalar_type() == (bits == 8 ? at::kChar : at::kFloat));
  }
}

TEST_CASE("resident codes move out under memory pressure, and the bits stay", "[paging][adam8]") {
  for (unsigned seed = 0; seed < 6; ++seed) {
    CAPTURE(seed);
    torch::manual_seed(8);
    constexpr int64_t kHeadroom = 100'000;
    PagedPair<FusedAdamW> pair(random_parameters({{40, 50}, {700}, {3000}, {20}}, at::kFloat),
                               coded_options<FusedAdamW>(),
                               paging_of(kEverything).on_pressure(true).headroom(kHeadroom), seed);
    pair.train(2);
    LatePageDevice& device = *pair.other.device;
    device.set_free_bytes(kHeadroom - 5'000);
    device.press();
    CHECK(pair.other.resident_state_bytes() < 2 * 5720);
    pair.train(2);
    CHECK(pair.differs() == "");
  }
}

}  // namespace pacer::testing
