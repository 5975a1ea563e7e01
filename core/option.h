// How a struct of options declares them where it stands below other structs: setters return the struct that
// the user writes, so that they chain in any order.
//
//   template <class Own>
//   struct SizeOptionsOf {
//     // Bytes, >= 1.
//     PACER_OPTION(int64_t, size) = 8;
//   };
//   struct FileOptions : SizeOptionsOf<FileOptions> {};
//
// TORCH_ARG does the same for a struct that stands alone.
#pragma once

#include <type_traits>
#include <utility>

// An option of the template that has the struct of the user as its parameter `Own`.
#define PACER_OPTION(T, name)                        \
 public:                                             \
  Own& name(T value) {                               \
    name##_ = std::move(value);                      \
    return static_cast<Own&>(*this);                 \
  }                                                  \
  const T& name() const noexcept { return name##_; } \
  T& name() noexcept { return name##_; }             \
                                                     \
 private:                                            \
  T name##_

// An option of the struct `lower`, a member above this line, as an option of the struct `Own` that holds it:
// its type, its default and its words are the lower one's.
#define PACER_OPTION_OF(Own, lower, name)                                                  \
 public:                                                                                   \
  Own& name(std::decay_t<decltype(std::declval<const decltype(lower)&>().name())> value) { \
    lower.name(std::move(value));                                                          \
    return static_cast<Own&>(*this);                                                       \
  }                                                                                        \
  const auto& name() const noexcept { return lower.name(); }                               \
  auto& name() noexcept { return lower.name(); }                                           \
                                                                                           \
 private:                                                                                  \
  static_assert(true)
