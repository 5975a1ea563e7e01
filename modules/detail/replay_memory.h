// What a region remembers of its first run for the second: see replayed.h; and which result of a layer in it is the
// region's own, which the second run makes for its graph alone.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>

#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <pacer/modules/detail/kept_results.h>
#include <pacer/modules/tensor_call.h>

namespace pacer::detail {

class ReplayMemory {
 public:
  // The region's name is for errors; it keeps results of these operators, null for none.
  explicit ReplayMemory(std::string region = "region", std::shared_ptr<const OperatorList> kept = nullptr)
      : kept_(std::move(region), std::move(kept)) {}

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
    std::optional<c10::impl::IncludeDispatchKeyGuard> keeps_;
  };

  static bool is_running();
  static std::shared_ptr<const void> remembered(const void* owner, std::shared_ptr<const void> now);

  // A layer whose backward does not read its own result asks before it makes it, in the innermost region that runs. Where this
  // is true nobody reads the values, and unread_values() do: the first run of the region returned this result and no other.
  static bool result_is_unread();
  // It says where it begins to make it, and what it returned.
  static void note_last_product();
  static void note_result(const at::Tensor& result);

  // The kernel of operators that regions keep, at kKeepingKey.
  static void run_kept(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);
  // Those of operators through which kept memory changes and its version does not: ones that give memory of their argument as
  // if it were new (_unsafe_view), which gets the argument's version, and addition in place, by which LibTorch adds a bias to
  // such memory: regions keep a copy of what it changes.
  static void run_alias(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);
  static void run_addition(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);
  KeptResults& kept() { return kept_; }

  // Called with what a run of the region has returned, inside its Scope. The first run learns from it what the second one may
  // leave out; the second returns false where something else has come out than what was left out. Both throw where what was
  // kept does not serve.
  void end_first_run(const Tensors& results);
  bool end_second_run(const Tensors& results) const;

 private:
  bool is_last(const Tensors& results) const;

  static std::shared_ptr<const void> ask(Scope* scope, const void* owner, std::shared_ptr<const void> now);
  static void run_kept(Scope* scope, const OperatorCall& call);

  std::unordered_map<const void*, std::shared_ptr<const void>> values_;
  size_t noted_ = 0;              // results of layers, in this run
  at::Tensor last_;               // of them
  int64_t last_version_ = 0;      // a result that is changed in place is read
  std::optional<size_t> unread_;  // which of them, from the first run on
  bool left_out_ = false;         // in this run
  size_t calls_before_ = 0;       // of kept operators, before a layer's last product
  KeptResults kept_;
};

// Numbers that are not one, of this shape, in the memory of one element.
at::Tensor unread_values(at::IntArrayRef sizes, const at::TensorOptions& options);

}  // namespace pacer::detail
