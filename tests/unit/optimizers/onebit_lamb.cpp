// What only OneBitLamb has in its warm-up: coefficients.
#include <pacer/kernels/math/onebit_lamb.h>

#include "support/catch.h"

#include "support/kernels/lamb.h"
#include "support/optimizers/onebit_lamb_ranks.h"
#include "support/optimizers/onebit_peers.h"

namespace pacer::testing::onebit_lamb {

TEST_CASE("coefficients are the means of FusedLamb's trust ratios in warm-up, and stay as they are",
          "[onebit_lamb]") {
  for (const int world_size : {1, 3}) {
    for (const bool bias_correction : {true, false}) {
      CAPTURE(world_size, bias_correction);
      auto options = OneBitLambOptions(0.01).weight_decay(0.1).bias_correction(bias_correction);
      options.freeze_step(5).compress_alone(true);
      const auto other = OneBitLambOptions(options).lr(3e-3).weight_decay(0).max_coeff(0.3).coeff_beta(0.7);
      const std::vector<OneBitLambGroup> groups = {{{{37, 13}, {0, 3}, {1}}, options},
                                                   {{{129}, {4097}}, other},
                                                   {{{20}}, OneBitLambOptions(options).adapt(false)}};
      OneBitLambRanks ranks(world_size, groups);
      const auto twins = clones(ranks.parameters[0]);
      const auto peer = peer_of<OneBitLamb>(groups, twins);
      std::vector<double> average(twins.size(), 0.0), weight(twins.size(), 0.0);
      for (const Tensor& p : ranks.parameters[0]) CHECK(ranks.optimizers[0]->coefficient(p) == 1);
      for (int64_t t = 1; t <= 6; ++t) {
        const auto gradients = ranks.gradients(t);
        REQUIRE(ranks.step(gradients) == "");
        step_with_mean(*peer, twins, gradients);
        for (size_t i = 0; i < twins.size() && t <= 5; ++i) {
          if (twins[i].numel() == 0 || i == 5) continue;  // no norms, no adaptation
          const double cb = i >= 3 ? 0.7 : 0.9;
          average[i] = cb * average[i] + (1 - cb) * peer->trust_ratio(twins[i]);
          weight[i] = cb * weight[i] + (1 - cb);
        }
        for (size_t rank = 0; rank < ranks.size(); ++rank) {
          const OneBitLamb& optimizer = *ranks.optimizers[rank];
          for (size_t i = 0; i < twins.size(); ++i) {
            CAPTURE(t, rank, i);
            const Tensor& p = ranks.parameters[rank][i];
            const double expected = weight[i] > 0 ? average[i] / weight[i] : 1;
            REQUIRE(optimizer.coefficient(p) == Catch::Approx(expected).epsilon(1e-14));
            if (t <= 5) REQUIRE(optimizer.factor(p) == 1);
            if (t < 5) REQUIRE(optimizer.momentum_scale(p) == 1);
          }
        }
      }
    }
  }
}

TEST_CASE("bounds of the factor differ where one of the three does", "[onebit_lamb]") {
  const kernels::LambFactorBounds bounds{0.5, 4, 0.1};
  CHECK((bounds == kernels::LambFactorBounds{0.5, 4, 0.1}));
  CHECK_FALSE((bounds == kernels::LambFactorBounds{0.4, 4, 0.1}));
  CHECK_FALSE((bounds == kernels::LambFactorBounds{0.5, 3, 0.1}));
  CHECK_FALSE((bounds == kernels::LambFactorBounds{0.5, 4, 0.2}));
}

}  // namespace pacer::testing::onebit_lamb
