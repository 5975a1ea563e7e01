// Steps of C++ for tests/python: parameters and gradients by a formula that is exact in fp32, so that Python
// computes the same ones.
//
//   pacer-python-reference OPTIMIZER DTYPE FILE   writes the parameters after five steps; of a 1-bit
//                                                 optimizer after five of warm-up and ten compressed ones of
//                                                 two ranks, which are threads
//   pacer-python-reference LayerDrop fp32 FILE    what four gated blocks make of a vector, step by step
//   pacer-python-reference Rates fp64 FILE        a row of 1000 numbers for each of some schedules
//   pacer-python-reference Averages fp32 FILE     a row for each of some averages of 30 vectors
//   pacer-python-reference Session OPTIMIZER FOLDER   resumes from the folder's newest checkpoint, trains for
//                                                 three steps and saves; OneBitAdam: two ranks
//                                                 resume or start, train to step 9 and save after 6 and 9
#include <cstdio>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <torch/torch.h>

#include <pacer/checkpoints/checkpoints.h>
#include <pacer/collectives/communicator.h>
#include <pacer/hooks/weight_average.h>
#include <pacer/optimizers/optimizers.h>
#include <pacer/schedulers/layer_drop.h>
#include <pacer/schedulers/learning_rate_schedule.h>
#include <pacer/schedulers/vary.h>
#include <pacer/session/session.h>

namespace {

using World = std::shared_ptr<pacer::Communicator>;

torch::Tensor numbers(int64_t count, int64_t salt, torch::ScalarType dtype) {
  const auto index = torch::arange(count, torch::kInt64);
  return (((index * 7919 + salt * 104729) % 2001 - 1000).to(torch::kFloat) / 1024).to(dtype);
}

template <class Optimizer, class Options>
std::unique_ptr<torch::optim::Optimizer> make(const std::vector<torch::Tensor>& parameters) {
  return std::make_unique<Optimizer>(parameters, Options(0.01).weight_decay(0.1));
}

template <class Optimizer, class Options>
std::unique_ptr<torch::optim::Optimizer> make(const std::vector<torch::Tensor>& parameters,
                                              const World& world) {
  const auto options = Options(0.01).weight_decay(0.1).freeze_step(5).compress_vectors(true);
  return std::make_unique<Optimizer>(parameters, options, world);
}

std::unique_ptr<torch::optim::Optimizer> make(const std::string& name,
                                              const std::vector<torch::Tensor>& parameters,
                                              const World& world) {
  using namespace pacer;
  if (name == "FusedAdam") return make<FusedAdam, FusedAdamOptions>(parameters);
  if (name == "FusedAdamW") return make<FusedAdamW, FusedAdamWOptions>(parameters);
  if (name == "FusedLamb") return make<FusedLamb, FusedLambOptions>(parameters);
  if (name == "OneBitAdam") return make<OneBitAdam, OneBitAdamOptions>(parameters, world);
  return make<OneBitLamb, OneBitLambOptions>(parameters, world);
}

torch::Tensor train(const std::string& name, torch::ScalarType dtype, int64_t steps, const World& world) {
  const std::vector<int64_t> sizes = {1, 7, 1000, 5000};
  std::vector<torch::Tensor> parameters;
  for (size_t i = 0; i < sizes.size(); ++i) {
    parameters.push_back(numbers(sizes[i], static_cast<int64_t>(i), dtype).requires_grad_());
  }
  const auto optimizer = make(name, parameters, world);
  const int64_t rank = world ? world->rank() : 0;
  for (int64_t step = 0; step < steps; ++step) {
    for (size_t i = 0; i < sizes.size(); ++i) {
      const int64_t salt = 100 * (step + 1) + 10 * rank + static_cast<int64_t>(i);
      parameters[i].mutable_grad() = numbers(sizes[i], salt, dtype);
    }
    optimizer->param_groups()[0].options().set_lr(0.01 / static_cast<double>(step + 1));
    optimizer->step();
  }
  return torch::cat(parameters).detach();
}

torch::Tensor gated() {
  pacer::LayerDrop layer_drop(pacer::LayerDropOptions().theta_bar(0.5).gamma(0.1).seed(7));
  for (int i = 0; i < 4; ++i) layer_drop->add();
  std::vector<torch::Tensor> results;
  for (int64_t step = 0; step < 20; ++step) {
    for (int64_t micro_step = 0; micro_step < 2; ++micro_step) {
      pacer::Progress progress;
      progress.step = step;
      progress.micro_step = micro_step;
      progress.micro_steps = 2;
      layer_drop->set_progress(progress);
      torch::Tensor x = numbers(16, step, torch::kFloat);
      for (int64_t i = 0; i < 4; ++i) {
        x = layer_drop->gate(i, x, [i](const torch::Tensor& h) { return torch::tanh(h) + i; });
      }
      results.push_back(x);
    }
  }
  return torch::stack(results);
}

torch::Tensor rates() {
  using namespace pacer;
  using Options = LearningRateScheduleOptions;
  std::vector<torch::Tensor> rows;
  const auto add_values = [&](const auto& value) {
    std::vector<double> row;
    Progress progress;
    for (; progress.step < 1000; ++progress.step) row.push_back(value(progress));
    rows.push_back(torch::tensor(row, torch::kDouble));
  };
  const auto add = [&](const LearningRateSchedule& schedule) {
    add_values([&](const Progress& progress) { return schedule.factor(progress); });
  };
  add(warmup_cosine_restarts(Options().cycle_steps(70).end_factor(0.1)));
  add(warmup_cosine_restarts(Options().cycle_steps(30).cycle_growth(2).end_factor(0.1)));
  add(one_cycle({250, 1000}));
  add(one_cycle(Options(400, 1000).start_factor(0.1).end_factor(0.001), Decay::linear));
  add(constant_schedule({100})
          .then(300, warmup_cosine_restarts(Options().cycle_steps(70).end_factor(0.1)))
          .then(600, warmup_exponential(Options().gamma(0.5).every(10)))
          .then(800, one_cycle({50, 200})));
  for (const Decay decay : {Decay::linear, Decay::cosine, Decay::halving, Decay::minus_sqrt}) {
    add(warmup_stable_decay(Options(100, 900).decay_steps(300).end_factor(0.1), decay));
  }
  add(warmup_stable_decay(Options(100, 900).decay_steps(300).end_factor(0.1).power(1.2), Decay::polynomial));
  const Vary momentum(VaryOptions("momentum").at_zero(0.95).at_one(0.85),
                      one_cycle(Options(250, 1000).start_factor(0).end_factor(0)));
  add_values([&](const Progress& progress) { return momentum.value(progress); });
  return torch::stack(rows);
}

struct Weights : torch::nn::Module {
  explicit Weights(const torch::Tensor& values) : values(register_parameter("values", values)) {}
  torch::Tensor values;
};

// What an average is after 30 steps, whose weights are numbers.
torch::Tensor averaged(const pacer::WeightAverageOptions& options) {
  Weights weights(torch::zeros(1000));
  torch::optim::SGD optimizer(weights.parameters(), 0.0);
  const auto average = std::make_shared<pacer::WeightAverage>(options);
  pacer::Session session(weights, optimizer);
  session.use(average);
  for (int64_t step = 0; step < 30; ++step) {
    {
      const torch::NoGradGuard no_grad;
      weights.values.copy_(numbers(1000, step, torch::kFloat));
    }
    auto [x] = session.begin(torch::ones(1));
    session.backward((weights.values * x).sum());
    session.step();
  }
  return average->averages().at("values");
}

struct NetImpl : torch::nn::Module {
  torch::nn::Linear up{register_module("up", torch::nn::Linear(16, 32))};
  torch::nn::Linear down{register_module("down", torch::nn::Linear(32, 8))};
  torch::Tensor scale = register_buffer("scale", torch::ones(8));

  torch::Tensor forward(const torch::Tensor& x) { return down(torch::tanh(up(x))) * scale; }
};
TORCH_MODULE(Net);

template <class Optimizer, class Options>
void go_on(Options options, const std::string& folder) {
  Net net;
  Optimizer optimizer(net->named_parameters(), std::move(options));
  pacer::Session session(*net, optimizer);
  session.use(pacer::Checkpoints(folder));
  session.resume();
  const int64_t first = session.progress().step;
  for (int64_t step = first; step < first + 3; ++step) {
    auto [x, y] = session.begin(numbers(64, step, torch::kFloat).view({4, 16}) + torch::rand(1),
                                numbers(32, step + 50, torch::kFloat).view({4, 8}));
    session.backward(torch::mse_loss(net->forward(x), y));
    session.step();
  }
  session.finish();
}

// One of two ranks that train OneBitAdam with a Session to step 9, from the newest checkpoint if there is
// one.
void train_rank(const World& world, const std::string& folder) {
  Net net;
  int64_t salt = 0;
  for (torch::Tensor& p : net->parameters()) {
    p.set_data((numbers(p.numel(), salt++, torch::kFloat) / 4).view(p.sizes()));
  }
  pacer::OneBitAdam optimizer(net->named_parameters(), pacer::OneBitAdamOptions(0.01).freeze_step(5), world);
  pacer::Session session(*net, optimizer, world);
  session.use(pacer::Checkpoints(pacer::CheckpointsOptions(folder).every(6)));
  session.resume();
  for (int64_t step = session.progress().step; step < 9; ++step) {
    auto [x, y] = session.begin(numbers(64, step + 10 * world->rank(), torch::kFloat).view({4, 16}),
                                numbers(32, step + 50, torch::kFloat).view({4, 8}));
    session.backward(torch::mse_loss(net->forward(x), y));
    session.step();
  }
  session.finish();
}

template <class Function>
void on_two_ranks(const Function& function) {
  const auto ranks = pacer::Communicator::in_process(2);
  std::thread second([&] { function(ranks[1]); });
  function(ranks[0]);
  second.join();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  const std::string name = argv[1];
  if (name == "Session") {
    using namespace pacer;
    const std::string optimizer = argv[2];
    if (optimizer == "FusedAdamW") go_on<FusedAdamW>(FusedAdamWOptions(0.5), argv[3]);
    if (optimizer == "OneBitAdam") on_two_ranks([&](const World& world) { train_rank(world, argv[3]); });
    if (optimizer == "FusedLamb") go_on<FusedLamb>(FusedLambOptions(0.5), argv[3]);
    return 0;
  }
  const auto dtype = std::string(argv[2]) == "bf16" ? torch::kBFloat16 : torch::kFloat;
  torch::Tensor trained;
  if (name.rfind("OneBit", 0) == 0) {
    on_two_ranks([&](const World& world) {
      const torch::Tensor result = train(name, dtype, 15, world);
      if (world->rank() == 0) trained = result;
    });
  } else if (name == "LayerDrop") {
    trained = gated();
  } else if (name == "Rates") {
    trained = rates();
  } else if (name == "Averages") {
    trained = torch::stack({averaged(pacer::ema(0.9)), averaged(pacer::tail_average(1)),
                            averaged(pacer::tail_average(12).every(3))});
  } else {
    trained = train(name, dtype, 5, nullptr);
  }
  const std::vector<char> bytes = torch::pickle_save(trained);
  std::ofstream(argv[3], std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  return 0;
}
