#include "pinned_copies.h"

#include <pacer/core/error.h>

namespace paging_bench {

std::unique_ptr<PinnedCopies> make_pinned_copies(int64_t /*bytes*/) {
  throw pacer::Unavailable("this build has no CUDA");
}

}  // namespace paging_bench
