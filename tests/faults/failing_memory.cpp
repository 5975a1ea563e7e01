// Host memory that runs out. Counted are tensors (LibTorch's CPU allocator, whoever asks it) and operator new
// where pacer's own code asks, standard library included. What LibTorch's code asks operator new for is not:
// destructors of its graphs ask too, and end the program if they get nothing. Memory that C code takes with
// malloc is not counted either.
#include "support/failing_memory.h"

#include <link.h>
#include <unwind.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

extern "C" const char __executable_start, etext;  // the linker's

namespace pacer::testing {
namespace {

std::atomic<int64_t> live{0};

struct CodeRange {
  uintptr_t begin = 0, end = 0;
  bool has(uintptr_t address) const { return begin <= address && address < end; }
};

CodeRange standard_library() {
  CodeRange range;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* found) {
        if (std::strstr(info->dlpi_name, "libstdc++") == nullptr) return 0;
        auto& code = *static_cast<CodeRange*>(found);
        code.begin = info->dlpi_addr;
        for (int i = 0; i < info->dlpi_phnum; ++i) {
          const auto& part = info->dlpi_phdr[i];
          code.end = std::max<uintptr_t>(code.end, info->dlpi_addr + part.p_vaddr + part.p_memsz);
        }
        return 1;
      },
      &range);
  return range;
}

const CodeRange& program() {
  static const CodeRange range{reinterpret_cast<uintptr_t>(&__executable_start),
                               reinterpret_cast<uintptr_t>(&etext)};
  return range;
}

// The innermost caller that is not the standard library is code of this program.
bool is_asked_by_program(void* caller) {
  static const CodeRange library = standard_library();
  const auto address = reinterpret_cast<uintptr_t>(caller);
  if (!library.has(address)) return program().has(address);
  struct Walk {
    bool in_library = false, by_program = false;
  } walk;
  _Unwind_Backtrace(
      [](_Unwind_Context* frame, void* data) {
        auto& state = *static_cast<Walk*>(data);
        const uintptr_t at = _Unwind_GetIP(frame);
        const bool in_library = library.has(at);
        if (state.in_library && !in_library) {
          state.by_program = program().has(at);
          return _URC_END_OF_STACK;
        }
        state.in_library = in_library;
        return _URC_NO_REASON;
      },
      &walk);
  return walk.by_program;
}

// Null where there is none.
void* taken_quietly(size_t bytes, size_t alignment) {
  void* memory = alignment == 0
                     ? std::malloc(std::max<size_t>(bytes, 1))
                     : std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
  if (memory != nullptr) ++live;
  return memory;
}

void* taken(size_t bytes, size_t alignment, void* caller) {
  if (FailingMemory::is_armed() && is_asked_by_program(caller) && FailingMemory::fails_now())
    throw std::bad_alloc();
  void* memory = taken_quietly(bytes, alignment);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

void give_back(void* memory) {
  if (memory == nullptr) return;
  --live;
  std::free(memory);
}

class TensorMemory final : public c10::Allocator {
 public:
  static TensorMemory& only() {
    static auto* const memory = new TensorMemory;  // lives as long as its tensors
    return *memory;
  }
  c10::DataPtr allocate(size_t bytes) override {
    TORCH_CHECK(!FailingMemory::fails_now(), "DefaultCPUAllocator: not enough memory: you tried to allocate ",
                bytes, " bytes.");
    c10::DataPtr data = c10::GetDefaultCPUAllocator()->allocate(bytes);
    if (data.get() == nullptr) return data;
    ++live;
    void* memory = data.release_context();
    return {memory, memory, &drop, at::kCPU};
  }
  static void drop(void* memory) {
    if (memory == nullptr) return;
    --live;
    c10::GetDefaultCPUAllocator()->raw_deleter()(memory);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &drop; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

const bool kInstalled = (c10::SetCPUAllocator(&TensorMemory::only(), /*priority=*/200), true);

}  // namespace

void prepare_failing_memory() {
  static_cast<void>(kInstalled);
  is_asked_by_program(__builtin_return_address(0));  // finds the ranges of code once
}
int64_t live_allocations() { return live; }

}  // namespace pacer::testing

void* operator new(size_t bytes) { return pacer::testing::taken(bytes, 0, __builtin_return_address(0)); }
void* operator new[](size_t bytes) { return pacer::testing::taken(bytes, 0, __builtin_return_address(0)); }
// Who asks so goes on without; it is here so that memory goes back to where it came from.
void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
  return pacer::testing::taken_quietly(bytes, 0);
}
void* operator new[](size_t bytes, const std::nothrow_t&) noexcept {
  return pacer::testing::taken_quietly(bytes, 0);
}
void* operator new(size_t bytes, std::align_val_t alignment) {
  return pacer::testing::taken(bytes, static_cast<size_t>(alignment), __builtin_return_address(0));
}
void* operator new[](size_t bytes, std::align_val_t alignment) {
  return pacer::testing::taken(bytes, static_cast<size_t>(alignment), __builtin_return_address(0));
}
void operator delete(void* memory) noexcept { pacer::testing::give_back(memory); }
void operator delete[](void* memory) noexcept { pacer::testing::give_back(memory); }
void operator delete(void* memory, size_t) noexcept { pacer::testing::give_back(memory); }
void operator delete[](void* memory, size_t) noexcept { pacer::testing::give_back(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { pacer::testing::give_back(memory); }
void operator delete[](void* memory, std::align_val_t) noexcept { pacer::testing::give_back(memory); }
void operator delete(void* memory, size_t, std::align_val_t) noexcept { pacer::testing::give_back(memory); }
void operator delete[](void* memory, size_t, std::align_val_t) noexcept { pacer::testing::give_back(memory); }
