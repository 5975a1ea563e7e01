// state_bits(8) on an NVIDIA GPU: the bits of the CPU in every dtype set, for any mixture of sizes and memory orders,
// in replays of a captured step, and across saves.
#include "support/catch.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/cuda.h>

#include <pacer/optimizers/muon.h>
#include "support/both_devices.h"

#include "support/checkpoints/archives.h"
#include "support/kernels/lamb.h"

namespace pacer::testing {
namespace {

template <class Run>
void for_every_mode(const Run& run) {
  for (const Mode& mode : all_modes()) {
    if (mode.dtype == at::kDouble) continue;
    CAPTURE(mode.name);
    run(mode);
  }
}

// Random gradients of any size: each element's magnitude is 10 to a power between these.
template <class Both>
void set_spread_gradients(const Both& both, double low, double high) {
  for (size_t i = 0; i < both.cpu.size(); ++i) {
    const Tensor exponent = torch::rand(both.cpu[i].sizes(), at::kDouble) * (high - low) + low;
    const Tensor sign = torch::rand(both.cpu[i].sizes(), at::kDouble).sub(0.5).sign();
    const Tensor gradient = (torch::pow(10.0, exponent) * sign).to(both.cpu[i].scalar_type());
    both.cpu[i].mutable_grad() = gradient.clone();
    both.gpu[i].mutable_grad() = gradient.to(at::kCUDA);
  }
}

}  // namespace

TEMPLATE_TEST_CASE("CPU and GPU agree to the bit with state in 8 bits", "[adam8][gpu]", FusedAdam, FusedAdamW,
                   FusedLamb) {
  PACER_NEEDS_GPU();
  for_every_mode([](const Mode& mode) {
    for (const bool check : {false, true}) {
      CAPTURE(check);
      torch::manual_seed(91);
      const auto options =
          OptionsOf<TestType>(0.01).weight_decay(0.1).finite_check(check).seed(3).state_bits(8);
      BothDevices<TestType> both(odd_parameters(mode.dtype), with_mode(options, mode));
      for (int step = 0; step < 20; ++step) {
        both.set_gradients();
        both.set_lr(0.01 / (1 + step));
        if (step % 4 == 1) both.clear_gradient(static_cast<size_t>(step) % both.cpu.size());
        both.step();
      }
      CHECK(both.differs() == "");
      CHECK(state_of(both.on_gpu, both.gpu[3]).exp_avg_scale().defined());
    }
  });
}

TEMPLATE_TEST_CASE("moments of any size have the same codes on GPU and CPU", "[adam8][gpu]", FusedAdamW,
                   FusedLamb) {
  PACER_NEEDS_GPU();
  for_every_mode([](const Mode& mode) {
    const bool is_half = mode.dtype == at::kHalf;
    for (const auto& [low, high] : {std::pair(-12.0, -7.0), std::pair(-9.0, 1.0), std::pair(2.0, 8.0)}) {
      CAPTURE(low, high);
      torch::manual_seed(92);
      BothDevices<TestType> both(odd_parameters(mode.dtype),
                                 with_mode(OptionsOf<TestType>(0.01).state_bits(8).seed(5), mode));
      for (int step = 0; step < 6; ++step) {
        set_spread_gradients(both, low, is_half ? std::min(high, 4.0) : high);
        both.step();
      }
      CHECK(both.differs() == "");
    }
  });
}

// A warp takes a short way where all of its operands are of ordinary size: here some are just inside of what that is, some
// just outside, denominators have no epsilon, and somebody has written parameters.
TEMPLATE_TEST_CASE("operands that are hardly ordinary have the CPU's bits with state in 8 bits",
                   "[adam8][gpu]", FusedAdam, FusedAdamW) {
  PACER_NEEDS_GPU();
  for_every_mode([](const Mode& mode) {
    const bool is_half = mode.dtype == at::kHalf;
    for (const double epsilon : {1e-8, 0.0, 1e-18}) {
      for (const auto& [low, high] : {std::pair(-20.0, -12.0), std::pair(3.5, 5.5), std::pair(-4.0, -3.0)}) {
        CAPTURE(epsilon, low, high);
        torch::manual_seed(94);
        const auto options = OptionsOf<TestType>(0.01).weight_decay(0.1).eps(epsilon).state_bits(8).seed(7);
        BothDevices<TestType> both(random_parameters({{64, 512}, {300}}, mode.dtype),
                                   with_mode(options, mode));
        for (int step = 0; step < 5; ++step) {
          // fp16 has no smaller numbers, and a gradient of zero has no update without an epsilon.
          set_spread_gradients(both, is_half ? std::max(low, -7.0) : low,
                               is_half ? std::clamp(high, -6.0, 4.5) : high);
          for (const Tensor& all : {both.cpu[0], both.gpu[0]}) {
            const torch::NoGradGuard no_grad;
            if (epsilon > 0) all.grad().slice(0, 0, 64, 7).zero_();
            if (step == 2) all.data()[3].zero_();
            if (step == 3) all.data()[9].fill_(-0.0);
          }
          both.step();
        }
        CHECK(both.differs() == "");
      }
    }
  });
}

TEMPLATE_TEST_CASE("a gradient that is not finite spoils the same groups on GPU and CPU", "[adam8][gpu]",
                   FusedAdamW, FusedLamb) {
  PACER_NEEDS_GPU();
  torch::manual_seed(93);
  BothDevices<TestType> both(random_parameters({{5000}, {70}}, at::kFloat),
                             OptionsOf<TestType>(0.01).state_bits(8));
  for (int step = 0; step < 3; ++step) {
    both.set_gradients();
    for (const double bad : {HUGE_VAL, -HUGE_VAL, std::nan("")}) {
      const int64_t at = 1000 + step * 500;
      both.cpu[0].grad()[at].fill_(bad);
      both.gpu[0].grad()[at].fill_(bad);
    }
    both.step();
  }
  for (size_t i = 0; i < both.cpu.size(); ++i) {
    auto &cpu = state_of(both.on_cpu, both.cpu[i]), &gpu = state_of(both.on_gpu, both.gpu[i]);
    CHECK(same_bits(cpu.exp_avg(), gpu.exp_avg()));
    CHECK(same_bits(cpu.exp_avg_sq(), gpu.exp_avg_sq()));
    CHECK(same_bits(cpu.exp_avg_scale(), gpu.exp_avg_scale()));
    CHECK(same_bits(cpu.exp_avg_sq_scale(), gpu.exp_avg_sq_scale()));
    CHECK(both.cpu[i].isnan().equal(both.gpu[i].isnan().cpu()));
  }
  CHECK(count_true(state_of(both.on_cpu, both.cpu[0]).exp_avg_scale().isnan()) == 3);
}

TEMPLATE_TEST_CASE("a captured step with state in 8 bits replays to the bits of eager steps", "[adam8][gpu]",
                   FusedAdamW, FusedLamb) {
  PACER_NEEDS_GPU();
  for_every_mode([](const Mode& mode) {
    torch::manual_seed(94);
    const auto stream = c10::cuda::getStreamFromPool();
    const c10::cuda::CUDAStreamGuard guard(stream);
    const auto options = OptionsOf<TestType>(0.01).finite_check(true).seed(4).state_bits(8);
    BothDevices<TestType> both(odd_parameters(mode.dtype), with_mode(options, mode));
    both.set_gradients();
    std::vector<Tensor> fixed;
    for (const Tensor& p : both.gpu) fixed.push_back(p.grad());
    const auto copy_gradients = [&] {
      both.set_gradients();
      for (size_t i = 0; i < fixed.size(); ++i) {
        fixed[i].copy_(both.cpu[i].grad());
        both.gpu[i].mutable_grad() = fixed[i];
      }
    };
    both.step();
    copy_gradients();
    both.step();  // with the gradients of the capture
    at::cuda::CUDAGraph graph;
    copy_gradients();
    torch::cuda::synchronize();
    graph.capture_begin();
    both.on_gpu.step();
    graph.capture_end();
    for (int replay = 0; replay < 5; ++replay) {
      if (replay > 0) copy_gradients();
      graph.replay();
      both.on_cpu.step();
    }
    CHECK(both.differs() == "");
  });
}

TEMPLATE_TEST_CASE("state in 8 bits travels between devices and formats", "[adam8][gpu]", FusedAdamW,
                   FusedLamb) {
  PACER_NEEDS_GPU();
  for_every_mode([](const Mode& mode) {
    torch::manual_seed(95);
    const auto options = with_mode(OptionsOf<TestType>(0.01).state_bits(8), mode);
    BothDevices<TestType> both(odd_parameters(mode.dtype), options);
    for (int step = 0; step < 3; ++step) {
      both.set_gradients();
      both.step();
    }
    // From the GPU to the CPU and the other way round.
    const std::string of_cpu = saved(both.on_cpu), of_gpu = saved(both.on_gpu);
    load_from(both.on_cpu, of_gpu);
    load_from(both.on_gpu, of_cpu);
    both.set_gradients();
    both.step();
    CHECK(both.differs() == "");
    for (const int64_t bits : {32, 8}) {
      options_of(both.on_cpu).state_bits(bits);
      options_of(both.on_gpu).state_bits(bits);
      both.set_gradients();
      both.step();
      both.set_gradients();
      both.step();
      CHECK(both.differs() == "");
      CHECK(state_of(both.on_gpu, both.gpu[3]).exp_avg_scale().defined() == (bits == 8));
    }
  });
}

// Trust ratios of tensors of one warp, of one block, of several units, and without elements.
TEST_CASE("LAMB's trust ratios in 8 bits are the CPU's to the bit", "[adam8][fused_lamb][gpu]") {
  PACER_NEEDS_GPU();
  for_every_mode([](const Mode& mode) {
    torch::manual_seed(96);
    const auto options = FusedLambOptions(0.01).weight_decay(0.1).max_coeff(100).seed(6).state_bits(8);
    BothDevices<FusedLamb> both(
        random_parameters({{1}, {0, 4}, {33}, {128}, {129}, {2049}, {32768}, {300, 301}}, mode.dtype),
        with_mode(options, mode));
    for (int step = 0; step < 4; ++step) {
      both.set_gradients();
      if (step == 2) both.clear_gradient(5);
      both.step();
      for (size_t i = 0; i < both.cpu.size(); ++i) {
        CAPTURE(step, i);
        CHECK(both.on_gpu.trust_ratio(both.gpu[i]) == both.on_cpu.trust_ratio(both.cpu[i]));
      }
    }
    CHECK(both.differs() == "");
  });
}

// What the products make of directions has other bits on a GPU, so that both sides are given no products to differ in: a
// rate of zero leaves the momentum alone to be compared.
TEST_CASE("Muon's momentum in 8 bits has the codes of the CPU", "[adam8][muon][gpu]") {
  PACER_NEEDS_GPU();
  for_every_mode([](const Mode& mode) {
    torch::manual_seed(97);
    auto cpu = random_parameters({{1, 5}, {33, 64}, {300, 129}, {3, 700}}, mode.dtype);
    cpu.push_back(torch::randn({300, 129}).to(mode.dtype).t().detach().requires_grad_());
    const auto gpu = moved_to(cpu);
    const auto options = with_mode(MuonOptions(0).weight_decay(0).state_bits(8), mode);
    Muon on_cpu(cpu, options), on_gpu(gpu, options);
    for (int step = 0; step < 8; ++step) {
      set_random_gradients(cpu, gpu);
      if (step == 3) cpu[1].mutable_grad() = gpu[1].mutable_grad() = Tensor();
      on_cpu.step(), on_gpu.step();
    }
    for (size_t i = 0; i < cpu.size(); ++i) {
      CAPTURE(i);
      const auto& a = static_cast<MuonParamState&>(*on_cpu.state().at(cpu[i].unsafeGetTensorImpl()));
      const auto& b = static_cast<MuonParamState&>(*on_gpu.state().at(gpu[i].unsafeGetTensorImpl()));
      CHECK(same_bits(a.exp_avg(), b.exp_avg()));
      CHECK(same_bits(a.exp_avg_scale(), b.exp_avg_scale()));
    }
  });
}

}  // namespace pacer::testing
