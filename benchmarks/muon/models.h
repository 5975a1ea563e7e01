// The models whose parameters pacer-bench muon updates, sorted for Muon by hand: shapes, no modules.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace bench::muon {

using Shapes = std::vector<std::vector<int64_t>>;

// Matrices of one shape, (rows, columns).
struct MatrixCount {
  int64_t rows, columns, count;
};

struct Model {
  std::string name;
  Shapes hidden;  // matrices, which take Muon's rule
  Shapes rest;    // embeddings, head and vectors, which take AdamW's

  // The hidden matrices by shape, in the order in which shapes come first, as Muon gathers them in batches.
  std::vector<MatrixCount> matrices() const;
};

// How many elements the tensors of these shapes have.
int64_t elements_of(const Shapes& shapes);

// How many operations so many iterations cost that make the hidden matrices orthogonal. For a matrix of r
// rows and c columns, or the other way round, r <= c, the three products of one are 4 r^2 c + 2 r^3.
double operations_of(const Model& model, int64_t iterations);

Model gpt();         // that of pacer-bench sharding, 24 layers of width 2048: 1.345 billion parameters
Model gpt2_small();  // GPT-2: 124 million
Model tiny();        // 2 layers of width 128: half a million, for a CPU

}  // namespace bench::muon
