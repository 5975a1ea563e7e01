#include "memory_peak.h"

namespace bench {

void limit_memory(at::Device, double) {}
void start_memory_trace() {}
void set_memory_phase(const char*) {}
std::vector<MemoryKind> memory_at_peak(at::Device) { return {}; }

}  // namespace bench
