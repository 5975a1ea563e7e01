// How a group of ranks on NCCL comes about: the version of the library, the id of the group, the set-up.
#include <pacer/collectives/detail/connect.h>
#include <pacer/core/error.h>

#if PACER_WITH_NCCL

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <utility>

#include <ATen/ops/empty.h>
#include <nccl.h>

#include <pacer/collectives/detail/nccl_transport.h>

namespace pacer::detail {
namespace {

std::string nccl_version_text(int version) {
  return concatenate(version / 10000, ".", version / 100 % 100, ".", version % 100);
}

// Two copies of NCCL are common, the wheel's and the system's; the process uses the one that came first.
int check_nccl_version() {
  int version = 0;
  const ncclResult_t result = ncclGetVersion(&version);
  require<Unavailable>(result == ncclSuccess, "NCCL does not tell its version: ", ncclGetErrorString(result));
  static std::once_flag warned;
  std::call_once(warned, [version] {
    if (version / 100 == NCCL_VERSION_CODE / 100) return;
    std::fprintf(stderr,
                 "pacer: warning: this process runs NCCL %s, but pacer was built with the headers of %s\n",
                 nccl_version_text(version).c_str(), nccl_version_text(NCCL_VERSION_CODE).c_str());
  });
  return version;
}

// NCCL listens on the interface that this variable names, else on one that other hosts reach. "=" asks for
// exactly that name. NCCL looks at it when its first communicator of the process is made, and child processes
// would inherit it, so it is set for that long only.
class LoopbackOnly {
 public:
  explicit LoopbackOnly(bool wanted) : is_set_(wanted && std::getenv(kName) == nullptr) {
    if (is_set_) setenv(kName, "=lo", /*overwrite=*/0);
  }
  ~LoopbackOnly() {
    if (is_set_) unsetenv(kName);
  }
  LoopbackOnly(const LoopbackOnly&) = delete;

 private:
  static constexpr const char* kName = "NCCL_SOCKET_IFNAME";
  const bool is_set_;
};

// Rank 0 makes the id; an id of zeros says that it could not.
NcclId share_nccl_id(Transport& control, int rank, std::chrono::milliseconds timeout) {
  NcclId id{};
  std::string problem;
  if (rank == 0) {
    ncclUniqueId unique_id;
    const ncclResult_t result = ncclGetUniqueId(&unique_id);
    if (result == ncclSuccess) {
      std::memcpy(id.data(), &unique_id, sizeof(unique_id));
    } else {
      problem = nccl_error_text("making an id", result);
    }
  }
  const at::Tensor bytes = at::empty({static_cast<int64_t>(id.size())}, at::kByte);
  std::memcpy(bytes.mutable_data_ptr(), id.data(), id.size());
  control.broadcast(bytes, 0, timeout)->wait();
  std::memcpy(id.data(), bytes.const_data_ptr(), id.size());
  require<Error>(problem.empty(), problem);
  require<Error>(id != NcclId{}, "NCCL could not be set up by rank 0");
  return id;
}

}  // namespace

bool has_nccl(std::string* /*reason*/) { return true; }

std::shared_ptr<Transport> make_nccl_transport(const std::shared_ptr<Transport>& control, int rank,
                                               int world_size, at::Device device,
                                               std::chrono::milliseconds timeout, bool one_host,
                                               std::function<std::optional<std::string>()> trouble) {
  require(device.is_cuda() && device.has_index(), "NCCL needs a GPU with its number, not ", device);
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  const LoopbackOnly while_nccl_starts(one_host);
  const int version = check_nccl_version();
  const NcclId id = share_nccl_id(*control, rank, timeout);
  const auto left =
      std::chrono::duration_cast<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
  const std::shared_ptr<NcclComm> comm = NcclComm::create(id, rank, world_size, device, left);
  try {
    return std::make_shared<NcclTransport>(comm, "NCCL " + nccl_version_text(version), std::move(trouble));
  } catch (const std::exception& error) {
    comm->fail(error.what(), false);
    throw;
  }
}

}  // namespace pacer::detail

#else

namespace pacer::detail {
namespace {

constexpr const char* kMissing =
    PACER_WITH_CUDA ? "nccl.h was not found when this pacer was built" : "this build has no CUDA";

}  // namespace

bool has_nccl(std::string* reason) {
  if (reason != nullptr) *reason = kMissing;
  return false;
}

std::shared_ptr<Transport> make_nccl_transport(const std::shared_ptr<Transport>& /*control*/, int /*rank*/,
                                               int /*world_size*/, at::Device /*device*/,
                                               std::chrono::milliseconds /*timeout*/, bool /*one_host*/,
                                               std::function<std::optional<std::string>()> /*trouble*/) {
  throw Unavailable(concatenate("ranks on GPUs need NCCL, but ", kMissing,
                                ": configure it with -DPACER_CUDA=ON where nvidia-nccl-cu13 lies beside "
                                "LibTorch, or ask for CommunicatorBackend::gloo"));
}

}  // namespace pacer::detail

#endif  // PACER_WITH_NCCL
