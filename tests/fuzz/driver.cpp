// The main function of a fuzz target where there is no libFuzzer: replays the seeds and the corpus, and then
// mutations of them that are the same in every run.
//
//   fuzz-NAME CORPUS DICTIONARY MUTATIONS     "-" for no dictionary; PACER_TEST_LONG=1: 20 times as many
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <random>
#include <string>
#include <vector>

#include <unistd.h>

#include "fuzz/corpus.h"
#include "fuzz/harness.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace pacer::fuzz {
namespace {

constexpr unsigned kLongest = 10;  // seconds that one input may take
constexpr const char* kFailure = "fuzz-failure.bin";

const std::string* at_hand = nullptr;

// Leaves the input that ends the program in a file.
void save_input(int signal) {
  if (at_hand != nullptr) {
    std::FILE* const file = std::fopen(kFailure, "wb");
    if (file != nullptr) {
      std::fwrite(at_hand->data(), 1, at_hand->size(), file);
      std::fclose(file);
    }
    std::fprintf(stderr, "signal %d%s; the input is in %s\n", signal,
                 signal == SIGALRM ? ", an input that takes too long" : "", kFailure);
  }
  std::signal(signal, SIG_DFL);
  std::raise(signal);
}

void run(const std::string& input) {
  at_hand = &input;
  ::alarm(kLongest);
  LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(input.data()), input.size());
  at_hand = nullptr;
}

class Mutator {
 public:
  Mutator(std::vector<std::string> inputs, std::vector<std::string> words)
      : inputs_(std::move(inputs)), words_(std::move(words)) {}

  // One to four changes of one of the inputs.
  std::string next() {
    std::string input = any(inputs_);
    for (size_t i = below(4) + 1; i > 0; --i) change(input);
    return input;
  }

 private:
  size_t below(size_t bound) { return static_cast<size_t>(random_() % bound); }
  const std::string& any(const std::vector<std::string>& texts) { return texts[below(texts.size())]; }

  void change(std::string& input) {
    const size_t at = below(input.size() + 1), rest = input.size() - at;
    switch (below(8)) {
      case 0:  // a flipped bit
        if (rest > 0) input[at] = static_cast<char>(input[at] ^ (1 << below(8)));
        break;
      case 1:  // another byte
        if (rest > 0) input[at] = static_cast<char>(random_());
        break;
      case 2:
        input.insert(at, 1, static_cast<char>(random_()));
        break;
      case 3:
        input.erase(at, 1 + below(8));
        break;
      case 4:
        input.resize(at);
        break;
      case 5:  // a part comes twice
        input.insert(at, input.substr(below(input.size() + 1), 1 + below(128)));
        break;
      case 6:  // the end of another one
        input = input.substr(0, at) + tail(any(inputs_));
        break;
      default:
        if (!words_.empty()) input.replace(at, below(2) * 4, any(words_));
    }
  }
  std::string tail(const std::string& input) { return input.substr(below(input.size() + 1)); }

  const std::vector<std::string> inputs_, words_;
  std::mt19937_64 random_{1};
};

int drive(const std::vector<std::string>& arguments) {
  if (serve_corpus(arguments)) return 0;
  if (arguments.size() != 3) {
    std::fprintf(stderr, "usage: fuzz-NAME CORPUS DICTIONARY MUTATIONS\n");
    return 2;
  }
  std::vector<std::string> inputs = seeds();
  for (std::string& input : read_corpus(arguments[0])) inputs.push_back(std::move(input));
  inputs.emplace_back();
  for (const int signal : {SIGABRT, SIGSEGV, SIGFPE, SIGBUS, SIGALRM}) std::signal(signal, save_input);
  for (const std::string& input : inputs) run(input);
  const int mutations = std::stoi(arguments[2]) * (std::getenv("PACER_TEST_LONG") != nullptr ? 20 : 1);
  // Large ones are tried as they are: mutations of them take too long.
  std::vector<std::string> small;
  for (const std::string& input : inputs) {
    if (input.size() <= 1 << 16) small.push_back(input);
  }
  const auto words = arguments[1] == "-" ? std::vector<std::string>() : read_dictionary(arguments[1]);
  Mutator mutator(std::move(small), words);
  for (int i = 0; i < mutations; ++i) run(mutator.next());
  std::printf("%zu inputs and %d mutations of them\n", inputs.size(), mutations);
  return 0;
}

}  // namespace
}  // namespace pacer::fuzz

int main(int argc, char** argv) {
  try {
    return pacer::fuzz::drive({argv + 1, argv + argc});
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
