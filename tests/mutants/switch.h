// Included before every file that holds mutants: which of them is at work. In constant expressions it is
// none.
#pragma once

extern int pacer_mutant;
extern unsigned char* pacer_mutants_seen;  // by number: whether the place of this mutant was reached

inline bool pacer_mutant_asked(int number) {
  pacer_mutants_seen[number] = 1;
  return pacer_mutant == number;
}

__attribute__((always_inline)) constexpr bool pacer_mutant_is(int number) {
  return !__builtin_is_constant_evaluated() && pacer_mutant_asked(number);
}
