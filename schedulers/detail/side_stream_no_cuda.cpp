// A build without CUDA has no streams.
#include <pacer/schedulers/detail/side_stream.h>

namespace pacer::detail {

std::unique_ptr<SideStream> make_side_stream(c10::Device /*device*/) { return nullptr; }

}  // namespace pacer::detail
