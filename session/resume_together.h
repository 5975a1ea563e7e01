// Several Sessions of one program, such as those of a GAN, that save and go on together.
//
//   discriminates.use(pacer::Checkpoints("run/discriminator"));
//   generates.use(pacer::Checkpoints("run/generator"));
//   pacer::resume_together({&discriminates, &generates});
//   for (...) { ...; discriminates.step(); ...; generates.step(); }
//   discriminates.finish();
//   generates.finish();
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <pacer/session/session.h>

namespace pacer {

// Resumes all of them from the newest checkpoints that they saved together, and returns the step of the last one;
// none, and nothing changed, where there are none yet. All Sessions go on, or where anything is wrong with one of
// them, none.
//
// From then on they save together: whichever Checkpoints are due, all save at the end of the next step of the last
// Session, so `sessions` stand in the order in which the loop steps them. How many steps each takes until then does
// not matter, and what one's forward pass writes to another's buffers (batch norm) is saved as it is. Wherever the
// program dies, the newest checkpoints that all of them have are of one moment. A save waits for the next such step
// where more than one Session has taken no step since the save before, or one is inside an accumulation window. Keep the
// Sessions until each has called finish().
//
// On all ranks together, before the first begin. `options.step()` is that of the last Session. Throws
// InvalidArgument, changing nothing, for less than two Sessions, one without Checkpoints or with keep(1), one that was given
// to another call, and where Sessions have checkpoints, but none that they saved together; and what Session::resume throws.
std::optional<int64_t> resume_together(const std::vector<Session*>& sessions,
                                       const ResumeOptions& options = {});

}  // namespace pacer
