// Paged optimizers on an NVIDIA GPU against plain ones there, to the bit: copies, events, streams, pinned
// memory and the callback of LibTorch's allocator, which a simulated device cannot show.
#include "support/catch.h"

#include <cstdlib>

#include <ATen/cuda/CUDAEvent.h>
#include <ATen/cuda/CUDAGraph.h>
#include <ATen/cuda/Sleep.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/cuda.h>

#include <pacer/hooks/cuda_graph.h>
#include <pacer/hooks/gradient_clipping.h>
#include <pacer/session/session.h>

#include "support/both_devices.h"
#include "support/checkpoints/archives.h"
#include "support/kernels/lamb.h"
#include "support/no_waiting.h"
#include "support/optimizers/contract.h"
#include "support/session/small_model.h"

namespace pacer::testing {
namespace {

constexpr int64_t kSomeCycles = 20'000'000;   // clock cycles, about 10 ms
constexpr int64_t kManyCycles = 500'000'000;  // more than 0.2 s
constexpr int64_t kEverything = int64_t{1} << 30;

Paging paging_of(int64_t resident = 0) { return Paging().page_bytes(65536).resident_bytes(resident); }

// A plain optimizer and a paged one on the GPU, over the same parameters.
template <class Optimizer>
struct PagedPair {
  std::vector<Tensor> plain, paged;
  Optimizer one, other;

  PagedPair(const std::vector<Tensor>& parameters, const OptionsOf<Optimizer>& options, const Paging& paging)
      : plain(moved_to(parameters)),
        paged(moved_to(parameters)),
        one(plain, options),
        other(paged, OptionsOf<Optimizer>(options).paged(paging)) {}

  void set_gradients() { set_random_gradients(plain, paged); }
  void clear_gradient(size_t i) { plain[i].mutable_grad() = paged[i].mutable_grad() = Tensor(); }
  void step() {
    one.step();
    other.step();
  }
  void train(int steps) {
    for (int i = 0; i < steps; ++i) {
      set_gradients();
      step();
    }
  }
  std::string differs() {
    other.sync_state();
    return difference(snapshot(one), snapshot(other));
  }
};

template <class Optimizer>
OptionsOf<Optimizer> decaying_options(bool check) {
  return OptionsOf<Optimizer>(0.01).weight_decay(0.1).finite_check(check).seed(3);
}

}  // namespace

TEMPLATE_TEST_CASE("a paged step on a GPU has the bits of a plain one, in every mode", "[gpu][paging]",
                   FusedAdam, FusedAdamW, FusedLamb) {
  PACER_NEEDS_GPU();
  for (const Mode& mode : all_modes()) {
    for (const int64_t resident : {int64_t{0}, int64_t{400'000}, kEverything}) {
      for (const int form : {0, 1, 2, 3}) {
        const bool check = form % 2 == 1;
        const int64_t bits = form < 2 ? 32 : 8;
        if (bits == 8 && mode.dtype == at::kDouble) continue;
        CAPTURE(mode.name, resident, check, bits);
        torch::manual_seed(91);
        auto options = with_mode(decaying_options<TestType>(check), mode).state_bits(bits);
        if constexpr (!std::is_same_v<TestType, FusedLamb>) options.amsgrad(check && bits == 32);
        PagedPair<TestType> pair(odd_parameters(mode.dtype), options, paging_of(resident));
        for (int step = 0; step < 10; ++step) {
          pair.set_gradients();
          if (step % 4 == 1) pair.clear_gradient(static_cast<size_t>(step) % pair.plain.size());
          if (step % 5 == 2) {
            for (size_t i = 0; i < pair.plain.size(); i += 2) pair.clear_gradient(i);
          }
          if (step == 7) {  // zeros decay moments and weights all the same
            for (auto* list : {&pair.plain, &pair.paged}) {
              for (Tensor& parameter : *list) {
                if (parameter.grad().defined()) parameter.mutable_grad().zero_();
              }
            }
          }
          if (check && step == 4) {
            pair.plain[3].grad()[1000].fill_(HUGE_VAL);
            pair.paged[3].grad()[1000].fill_(HUGE_VAL);
          }
          if (step % 3 == 0) contract(pair.other).expect_step();
          pair.step();
        }
        CHECK(pair.differs() == "");
        CHECK(pair.other.skipped_steps() == (check ? 1 : 0));
        CHECK(state_of(pair.other, pair.paged[3]).exp_avg().is_cpu());
        CHECK((pair.other.resident_state_bytes() > 0) == (resident > 0));
        if constexpr (std::is_same_v<TestType, FusedLamb>) {
          for (size_t i = 0; i < pair.plain.size(); ++i) {
            CHECK(pair.one.trust_ratio(pair.plain[i]) == pair.other.trust_ratio(pair.paged[i]));
          }
        }
      }
    }
  }
}

TEST_CASE("200 paged steps, with a save and load in the middle both ways, keep the bits", "[gpu][paging]") {
  PACER_NEEDS_GPU();
  torch::manual_seed(92);
  const auto options = FusedAdamWOptions(0.01).weight_decay(0.1);
  const std::vector<std::vector<int64_t>> shapes = {{300, 400}, {70'001}, {5}, {0}, {1000, 33}};
  PagedPair<FusedAdamW> pair(random_parameters(shapes, at::kFloat), options, paging_of(300'000));
  pair.train(100);
  // Crosswise, by archive and by name.
  std::vector<Tensor> a = moved_to(pair.plain), b = moved_to(pair.plain), c = moved_to(pair.plain);
  FusedAdamW from_paged(a, options), by_archive(b, FusedAdamWOptions(options).paged(paging_of()));
  FusedAdamW by_name(c, FusedAdamWOptions(options).paged(paging_of(400'000)));
  load_from(from_paged, saved(pair.other));
  load_from(by_archive, saved(pair.one));
  by_name.import_state(pair.one.export_state());
  pair.one.import_state(pair.other.export_state());
  for (int step = 0; step < 100; ++step) {
    pair.set_gradients();
    for (size_t i = 0; i < a.size(); ++i) {
      a[i].mutable_grad() = b[i].mutable_grad() = c[i].mutable_grad() = pair.plain[i].grad();
    }
    pair.step();
    for (FusedAdamW* optimizer : {&from_paged, &by_archive, &by_name}) optimizer->step();
  }
  CHECK(pair.differs() == "");
  const auto reference = snapshot(pair.one);
  for (FusedAdamW* optimizer : {&from_paged, &by_archive, &by_name}) {
    optimizer->sync_state();
    CHECK(difference(reference, snapshot(*optimizer)) == "");
  }
}

TEST_CASE("pages of the usual size, many of them, keep the bits", "[gpu][paging]") {
  PACER_NEEDS_GPU();
  torch::manual_seed(93);
  std::vector<Tensor> parameters;
  const auto on_gpu = at::TensorOptions(at::kFloat).device(at::kCUDA);
  for (const int64_t count : {30'000'000, 4097, 9'000'000})
    parameters.push_back(torch::randn({count}, on_gpu));
  for (Tensor& parameter : parameters) parameter.requires_grad_();
  const auto twins = moved_to(parameters);
  FusedAdamW plain(parameters, FusedAdamWOptions(0.01));
  FusedAdamW paged(twins, FusedAdamWOptions(0.01).paged(Paging()));
  for (int step = 0; step < 4; ++step) {
    for (size_t i = 0; i < twins.size(); ++i) {
      parameters[i].mutable_grad() = twins[i].mutable_grad() = torch::randn_like(parameters[i]);
    }
    plain.step();
    paged.step();
  }
  paged.sync_state();
  for (size_t i = 0; i < twins.size(); ++i) {
    CHECK(parameters[i].equal(twins[i]));
    CHECK(same_bits(state_of(plain, parameters[i]).exp_avg(), state_of(paged, twins[i]).exp_avg()));
    CHECK(same_bits(state_of(plain, parameters[i]).exp_avg_sq(), state_of(paged, twins[i]).exp_avg_sq()));
  }
}

TEST_CASE("a paged step is enqueued on the current stream", "[gpu][paging]") {
  PACER_NEEDS_GPU();
  for (const int64_t resident : {int64_t{0}, int64_t{300'000}}) {
    torch::manual_seed(94);
    PagedPair<FusedAdamW> pair(odd_parameters(at::kFloat), FusedAdamWOptions(0.01), paging_of(resident));
    pair.train(2);
    for (int step = 0; step < 4; ++step) {
      pair.set_gradients();
      std::vector<Tensor> late;
      for (Tensor& p : pair.paged) {
        late.push_back(p.grad());
        p.mutable_grad() = torch::zeros_like(p.grad());
      }
      torch::cuda::synchronize();
      const auto stream = c10::cuda::getStreamFromPool();
      {
        const c10::cuda::CUDAStreamGuard guard(stream);
        at::cuda::CUDAEvent slept;
        // The gradients arrive late on this stream: any other would read zeros.
        at::cuda::sleep(kSomeCycles);
        for (size_t i = 0; i < late.size(); ++i) pair.paged[i].grad().copy_(late[i]);
        if (step % 2 == 0) contract(pair.other).expect_step();
        pair.other.step();
        pair.other.sync_state();  // waits for the updates on that stream, too
      }
      pair.one.step();
      CHECK(pair.differs() == "");
    }
  }
}

TEST_CASE("a paged step returns before the device begins it", "[gpu][paging]") {
  PACER_NEEDS_GPU();
  torch::manual_seed(98);
  PagedPair<FusedLamb> pair(random_parameters({{1000}, {640, 64}, {0}, {7}}, at::kBFloat16),
                            FusedLambOptions(0.01).finite_check(true), paging_of(20'000));
  pair.train(2);
  std::vector<std::vector<Tensor>> gradients(5);
  for (auto& of_step : gradients) {
    pair.set_gradients();
    for (const Tensor& parameter : pair.paged) of_step.push_back(parameter.grad().clone());
  }
  const auto use = [&](const std::vector<Tensor>& parameters, const std::vector<Tensor>& of_step) {
    for (size_t i = 0; i < parameters.size(); ++i) parameters[i].mutable_grad() = of_step[i];
  };
  torch::cuda::synchronize();
  at::cuda::CUDAEvent slept;
  at::cuda::sleep(kManyCycles);
  slept.record();
  {
    const NoWaiting no_waiting;
    for (const auto& of_step : gradients) {
      use(pair.paged, of_step);
      contract(pair.other).expect_step();
      pair.other.step();
    }
  }
  if (std::getenv("PACER_TEST_SMALL") == nullptr) CHECK_FALSE(slept.query());
  for (const auto& of_step : gradients) {
    use(pair.plain, of_step);
    pair.one.step();
  }
  CHECK(pair.differs() == "");
}

TEST_CASE("a group added and a parameter that begins late are paged, too, on a GPU", "[gpu][paging]") {
  PACER_NEEDS_GPU();
  torch::manual_seed(95);
  PagedPair<FusedAdamW> pair(random_parameters({{400, 50}, {700}, {30'000}}, at::kBFloat16),
                             FusedAdamWOptions(0.01), paging_of(50'000));
  pair.set_gradients();
  pair.clear_gradient(2);
  pair.step();
  pair.train(2);
  contract(pair.other).expect_step();
  const auto more = moved_to(random_parameters({{9000}, {33, 3}}, at::kFloat)), same = moved_to(more);
  pair.one.add_param_group(torch::optim::OptimizerParamGroup(more));
  pair.other.add_param_group(torch::optim::OptimizerParamGroup(same));
  pair.plain.insert(pair.plain.end(), more.begin(), more.end());
  pair.paged.insert(pair.paged.end(), same.begin(), same.end());
  pair.train(3);
  CHECK(pair.differs() == "");
}

TEST_CASE("memory pressure moves resident state to the host, and gives the GPU its memory back",
          "[gpu][paging]") {
  PACER_NEEDS_GPU();
  torch::manual_seed(96);
  c10::cuda::CUDACachingAllocator::emptyCache();
  const auto free_bytes = [] {
    size_t free = 0, total = 0;
    C10_CUDA_CHECK(cudaMemGetInfo(&free, &total));
    return static_cast<int64_t>(free);
  };
  constexpr int64_t kState = 3'000'000 * 8;
  const int64_t before = free_bytes(), block = int64_t{1} << 30;
  const auto paging = paging_of(kEverything).on_pressure(true).headroom(before - block);
  PagedPair<FusedAdamW> pair(random_parameters({{1'000'000}, {2000, 1000}}, at::kFloat),
                             FusedAdamWOptions(0.01), paging);
  pair.train(3);
  pair.set_gradients();
  const int64_t resident = pair.other.resident_state_bytes();
  REQUIRE(resident >= kState);
  const auto bytes = at::TensorOptions(at::kByte).device(at::kCUDA);
  const Tensor first = torch::empty({2 * block}, bytes);  // more than the headroom leaves
  CHECK(pair.other.resident_state_bytes() == resident);   // at the time there was room
  const int64_t between = free_bytes();
  const Tensor second = torch::empty({block}, bytes);
  CHECK(pair.other.resident_state_bytes() == 0);
  CHECK(free_bytes() > between - block);
  pair.step();
  CHECK(pair.differs() == "");
  pair.train(3);
  CHECK(pair.differs() == "");
  CHECK(pair.other.resident_state_bytes() == 0);
}

TEST_CASE("a Session trains, clips, skips and resumes with paged state on a GPU", "[gpu][paging]") {
  PACER_NEEDS_GPU();
  torch::manual_seed(97);
  auto model = small_model(), twin = small_model();
  model->to(at::kCUDA);
  twin->to(at::kCUDA);
  FusedAdamW paged(model->parameters(), FusedAdamWOptions(0.01).paged(Paging().page_bytes(4096))),
      plain(twin->parameters(), FusedAdamWOptions(0.01));
  Session session(*model, paged), peer(*twin, plain);
  session.use(GradientClipping(0.05));
  peer.use(GradientClipping(0.05));
  for (int64_t i = 0; i < 20; ++i) {
    const auto batch = small_batch(i);
    const double factor = i == 7 ? HUGE_VAL : 1.0;
    for (auto [one, of] : {std::pair(&session, &model), std::pair(&peer, &twin)}) {
      auto [x, y] = one->begin(batch.first.to(at::kCUDA), batch.second.to(at::kCUDA));
      one->backward((*of)->loss(x, y) * factor);
      one->step();
    }
  }
  CHECK(session.skipped_steps() == 1);
  CHECK(peer.skipped_steps() == 1);
  paged.sync_state();
  CHECK(difference(snapshot(plain), snapshot(paged)) == "");
}

TEST_CASE("a CUDA graph of paged steps is refused, by the hook and under a capture", "[gpu][paging]") {
  PACER_NEEDS_GPU();
  auto model = small_model();
  model->to(at::kCUDA);
  FusedAdamW paged(model->parameters(), FusedAdamWOptions(0.01).paged(Paging()));
  Session session(*model, paged);
  session.use(CudaGraph());
  const auto batch = small_batch(0);
  auto [x, y] = session.begin(batch.first.to(at::kCUDA), batch.second.to(at::kCUDA));
  session.backward(model->loss(x, y));
  CHECK(contains(refusal([&] { session.step(); }), "leave out the CudaGraph hook, or paged()"));

  PagedPair<FusedAdamW> pair(random_parameters({{300}}, at::kFloat), FusedAdamWOptions(0.01), Paging());
  pair.train(2);
  at::cuda::CUDAGraph graph;
  {
    const c10::cuda::CUDAStreamGuard stream_guard(c10::cuda::getStreamFromPool());
    graph.capture_begin();
    CHECK(contains(refusal([&] { pair.other.step(); }), "cannot replay"));
    graph.capture_end();
  }
  pair.train(1);
  CHECK(pair.differs() == "");
}

}  // namespace pacer::testing
