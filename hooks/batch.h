// What Session::begin returns: the tensors of a micro-batch, made for `auto [x, y] = session.begin(...)`.
// begin switches autocast on. Session::backward switches it off again. Where forward throws, the destructor
// of the Batch does so, because the Batch leaves its scope then.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <tuple>
#include <utility>

#include <ATen/core/Tensor.h>

namespace pacer {

namespace detail {

// The forward pass of one micro-step, from begin to backward. Ends itself when destroyed.
class ForwardScope {
 public:
  virtual ~ForwardScope() = default;
  virtual void end() noexcept = 0;
  // True where it has ended and no differentiable operation ran in it.
  virtual bool was_unused() const { return false; }
  // Throws what has failed in end(), once.
  virtual void throw_failure() {}
};

}  // namespace detail

template <size_t N>
class [[nodiscard]] Batch {
 public:
  Batch(std::array<at::Tensor, N> tensors, std::shared_ptr<detail::ForwardScope> scope)
      : tensors_(std::move(tensors)), scope_(std::move(scope)) {}
  Batch(const Batch&) = delete;
  Batch& operator=(const Batch&) = delete;
  ~Batch() { scope_->end(); }

  // Returns tensor number I; this is what `auto [x, y] = ...` calls.
  template <size_t I>
  at::Tensor& get() & {
    return tensors_[I];
  }
  // The same for a Batch that is const.
  template <size_t I>
  const at::Tensor& get() const& {
    return tensors_[I];
  }
  // A copy of the handle: the Batch is still needed.
  template <size_t I>
  at::Tensor get() && {
    return tensors_[I];
  }

 private:
  std::array<at::Tensor, N> tensors_;
  std::shared_ptr<detail::ForwardScope> scope_;
};

}  // namespace pacer

template <size_t N>
struct std::tuple_size<pacer::Batch<N>> : std::integral_constant<size_t, N> {};
template <size_t I, size_t N>
struct std::tuple_element<I, pacer::Batch<N>> {
  using type = at::Tensor;
};
