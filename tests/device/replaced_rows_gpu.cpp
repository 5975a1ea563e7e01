// Parameters that grow and shrink on a GPU: the bits of the CPU, in state that is paged, too.
#include "support/catch.h"

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <pacer/optimizers/fused_adam.h>

#include "support/both_devices.h"
#include "support/message_of.h"
#include "support/no_waiting.h"

namespace pacer::testing::replaced_rows_gpu {
namespace {

constexpr int64_t kRows = 300, kColumns = 32;

// A table of rows, and what replaces it: every third row is gone, and 40 are new.
struct Table {
  Table(at::Device device, at::ScalarType dtype, const FusedAdamWOptions& options)
      : values(initial(dtype).to(device).requires_grad_()), optimizer({values}, options) {}
  static Tensor initial(at::ScalarType dtype) {
    torch::manual_seed(1);
    return torch::randn({kRows, kColumns}).to(dtype);
  }
  void step(int number) {
    torch::manual_seed(10 + static_cast<uint64_t>(number));
    values.mutable_grad() = torch::randn(values.sizes()).to(values.options().requires_grad(false));
    optimizer.step();
  }
  void select() {
    std::vector<int64_t> rows(40, -1);
    for (int64_t row = 0; row < values.size(0); ++row) {
      if (row % 3 != 0) rows.push_back(row);
    }
    const Tensor places = torch::tensor(rows, torch::kLong).to(values.device());
    Tensor now = values.detach().index_select(0, places.clamp_min(0));
    now.narrow(0, 0, 40).fill_(0.5);
    now.requires_grad_();
    optimizer.replace({{values, now}}, places);
    values = now;
  }
  // More rows behind the others.
  void append(int64_t count) {
    const Tensor more = torch::full({count, kColumns}, 0.25, values.options().requires_grad(false));
    values = optimizer.append_rows({{values, more}}).front();
  }
  Tensor values;
  FusedAdamW optimizer;
};

}  // namespace

TEST_CASE("a parameter that grows on a GPU has the bits of the CPU", "[rows][gpu]") {
  PACER_NEEDS_GPU();
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    for (const int64_t bits : {32, 8}) {
      for (const bool is_paged : {false, true}) {
        if (bits == 8 && is_paged) continue;  // refused
        CAPTURE(dtype, bits, is_paged);
        const auto options = FusedAdamWOptions(0.01).weight_decay(0.1).finite_check(true).state_bits(bits);
        Table cpu(at::kCPU, dtype, options);
        Table gpu(at::kCUDA, dtype, is_paged ? FusedAdamWOptions(options).paged(Paging()) : options);
        for (int number = 0; number < 9; ++number) {
          if (number % 3 == 2) cpu.select(), gpu.select();
          cpu.step(number), gpu.step(number);
        }
        CHECK(same_bits(gpu.values, cpu.values));
      }
    }
  }
}

TEST_CASE("rows that are appended on a GPU have the bits of the CPU, and nothing waits", "[rows][gpu]") {
  PACER_NEEDS_GPU();
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    for (const int64_t bits : {32, 8}) {
      CAPTURE(dtype, bits);
      const auto options = FusedAdamWOptions(0.01).weight_decay(0.1).state_bits(bits);
      Table cpu(at::kCPU, dtype, options), gpu(at::kCUDA, dtype, options);
      const void* at_first = gpu.values.const_data_ptr();
      for (int number = 0; number < 12; ++number) {
        if (number % 3 == 2) {  // once beyond the room, then within it
          cpu.append(40);
          std::optional<NoWaiting> no_waiting;
          if (bits == 32) no_waiting.emplace();
          gpu.append(40);
        }
        if (number == 2) at_first = gpu.values.const_data_ptr();
        cpu.step(number), gpu.step(number);
      }
      CHECK(gpu.values.size(0) == kRows + 160);
      CHECK(gpu.values.const_data_ptr() == at_first);
      CHECK(same_bits(gpu.values, cpu.values));
    }
  }
}

TEST_CASE("rows that a table on a GPU does not have are refused before a kernel reads them", "[rows][gpu]") {
  PACER_NEEDS_GPU();
  Table table(at::kCUDA, at::kFloat, FusedAdamWOptions(0.01));
  table.step(0);
  const Tensor now =
      torch::zeros({2, kColumns}, table.values.options().requires_grad(false)).requires_grad_();
  const Tensor places = torch::tensor({0, 300}, torch::kLong).to(at::kCUDA);
  CHECK(message_of([&] {
          table.optimizer.replace({{table.values, now}}, places);
        }).find("which has 300") != std::string::npos);
  table.step(1);
}

}  // namespace pacer::testing::replaced_rows_gpu
