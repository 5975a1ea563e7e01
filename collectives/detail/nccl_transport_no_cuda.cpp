// A build without CUDA has no NCCL.
#include <pacer/collectives/detail/connect.h>
#include <pacer/core/error.h>

namespace pacer::detail {

bool has_nccl(std::string* reason) {
  if (reason != nullptr) *reason = "this build has no CUDA";
  return false;
}

std::shared_ptr<Transport> make_nccl_transport(const std::shared_ptr<Transport>& /*control*/,
                                               const RankPlace& /*place*/, at::Device /*device*/,
                                               std::chrono::milliseconds /*timeout*/, bool /*one_host*/,
                                               std::function<std::optional<std::string>()> /*trouble*/) {
  throw Unavailable(
      "this pacer was built without CUDA and so without NCCL: configure it with -DPACER_CUDA=ON, or ask for "
      "Backend::gloo");
}

}  // namespace pacer::detail
