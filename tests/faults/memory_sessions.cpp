// Host memory that runs out in a Session.
#include "support/session/sessions_out_of_memory.h"

namespace pacer::testing {

TEST_CASE("a Session that cannot be made for want of memory leaves nothing behind",
          "[faults][memory][session]") {
  out_of_memory::try_making_sessions(at::kCPU, 51);
}

TEST_CASE("a Session's step that runs out of host memory can be taken again, or has been taken, or refuses",
          "[faults][memory][session]") {
  for (auto& outcomes : out_of_memory::try_session_steps(at::kCPU)) {
    for (const char* outcome : {"again", "taken"}) CHECK(outcomes[outcome] > 0);
  }
}

TEST_CASE("a rank that runs out of host memory while it looks for failures has found none",
          "[faults][memory]") {
  const auto world = Communicator::alone(at::kCPU);
  int64_t nth = 1;
  for (; true; ++nth) {
    const Attempt result = attempt(nth, Shortage::once, [&] { world->check(); });
    if (!result.reached) break;
    CAPTURE(nth);
    CHECK(result.message == "std::bad_alloc");
    CHECK_NOTHROW(world->check());
  }
  CHECK(nth > 1);
}

TEST_CASE("a save that runs out of host memory changes nothing, and the next one is whole",
          "[faults][memory][checkpoint]") {
  out_of_memory::try_saves(at::kCPU, 51);
}

TEST_CASE("a resume that runs out of host memory changes nothing and can be had again",
          "[faults][memory][checkpoint]") {
  out_of_memory::try_resumes(at::kCPU, 51);
}

}  // namespace pacer::testing
