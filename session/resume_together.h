// Several Sessions of one program, such as those of a GAN, that go on from the same step.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <pacer/session/session.h>

namespace pacer {

// Resumes each Session from the newest step that all of them have a checkpoint of, and returns it; none, and
// nothing changed, where none of them has any. A program that dies between their saves leaves the first one a
// checkpoint ahead, which is passed over, and replaced once that step is saved again. So each Session has
// Checkpoints in a folder of its own, with the same `every` and with keep(3) at least, which is the default.
//
// Give them in the order in which the loop steps them: random numbers go on as the last one saved them. On all
// ranks together, before the first begin. Throws InvalidArgument where Sessions have checkpoints but no step in
// common, or for less than two, changing nothing; and what Session::resume throws, where those before that one
// have gone on.
std::optional<int64_t> resume_together(const std::vector<Session*>& sessions);

}  // namespace pacer
