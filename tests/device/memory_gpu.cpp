// Memory of a GPU that runs out in a step of an optimizer, and in a Session, at every allocation.
#include "support/both_devices.h"
#include "support/session/sessions_out_of_memory.h"

namespace pacer::testing {
namespace {
namespace memory_gpu {

const at::Device kDevice(at::kCUDA, 0);

}  // namespace memory_gpu
}  // namespace

TEST_CASE(
    "a step that runs out of GPU memory is not taken, or refuses every further one, at every allocation",
    "[memory][gpu]") {
  PACER_NEEDS_GPU();
  using namespace out_of_memory;
  const Quiet quiet;
  for (const RegisteredOptimizer& entry : optimizers_where(&RegisteredOptimizer::is_own)) {
    const std::vector<NamedTensors> expected = states_of_run(entry, memory_gpu::kDevice);
    for (const size_t before : {0, 1, 2, 3, 4, 5}) {
      if (wants_small_tests() && before % 4 != 0) continue;
      CAPTURE(entry.name, before);
      Outcomes outcomes = try_all_allocations(entry, memory_gpu::kDevice, before, expected);
      if (before == 0) CHECK(outcomes["unchanged"] > 0);
      if (!entry.has_ranks) CHECK(outcomes["refused"] == 0);
    }
  }
}

TEST_CASE("a Session that cannot be made for want of GPU memory leaves nothing behind",
          "[memory][session][gpu]") {
  PACER_NEEDS_GPU();
  out_of_memory::try_making_sessions(memory_gpu::kDevice, 10);
}

TEST_CASE("a Session's step that runs out of GPU memory can be taken again, or has been taken, or refuses",
          "[memory][session][gpu]") {
  PACER_NEEDS_GPU();
  CHECK(out_of_memory::try_session_steps(memory_gpu::kDevice).front()["again"] > 0);
}

TEST_CASE("a save that runs out of GPU memory changes nothing, and the next one is whole",
          "[memory][checkpoint][gpu]") {
  PACER_NEEDS_GPU();
  out_of_memory::try_saves(memory_gpu::kDevice, 1);
}

TEST_CASE("a resume that runs out of GPU memory changes nothing and can be had again",
          "[memory][checkpoint][gpu]") {
  PACER_NEEDS_GPU();
  out_of_memory::try_resumes(memory_gpu::kDevice, 10);
}

}  // namespace pacer::testing
