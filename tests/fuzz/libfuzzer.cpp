// What a target adds to libFuzzer's own main function: the commands that unpack and pack a corpus.
#include <cstdlib>

#include "fuzz/corpus.h"

extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv) {
  if (pacer::fuzz::serve_corpus({*argv + 1, *argv + *argc})) std::exit(0);
  return 0;
}
