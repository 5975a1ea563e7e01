// scales: what a sign should stand for. 1-bit Adam sends the signs of its momentum, and with them how large
// they are: one scale for all elements, one for each tensor's, or one for each 2,048; 1-bit LAMB does the
// same. This trains a small model once and prints a line; scales.sh trains all combinations. Exit codes: 0
// for success, 1 for a failure, 2 for input that cannot work.
#include <cstdio>
#include <string>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>

#include "models.h"
#include "options.h"
#include "support/program.h"
#include "text.h"
#include "training.h"

namespace {

void print_run(const scales::Options& options, const scales::Text& text) {
  const auto outcome = scales::train(options, text);
  std::printf("%s: held-out %.4f training %.4f bytes %lld parameters %lld seconds %.1f\n",
              scales::describe(options).c_str(), outcome.held_out, outcome.training,
              static_cast<long long>(outcome.bytes_a_step), static_cast<long long>(outcome.parameters),
              outcome.seconds);
}

// After few steps rounding differs in the last digits only; later it flips signs, and runs part.
void print_comparison(const scales::Options& options, const scales::Text& text) {
  std::vector<int64_t> marks;
  for (const int64_t compressed : {0, 1, 2, 5, 10, 20, 50, 100, 200}) {
    if (options.freeze + compressed <= options.steps) marks.push_back(options.freeze + compressed);
  }
  auto textbook = options;
  textbook.textbook = true;
  const auto theirs = scales::train(textbook, text, marks), ours = scales::train(options, text, marks);
  std::printf("%s\n", scales::describe(options).c_str());
  for (size_t i = 0; i < marks.size(); ++i) {
    const auto apart = (ours.snapshots[i + 1] - theirs.snapshots[i + 1]).to(at::kDouble);
    const auto way = (ours.snapshots[i + 1] - ours.snapshots[0]).to(at::kDouble);
    std::printf("step %4lld: %.1e of the way from the initial values apart, elements %.1e at most\n",
                static_cast<long long>(marks[i]), apart.norm().item<double>() / way.norm().item<double>(),
                apart.abs().max().item<double>());
  }
  std::printf("held-out: textbook %.4f, pacer %.4f\n", theirs.held_out, ours.held_out);
}

}  // namespace

int main(int argument_count, char** arguments) {
  return examples::run_guarded("scales", [&] {
    const auto options = scales::read_options(argument_count, arguments);
    if (!options) return 0;
    at::set_num_threads(options->threads);
    const auto text = scales::read_text(options->data, scales::text_unit(options->model), scales::kMostWords);
    options->compare ? print_comparison(*options, text) : print_run(*options, text);
    return 0;
  });
}
