#include "memory_peak.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <unordered_map>
#include <utility>

#include <ATen/Context.h>
#include <ATen/cuda/CUDAContextLight.h>
#include <c10/cuda/CUDACachingAllocator.h>

#include <pacer/core/error.h>

namespace bench {
namespace {

namespace allocator = c10::cuda::CUDACachingAllocator;
using Entry = allocator::TraceEntry;

constexpr size_t kEntries = 1 << 20;

std::atomic<const char*> current_phase = "";

struct Phase : c10::GatheredContext {
  const char* name = current_phase;
};

void record(bool enabled) {
  const auto when = enabled ? allocator::RecordContext::ALLOC : allocator::RecordContext::NEVER;
  allocator::recordHistory(enabled,
                           [] { return std::shared_ptr<c10::GatheredContext>(std::make_shared<Phase>()); },
                           kEntries, when,
                           /*clearHistory=*/true, /*skip_actions=*/{});
}

// The tensors that are there, by address.
class Live {
 public:
  void follow(const Entry& entry) {
    const auto size = static_cast<int64_t>(entry.size_);
    if (entry.action_ == Entry::ALLOC) {
      tensors_[entry.addr_] = &entry;
      bytes_ += size;
    } else if (entry.action_ == Entry::FREE_COMPLETED && tensors_.erase(entry.addr_) != 0) {
      bytes_ -= size;
    }
  }
  int64_t bytes() const { return bytes_; }
  std::vector<MemoryKind> kinds() const {
    std::map<std::pair<std::string, int64_t>, int64_t> counts;
    for (const auto& [address, entry] : tensors_) {
      const auto* phase = dynamic_cast<const Phase*>(entry->context_.get());
      ++counts[{phase != nullptr ? phase->name : "", static_cast<int64_t>(entry->size_)}];
    }
    std::vector<MemoryKind> kinds;
    for (const auto& [kind, count] : counts) kinds.push_back({kind.first, kind.second, count});
    std::sort(kinds.begin(), kinds.end(),
              [](const MemoryKind& a, const MemoryKind& b) { return a.bytes * a.count > b.bytes * b.count; });
    return kinds;
  }

 private:
  std::unordered_map<size_t, const Entry*> tensors_;
  int64_t bytes_ = 0;
};

}  // namespace

void limit_memory(at::Device gpu, double gigabytes) {
  at::globalContext().lazyInitDevice(gpu.type());
  const auto all = static_cast<double>(at::cuda::getDeviceProperties(gpu.index())->totalGlobalMem);
  pacer::require(gigabytes * 1e9 <= all, "--memory is ", gigabytes, " GB, but the GPU has ", all * 1e-9);
  allocator::setMemoryFraction(gigabytes * 1e9 / all, gpu.index());
}

void start_memory_trace() { record(true); }
void set_memory_phase(const char* phase) { current_phase = phase; }

std::vector<MemoryKind> memory_at_peak(at::Device gpu) {
  const auto traces = allocator::snapshot().device_traces;
  record(false);
  const std::vector<Entry>& entries = traces.at(static_cast<size_t>(gpu.index()));
  Live all;
  size_t peak = 0;
  int64_t most = 0;
  for (size_t i = 0; i < entries.size(); ++i) {
    all.follow(entries[i]);
    if (all.bytes() <= most) continue;
    most = all.bytes();
    peak = i;
  }
  Live at_peak;
  for (size_t i = 0; i < entries.size() && i <= peak; ++i) at_peak.follow(entries[i]);
  return at_peak.kinds();
}

}  // namespace bench
