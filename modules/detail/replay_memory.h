// What a region remembers of its first run for the second: see replayed.h; and which result of a layer in it is the
// region's own, which the second run makes for its graph alone.
#pragma once

#include <memory>
#include <optional>
#include <unordered_map>

#include <ATen/core/Tensor.h>

#include <pacer/modules/tensor_call.h>

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

  // A layer whose backward does not read its own result asks before it makes it, in the innermost region that runs. Where this
  // is true nobody reads the values, and unread_values() do: the first run of the region returned this result and no other.
  static bool result_is_unread();
  // And says what it returned.
  static void note_result(const at::Tensor& result);

  // Called with what a run of the region has returned, inside its Scope. The first run learns from it what the second one may
  // leave out; the second returns false where something else has come out than what was left out.
  void end_first_run(const Tensors& results);
  bool end_second_run(const Tensors& results) const { return !left_out_ || is_last(results); }

 private:
  bool is_last(const Tensors& results) const;

  static std::shared_ptr<const void> ask(Scope* scope, const void* owner, std::shared_ptr<const void> now);

  std::unordered_map<const void*, std::shared_ptr<const void>> values_;
  size_t noted_ = 0;              // results of layers, in this run
  at::Tensor last_;               // of them
  int64_t last_version_ = 0;      // a result that is changed in place is read
  std::optional<size_t> unread_;  // which of them, from the first run on
  bool left_out_ = false;         // in this run
};

// Numbers that are not one, of this shape, in the memory of one element.
at::Tensor unread_values(at::IntArrayRef sizes, const at::TensorOptions& options);

}  // namespace pacer::detail
