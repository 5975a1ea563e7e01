// What a region remembers of its first run for the second: see replayed.h.
#pragma once

#include <memory>
#include <unordered_map>

namespace pacer::detail {

class ReplayMemory {
 public:
  // While one exists, its region is the innermost that runs in this thread.
  class Scope {
   public:
    explicit Scope(ReplayMemory& memory);
    Scope(const Scope&) = delete;
    ~Scope();

   private:
    friend class ReplayMemory;
    ReplayMemory& memory_;
    Scope* outer_;
  };

  static bool is_running();
  static std::shared_ptr<const void> remembered(const void* owner, std::shared_ptr<const void> now);

 private:
  static std::shared_ptr<const void> ask(Scope* scope, const void* owner, std::shared_ptr<const void> now);

  std::unordered_map<const void*, std::shared_ptr<const void>> values_;
};

}  // namespace pacer::detail
