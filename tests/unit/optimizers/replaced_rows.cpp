// Parameters that grow and shrink: replace() gives the new tensors the state of the rows that stay, and append_rows() puts
// rows behind them.
#include <limits>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include <pacer/pacer.h>

#include "support/catch.h"
#include "support/cpu_memory.h"
#include "support/message_of.h"
#include "support/optimizers/optimizers.h"
#include "support/session/own_optimizers.h"

namespace pacer::testing::replaced_rows {
namespace {

constexpr int64_t kRows = 6, kColumns = 32;  // groups of codes end with rows

Tensor rows_of(const Tensor& tensor, const std::vector<int64_t>& rows) {
  std::vector<Tensor> all;
  for (const int64_t row : rows) {
    all.push_back(row < 0 ? torch::zeros(tensor.sizes().slice(1), tensor.options().requires_grad(false))
                          : tensor.detach().select(0, row));
  }
  return all.empty() ? tensor.detach().narrow(0, 0, 0).clone() : torch::stack(all);
}
std::vector<int64_t> long_range(int64_t end) {
  std::vector<int64_t> all(static_cast<size_t>(end));
  std::iota(all.begin(), all.end(), 0);
  return all;
}
Tensor long_tensor(const std::vector<int64_t>& values) { return torch::tensor(values, torch::kLong); }

// A matrix and a vector with gradients that depend on step and row alone.
struct Run {
  explicit Run(const RegisteredOptimizer& form) {
    torch::manual_seed(3);
    matrix = torch::randn({kRows, kColumns}).to(form.dtype).requires_grad_();
    vector = torch::randn({kRows}).to(form.dtype).requires_grad_();
    NamedParameters parameters;
    parameters.insert("matrix", matrix);
    parameters.insert("vector", vector);
    optimizer = form.make(parameters, nullptr);
    fused().name_parameters(parameters);
  }
  FusedOptimizer& fused() const { return dynamic_cast<FusedOptimizer&>(*optimizer); }
  // Steps from ... to - 1; row i gets the gradient of row sources[i], zeros where that is -1.
  void steps(int from, int to, const std::vector<int64_t>& sources) const {
    for (int step = from; step < to; ++step) {
      torch::manual_seed(100 + static_cast<uint64_t>(step));
      const Tensor of_matrix = torch::randn({kRows, kColumns}), of_vector = torch::randn({kRows});
      matrix.mutable_grad() = rows_of(of_matrix, sources).to(matrix.scalar_type());
      vector.mutable_grad() = rows_of(of_vector, sources).to(vector.scalar_type());
      optimizer->step();
    }
  }
  // New rows have the value `fill`.
  void select(const std::vector<int64_t>& rows, double fill) {
    const auto selected = [&](const Tensor& old) {
      Tensor now = rows_of(old, rows);
      for (size_t i = 0; i < rows.size(); ++i) {
        if (rows[i] < 0) now.select(0, static_cast<int64_t>(i)).fill_(fill);
      }
      return now.requires_grad_();
    };
    const Tensor new_matrix = selected(matrix), new_vector = selected(vector);
    fused().replace({{matrix, new_matrix}, {vector, new_vector}}, long_tensor(rows));
    matrix = new_matrix, vector = new_vector;
  }
  NamedTensors state() const { return static_cast<SessionOptimizer&>(fused()).export_state(); }

  Tensor matrix, vector;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
};

bool has(const RegisteredOptimizer& form, const char* word) {
  return form.name.find(word) != std::string::npos;
}
// Whether each row goes its way whatever the others do: trust ratios and products of matrices see all of them, and
// stochastic rounding sees their places.
bool has_own_rows(const RegisteredOptimizer& form) {
  return !has(form, "Lamb") && !has(form, "Muon") && !has(form, "stochastic");
}

const std::vector<int64_t> kAll{0, 1, 2, 3, 4, 5}, kSelected{4, 1, -1, 0, -1};

}  // namespace

TEST_CASE("rows that stay have their state, and new ones none", "[optimizer][rows]") {
  for (const RegisteredOptimizer& form : own_optimizers_without_ranks()) {
    CAPTURE(form.name);
    Run run(form);
    run.steps(0, 5, kAll);
    const NamedTensors before = run.state();
    const Tensor matrix = run.matrix, vector = run.vector;
    run.select(kSelected, 0.5);
    CHECK(run.fused().parameter_name(run.matrix) == "matrix");
    const NamedTensors after = run.state();
    int compared = 0;
    for (const auto& [name, tensor] : before) {
      CAPTURE(name);
      const std::string field = name.substr(name.rfind('/') + 1);
      const bool is_tensor = name.rfind("group/", 0) != 0 && field != "group" && field != "step" &&
                             field.rfind("strides", 0) != 0 && tensor.dim() > 0 && tensor.size(0) == kRows;
      if (!is_tensor) continue;
      const bool is_coded = tensor.scalar_type() == at::kChar || tensor.scalar_type() == at::kByte;
      if (is_coded || field.find("_scale") != std::string::npos) continue;  // see the next case
      Tensor wanted = rows_of(tensor, kSelected);
      const bool begins_at_parameter = field == "master" || (form.averages && field == "exp_avg");
      for (const int64_t row : {2, 4}) {
        if (begins_at_parameter) wanted.select(0, row).fill_(0.5);
      }
      CHECK(same_bits(after.at(name), wanted));
      ++compared;
    }
    for (const char* name : {"matrix", "vector"}) {
      if (before.count(std::string(name) + "/step") == 0) continue;
      CHECK(same_bits(after.at(std::string(name) + "/step"), before.at(std::string(name) + "/step")));
    }
    CHECK((compared > 0 || has(form, "8 bits") || has(form, "Lion")));
    run.steps(5, 7, kSelected);  // goes on
    CHECK(run.matrix.isfinite().all().item<bool>());
    CHECK(run.optimizer->state().count(matrix.unsafeGetTensorImpl()) == 0);
    CHECK(run.optimizer->state().count(vector.unsafeGetTensorImpl()) == 0);
  }
}

TEST_CASE("rows that stay train on as if nothing had happened", "[optimizer][rows]") {
  for (const RegisteredOptimizer& form : own_optimizers_without_ranks()) {
    if (!has_own_rows(form)) continue;
    CAPTURE(form.name);
    Run selected(form), whole(form);
    for (Run* run : {&selected, &whole}) run->steps(0, 5, kAll);
    selected.select(kSelected, 0.5);
    selected.steps(5, 10, kSelected);
    whole.steps(5, 10, kAll);
    for (size_t i = 0; i < kSelected.size(); ++i) {
      if (kSelected[i] < 0) continue;
      const auto row = static_cast<int64_t>(i);
      CHECK(same_bits(selected.matrix.select(0, row), whole.matrix.select(0, kSelected[i])));
      if (has(form, "8 bits")) continue;  // codes of the vector share one scale, which other rows have made
      CHECK(same_bits(selected.vector.select(0, row), whole.vector.select(0, kSelected[i])));
    }
  }
}

TEST_CASE("a new row trains as one that never had a gradient", "[optimizer][rows]") {
  for (const RegisteredOptimizer& form : own_optimizers_without_ranks()) {
    // Others have no plain value to write, or one that the state follows.
    if (!has_own_rows(form) || form.averages || form.dtype != at::kFloat) continue;
    CAPTURE(form.name);
    Run grown(form), still(form);
    const std::vector<int64_t> without_last{0, 1, 2, 3, 4, -1};
    for (Run* run : {&grown, &still}) {
      const torch::NoGradGuard no_grad;
      run->matrix.select(0, 5).zero_();  // nothing to decay
      run->vector.select(0, 5).zero_();
      run->steps(0, 5, without_last);
    }
    grown.select({0, 1, 2, 3, 4, -1}, 0.5);
    {
      const torch::NoGradGuard no_grad;
      still.matrix.select(0, 5).fill_(0.5);
      still.vector.select(0, 5).fill_(0.5);
    }
    for (Run* run : {&grown, &still}) run->steps(5, 10, kAll);
    CHECK(same_bits(grown.matrix, still.matrix));
    CHECK(same_bits(grown.vector, still.vector));
  }
}

TEST_CASE("what a program writes to rows that stay is what trains on, in 16 bits, too", "[optimizer][rows]") {
  for (const RegisteredOptimizer& form : own_optimizers_without_ranks()) {
    if (form.dtype == at::kFloat || form.averages) continue;  // an average goes on from z, wherever y is put
    CAPTURE(form.name);
    Run run(form);
    run.steps(0, 5, kAll);
    Tensor now = run.matrix.detach().clone();
    now.select(0, 2).fill_(3);
    const bool has_nan = has_own_rows(form) && !has(form, "8 bits");
    if (has_nan) now.select(0, 4).fill_(std::numeric_limits<float>::quiet_NaN());
    now.requires_grad_();
    run.fused().replace({{run.matrix, now}}, long_tensor(kAll));
    run.matrix = now;
    const NamedTensors state = run.state();
    const auto remainder = state.find("matrix/remainder"), master = state.find("matrix/master");
    if (remainder != state.end()) CHECK(remainder->second.select(0, 2).eq(0).all().item<bool>());
    if (master != state.end()) CHECK(master->second.select(0, 2).eq(3).all().item<bool>());
    for (auto& group : run.optimizer->param_groups()) group.options().set_lr(0);
    run.steps(5, 6, kAll);
    CHECK(run.matrix.select(0, 2).eq(3).all().item<bool>());
    CHECK(run.matrix.select(0, 4).isnan().all().item<bool>() == has_nan);
    CHECK(run.matrix.select(0, 0).isfinite().all().item<bool>());
  }
}

TEST_CASE("a parameter may lose all of its rows and get others", "[optimizer][rows]") {
  for (const RegisteredOptimizer& form : own_optimizers_without_ranks()) {
    if (has(form, "Muon")) continue;  // whose matrices are not empty
    CAPTURE(form.name);
    Run run(form);
    run.steps(0, 3, kAll);
    run.select({}, 0);
    run.steps(3, 4, {});
    run.select({-1, -1}, 0.5);
    run.steps(4, 6, {0, 1});
    CHECK(run.matrix.sizes() == at::IntArrayRef{2, kColumns});
    CHECK(run.matrix.ne(0.5).any().item<bool>());
  }
}

TEST_CASE("rows that are appended are those that replace would have put behind the others",
          "[optimizer][rows]") {
  for (const RegisteredOptimizer& form : own_optimizers_without_ranks()) {
    CAPTURE(form.name);
    Run appended(form), replaced(form);
    std::vector<int64_t> sources = kAll;
    for (int round = 0; round < 4;
         ++round) {  // 6, 8, 11, 15 rows: behind the first one, room for 12, then for 22
      for (Run* run : {&appended, &replaced}) run->steps(3 * round, 3 * round + 3, sources);
      std::vector<int64_t> rows = long_range(appended.matrix.size(0));
      const int more = 2 + round;
      for (int i = 0; i < more; ++i) rows.push_back(-1), sources.push_back(i);
      replaced.select(rows, 0.5);
      const auto new_rows = [&](const Tensor& known) {
        std::vector<int64_t> sizes = known.sizes().vec();
        sizes.front() = more;
        return torch::full(sizes, 0.5, known.options().requires_grad(false));
      };
      const std::vector<Tensor> now = appended.fused().append_rows(
          {{appended.matrix, new_rows(appended.matrix)}, {appended.vector, new_rows(appended.vector)}});
      appended.matrix = now.at(0), appended.vector = now.at(1);
      CHECK(appended.matrix.is_leaf());
      CHECK(appended.matrix.requires_grad());
      CHECK(appended.fused().parameter_name(appended.matrix) == "matrix");
      CHECK(same_bits(appended.matrix, replaced.matrix));
      CHECK(same_bits(appended.vector, replaced.vector));
      const NamedTensors found = appended.state(), wanted = replaced.state();
      CHECK(found.size() == wanted.size());
      for (const auto& [name, tensor] : wanted) {
        CAPTURE(name);
        CHECK(same_bits(found.at(name), tensor));
      }
    }
    for (Run* run : {&appended, &replaced}) run->steps(12, 15, sources);
    CHECK(same_bits(appended.matrix, replaced.matrix));
    CHECK(same_bits(appended.vector, replaced.vector));
  }
}

TEST_CASE("rows are appended without a byte of new memory while there is room", "[optimizer][rows]") {
  const Tensor more = torch::ones({100, 8});
  for (const bool has_amsgrad : {false, true}) {
    Tensor points = torch::zeros({1000, 8}).requires_grad_();
    FusedAdam optimizer({points}, FusedAdamOptions(0.1).amsgrad(has_amsgrad));
    const auto step = [&] {
      points.mutable_grad() = torch::ones_like(points);
      optimizer.step();
      points.mutable_grad() = Tensor();
    };
    step();
    const CountedCpuMemory counted;
    int times_moved = 0;
    for (int i = 0; i < 50; ++i) {  // to 6000 rows
      const void* const before = points.data_ptr();
      CountedCpuMemory::reset_peak();
      const int64_t live = CountedCpuMemory::live();
      points = optimizer.append_rows({{points, more}}).front();
      const bool has_moved = points.data_ptr() != before;
      times_moved += has_moved ? 1 : 0;
      CHECK((CountedCpuMemory::peak() > live) == has_moved);
      if (i % 7 == 0) step();
    }
    CHECK(points.size(0) == 6000);
    CHECK(times_moved == 3);  // to 2000, 4000 and 8000
  }
}

TEST_CASE("memory that anything else may still look at is not written to", "[optimizer][rows]") {
  // A parameter that lies in a larger tensor of the program's.
  const Tensor whole = torch::full({8, 2}, 7.0);
  const Tensor part = whole.narrow(0, 0, 4).requires_grad_();
  FusedAdam optimizer({part}, FusedAdamOptions(0.1));
  Tensor now = optimizer.append_rows({{part, torch::ones({2, 2})}}).front();
  CHECK(whole.eq(7).all().item<bool>());
  CHECK(now.storage().data() != whole.storage().data());
  // One that has fewer rows than another tensor in the same memory.
  const Tensor all = now, fewer = now.detach().narrow(0, 0, 3).requires_grad_();
  optimizer.replace({{now, fewer}}, long_tensor({0, 1, 2}));
  now = optimizer.append_rows({{fewer, torch::full({2, 2}, 5.0)}}).front();
  CHECK(all.detach().select(0, 3).eq(7).all().item<bool>());
  CHECK(all.detach().select(0, 4).eq(1).all().item<bool>());
  CHECK(now.detach().select(0, 3).eq(5).all().item<bool>());
}

TEST_CASE("what append_rows refuses changes nothing", "[optimizer][rows][mistakes]") {
  Run run(own_optimizers_without_ranks().front());
  run.steps(0, 2, kAll);
  const Tensor more = torch::zeros({2, kColumns});
  const Tensor turned = torch::zeros({3, 4}).t().requires_grad_(), number = torch::zeros({}).requires_grad_();
  run.fused().add_param_group(torch::optim::OptimizerParamGroup({turned, number}));
  using Pairs = std::vector<std::pair<Tensor, Tensor>>;
  const std::vector<std::pair<std::string, Pairs>> mistakes = {
      {"not one of its parameters", {{run.matrix, more}, {more, more}}},
      {"named twice", {{run.matrix, more}, {run.matrix, more}}},
      {"matrix of shape [6, 32], Float on cpu, takes rows like its own",
       {{run.matrix, torch::zeros({2, 31})}}},
      {"takes rows like its own", {{run.matrix, more.to(torch::kDouble)}}},
      {"takes rows like its own", {{run.matrix, Tensor()}}},
      {"do not lie one behind the other", {{run.matrix, more}, {turned, torch::zeros({2, 3})}}},
      {"has no rows, because it is a single number", {{number, torch::zeros({2})}}}};
  const NamedTensors before = run.state();
  for (const auto& [says, pairs] : mistakes) {
    CAPTURE(says);
    const std::string message =
        message_of<InvalidArgument>([&, &given = pairs] { (void)run.fused().append_rows(given); });
    CAPTURE(message);
    CHECK(message.find(says) != std::string::npos);
    const NamedTensors after = run.state();
    CHECK(after.size() == before.size());
    for (const auto& [name, tensor] : before) CHECK(same_bits(after.at(name), tensor));
  }
  std::vector<Tensor> one{torch::ones({3}).requires_grad_()};
  OneBitAdam onebit(one, OneBitAdamOptions(0.01).freeze_step(2));
  CHECK(message_of([&] {
          (void)onebit.append_rows({{one[0], torch::ones({1})}});
        }).find("append_rows is not for 1-bit optimizers") != std::string::npos);
}

TEST_CASE("what replace refuses changes nothing", "[optimizer][rows][mistakes]") {
  const RegisteredOptimizer form = own_optimizers_without_ranks().front();
  Run run(form);
  run.steps(0, 2, kAll);
  const Tensor rows = long_tensor({0, 1, -1});
  const auto fresh = [](at::IntArrayRef sizes) { return torch::zeros(sizes).requires_grad_(); };
  const Tensor matrix = fresh({3, kColumns}), vector = fresh({3});
  using Pairs = std::vector<std::pair<Tensor, Tensor>>;
  struct Mistake {
    std::string says;
    Pairs pairs;
    Tensor rows;
  };
  const std::vector<Mistake> mistakes = {
      {"not one of its parameters", {{matrix, matrix}}, rows},
      {"named twice", {{run.matrix, matrix}, {run.matrix, fresh({3, kColumns})}}, rows},
      {"of shape [6, 32] cannot become one of shape [3, 31]", {{run.matrix, fresh({3, 31})}}, rows},
      {"with 3 rows, vector of shape [6] cannot become one of shape [4]",
       {{run.matrix, matrix}, {run.vector, fresh({4})}},
       rows},
      {"no operation has made", {{run.vector, torch::ones({3}).requires_grad_() * 2}}, rows},
      {"no operation has made", {{run.vector, Tensor()}}, rows},
      {"like it; see requires_grad_()", {{run.vector, torch::ones({3})}}, rows},
      {"vector is Float on cpu, and what takes its place is Double",
       {{run.vector, torch::ones({3}, torch::kDouble).requires_grad_()}},
       rows},
      {"rows from -1 to 6 are asked of vector, which has 6", {{run.vector, vector}}, long_tensor({0, 6, -1})},
      {"rows from -2 to 1", {{run.vector, vector}}, long_tensor({0, 1, -2})},
      {"integers (Long)", {{run.vector, vector}}, rows.to(torch::kInt)},
      {"integers (Long)", {{run.vector, vector}}, rows.view({1, 3})},
      {"integers (Long)", {{run.vector, vector}}, Tensor()},
  };
  const NamedTensors before = run.state();
  for (const Mistake& mistake : mistakes) {
    CAPTURE(mistake.says);
    const std::string message = message_of([&] { run.fused().replace(mistake.pairs, mistake.rows); });
    CAPTURE(message);
    CHECK(message.find(mistake.says) != std::string::npos);
    const NamedTensors after = run.state();
    CHECK(after.size() == before.size());
    for (const auto& [name, tensor] : before) CHECK(same_bits(after.at(name), tensor));
    CHECK(run.fused().parameter_name(run.matrix) == "matrix");
  }
  std::vector<Tensor> one{torch::ones({3}).requires_grad_()};
  OneBitAdam onebit(one, OneBitAdamOptions(0.01).freeze_step(2));
  CHECK(message_of([&] {
          onebit.replace({{one[0], vector}}, rows);
        }).find("not for 1-bit optimizers") != std::string::npos);
}

}  // namespace pacer::testing::replaced_rows
