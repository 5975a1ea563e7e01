// linear_cross_entropy on a GPU beside torch's cross entropy in fp64, without waiting, and in how much memory.
#include "support/catch.h"

#include <cmath>

#include <c10/cuda/CUDACachingAllocator.h>

#include "support/both_devices.h"
#include "support/modules/loss_passes.h"
#include "support/modules/split_head.h"
#include "support/no_waiting.h"

namespace pacer::testing {
namespace {

using modules::linear_cross_entropy;

// Bytes that the pass takes at its peak, beside what is there before it.
int64_t peak_of(const LossCase& of) {
  const auto allocated = [] {
    constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    return c10::cuda::CUDACachingAllocator::getDeviceStats(0).allocated_bytes[kAll];
  };
  const int64_t before = allocated().current;
  c10::cuda::CUDACachingAllocator::resetPeakStats(0);
  (void)fused_loss_pass(of);
  return allocated().peak - before;
}

}  // namespace

TEST_CASE("a loss without logits on a GPU is torch's", "[modules][loss][gpu]") {
  PACER_NEEDS_GPU();
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    // Rows that begin at multiples of 16 bytes and not, shorter and longer than what a block reads at once.
    for (const int64_t columns : {41, 64, 5000, 5001}) {
      for (LinearCrossEntropyOptions options :
           {LinearCrossEntropyOptions(),
            LinearCrossEntropyOptions().label_smoothing(0.1).z_loss(1e-3).chunk_bytes(7 * columns * 4)}) {
        const LossCase on_gpu = loss_case(30, columns, 16, options).to(at::kCUDA, dtype);
        const LossPass exact = plain_pass(on_gpu.to(at::kCPU, at::kDouble), at::kDouble);
        CAPTURE(dtype, columns, options.label_smoothing());
        const double error = loss_error(fused_loss_pass(on_gpu), exact);
        if (dtype == at::kFloat) {
          CHECK(error < 4e-6);  // exponentials to 2^-21
        } else {
          CHECK(error < 1.2 * loss_error(plain_pass(on_gpu), exact));
        }
      }
    }
  }
}

TEST_CASE("weights of rows, a soft cap and 8-bit floats on a GPU", "[modules][loss][fp8][gpu]") {
  PACER_NEEDS_GPU();
  for (const int64_t columns : {48, 5008}) {
    for (const bool fp8 : {false, true}) {
      LossCase of = loss_case(60, columns, 32).to(at::kCPU, at::kBFloat16);
      of.options.soft_cap(5).label_smoothing(0.1).z_loss(1e-3).chunk_bytes(7 * columns * 2).fp8(fp8);
      of.row_weights = torch::rand({3, 20});
      CAPTURE(columns, fp8);
      // Both round the same numbers to 8 bits; products are added in another order, and logits rounded to bf16.
      CHECK(loss_error(fused_loss_pass(of.to(at::kCUDA, at::kBFloat16)), fused_loss_pass(of)) < 2e-2);
      const LossPass exact = plain_pass(of.to(at::kCPU, at::kDouble), at::kDouble);
      CHECK(loss_error(fused_loss_pass(of.to(at::kCUDA, at::kBFloat16)), exact) < (fp8 ? 0.1 : 0.01));
    }
  }
}

// All ranks have the one GPU.
TEST_CASE("a head in parts on a GPU has the loss of a whole one", "[modules][loss][split_head][gpu]") {
  PACER_NEEDS_GPU();
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    for (const int64_t columns : {41, 5000}) {
      for (const bool fp8 : {false, true}) {
        if (fp8 && (dtype == at::kFloat || columns == 41)) continue;
        // Rows that begin at multiples of 16 bytes and not, and a rank that has none.
        for (const auto& bounds : std::vector<std::vector<int64_t>>{
                 {0, 16, columns}, {0, fp8 ? 32 : 23, fp8 ? 64 : 24, columns}, {0, columns, columns}}) {
          if (fp8 && bounds[1] == columns) continue;
          const int64_t all = fp8 ? columns - columns % 16 : columns;
          std::vector<int64_t> of_ranks = bounds;
          for (int64_t& bound : of_ranks) bound = std::min(bound, all);
          CAPTURE(dtype, of_ranks, fp8);
          LossCase of = loss_case(60, all, 32).to(at::kCUDA, dtype);
          of.options.label_smoothing(0.1).z_loss(1e-3).soft_cap(5).chunk_bytes(7 * all * 4).fp8(fp8);
          const auto ranks = static_cast<size_t>(bounds.size() - 1);
          const SplitPasses found =
              split_passes(std::vector<LossCase>(ranks, of), of_ranks, std::vector<double>(ranks, 1));
          REQUIRE(first_of(found.messages) == "");
          LossPass exact = plain_pass(of.to(at::kCPU, at::kDouble), at::kDouble);
          std::vector<torch::Tensor> of_weight;
          for (const LossPass& pass : found.passes) of_weight.push_back(pass.weight);
          const LossPass joined{found.passes[0].loss, found.passes[0].hidden,
                                torch::cat(of_weight) / static_cast<double>(ranks)};
          CHECK(loss_error(joined, exact) < (fp8 ? 0.1 : dtype == at::kFloat ? 4e-6 : 0.012));
        }
      }
    }
  }
}

TEST_CASE("nobody waits for a loss without logits, and a target that is none makes it NaN",
          "[modules][loss][gpu]") {
  PACER_NEEDS_GPU();
  const LossCase of = loss_case().to(at::kCUDA, at::kBFloat16);
  LossCase in_8_bits = loss_case(30, 48).to(at::kCUDA, at::kBFloat16);
  in_8_bits.options.fp8(true);
  in_8_bits.row_weights = torch::ones({3, 10}, at::kCUDA);
  (void)fused_loss_pass(of), (void)fused_loss_pass(in_8_bits);  // what libraries set up
  const torch::Tensor wrong = of.targets + 1000;
  torch::Tensor of_wrong;
  {
    const NoWaiting no_waiting;
    (void)fused_loss_pass(of);
    of_wrong = linear_cross_entropy(of.hidden, of.weight, wrong);
    (void)fused_loss_pass(in_8_bits);
  }
  CHECK(std::isnan(of_wrong.item<double>()));
}

TEST_CASE("a loss without logits takes a chunk of them, and the gradient of the weight",
          "[modules][loss][gpu]") {
  PACER_NEEDS_GPU();
  constexpr int64_t kRows = 3 * 2048, kColumns = 32768, kIn = 64;
  LossCase of = loss_case(kRows, kColumns, kIn).to(at::kCUDA, at::kBFloat16);
  of.options.chunk_bytes(int64_t{16} << 20);
  (void)fused_loss_pass(of);
  // Whole logits are 403 MB in bf16, and torch takes three times twice that.
  const int64_t weight_bytes = kColumns * kIn * (2 + 2 + 4 + 2), hidden_bytes = kRows * kIn * 2 * 4;
  CHECK(peak_of(of) < (int64_t{17} << 20) + 2 * weight_bytes + 2 * hidden_bytes);
}

}  // namespace pacer::testing
