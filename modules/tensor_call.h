// A call of any function as a function of its tensors alone: what has to be known to run it again.
//
// Tensors may be arguments themselves, or lie in a std::vector, std::optional, std::pair or std::tuple. All
// other arguments are copied and stay as they are. A result is a tensor, a pair or tuple of tensors, or a
// vector of tensors.
#pragma once

#include <functional>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

namespace pacer {

// The tensors that a call takes or gives.
using Tensors = std::vector<at::Tensor>;
// A function of tensors alone.
using TensorFunction = std::function<Tensors(const Tensors&)>;

namespace detail {

// Tensors inside a value: `take` moves them to the end of a list, `put` brings others to where they were.
template <class T>
struct TensorsIn {
  static_assert(!std::is_same_v<T, c10::ArrayRef<at::Tensor>> && !std::is_same_v<T, c10::IntArrayRef>,
                "an ArrayRef does not own what it shows, so a second run would read what is gone; pass a "
                "std::vector");
  static void take(T& /*value*/, Tensors& /*out*/) {}
  static void put(T& /*value*/, const Tensors& /*in*/, size_t& /*next*/) {}
};
template <>
struct TensorsIn<at::Tensor> {
  static void take(at::Tensor& value, Tensors& out) { out.push_back(std::exchange(value, at::Tensor())); }
  static void put(at::Tensor& value, const Tensors& in, size_t& next) { value = in[next++]; }
};
template <class T>
struct TensorsInRange {
  static void take(T& values, Tensors& out) {
    for (auto& value : values) TensorsIn<std::decay_t<decltype(value)>>::take(value, out);
  }
  static void put(T& values, const Tensors& in, size_t& next) {
    for (auto& value : values) TensorsIn<std::decay_t<decltype(value)>>::put(value, in, next);
  }
};
template <class T>
struct TensorsInTuple {
  static void take(T& values, Tensors& out) {
    std::apply([&](auto&... value) { (TensorsIn<std::decay_t<decltype(value)>>::take(value, out), ...); },
               values);
  }
  static void put(T& values, const Tensors& in, size_t& next) {
    std::apply([&](auto&... value) { (TensorsIn<std::decay_t<decltype(value)>>::put(value, in, next), ...); },
               values);
  }
};
template <class T>
struct TensorsIn<std::optional<T>> {
  static void take(std::optional<T>& value, Tensors& out) {
    if (value) TensorsIn<T>::take(*value, out);
  }
  static void put(std::optional<T>& value, const Tensors& in, size_t& next) {
    if (value) TensorsIn<T>::put(*value, in, next);
  }
};
template <>
struct TensorsIn<std::vector<at::Tensor>> : TensorsInRange<std::vector<at::Tensor>> {};
template <class... T>
struct TensorsIn<std::tuple<T...>> : TensorsInTuple<std::tuple<T...>> {};
template <class A, class B>
struct TensorsIn<std::pair<A, B>> : TensorsInTuple<std::pair<A, B>> {};

// A result to a list of tensors and back. `kCount`: how many there are; 0 where only the call itself tells.
template <class Result>
struct ResultTensors {
  static_assert(std::is_same_v<Result, at::Tensor>,
                "a block returns a Tensor, a pair or tuple of Tensors, or a vector of Tensors");
  static constexpr size_t kCount = 1;
  static Tensors pack(Result result) { return {std::move(result)}; }
  static Result unpack(Tensors tensors) { return std::move(tensors[0]); }
};
template <>
struct ResultTensors<Tensors> {
  static constexpr size_t kCount = 0;
  static Tensors pack(Tensors result) { return result; }
  static Tensors unpack(Tensors tensors) { return tensors; }
};
template <class Tuple>
struct ResultTuple {
  static constexpr size_t kCount = std::tuple_size_v<Tuple>;
  static Tensors pack(Tuple result) {
    return std::apply([](auto&... tensor) { return Tensors{std::move(tensor)...}; }, result);
  }
  static Tuple unpack(Tensors tensors) { return unpack(tensors, std::make_index_sequence<kCount>()); }

 private:
  template <size_t... I>
  static Tuple unpack(Tensors& tensors, std::index_sequence<I...>) {
    return Tuple{std::move(tensors[I])...};
  }
};
template <class... T>
struct ResultTensors<std::tuple<T...>> : ResultTuple<std::tuple<T...>> {};
template <class A, class B>
struct ResultTensors<std::pair<A, B>> : ResultTuple<std::pair<A, B>> {};

// f(args...), split into its tensors, in the order of the arguments, and a function of them.
template <class F, class... Args>
class TensorCall {
 public:
  using Result = std::decay_t<std::invoke_result_t<F&, Args...>>;
  using Packed = ResultTensors<Result>;

  explicit TensorCall(F f, Args... args) {
    auto values = std::make_tuple(std::move(args)...);
    TensorsIn<decltype(values)>::take(values, tensors);
    function = [f = std::move(f), values = std::move(values)](const Tensors& in) mutable {
      auto own = values;
      size_t next = 0;
      TensorsIn<decltype(own)>::put(own, in, next);
      return Packed::pack(std::apply(f, std::move(own)));
    };
  }

  Tensors tensors;
  TensorFunction function;
};

}  // namespace detail
}  // namespace pacer
