// The parameter lists the benchmarks run on: shapes of real models, tensor by tensor, and two extremes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace bench {

struct ModelShapes {
  std::string name;   // in case names: "gpt2"
  std::string title;  // in tables: "GPT-2"
  std::vector<std::vector<int64_t>> shapes;

  int64_t parameters() const;
  std::vector<int64_t> counts() const;
};

ModelShapes gpt2();        // 148 tensors, 124,439,808 parameters
ModelShapes gpt2_xl();     // 580 tensors, 1,557,611,200 parameters
ModelShapes bert_large();  // with its masked-language-model head: 394 tensors, 335,174,458 parameters
ModelShapes one_tensor();  // 1 tensor, 10^9 parameters
ModelShapes many_small();  // 10,000 tensors of 64 parameters

}  // namespace bench
