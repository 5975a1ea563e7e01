// Where a write to a broken connection fails with an error that Gloo does not know, Gloo's reading thread
// throws, and nobody catches that. It would end the program.
#pragma once

namespace pacer::detail {

// From now on an exception that nobody catches stops this thread, or one that it starts, for good, instead of
// ending the program. It says so on standard error. With LibTorch 2.13 and newer that holds for the reading
// threads of all Gloo groups of the program, because Gloo gives these one name. All others go to the
// terminate handler that was there before.
void stop_thread_on_uncaught_exception();

}  // namespace pacer::detail
