// Models whose batch norms are joined over ranks: what is replaced and what is kept, what is refused on all ranks, and
// a convolutional net that is trained by two and three ranks as by one process.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>

#include <pacer/pacer.h>

#include "support/captured_stderr.h"
#include "support/catch.h"
#include "support/collectives/ranks.h"
#include "support/message_of.h"
#include "support/optimizers/optimizers.h"
#include "support/temporary_folder.h"

namespace pacer::testing::convert_sync_batch_norm_tests {
namespace {

using Catch::Matchers::ContainsSubstring;
using modules::SyncBatchNorm;
using modules::SyncBatchNormImpl;
using torch::nn::BatchNorm1d;
using torch::nn::BatchNorm2d;
using torch::nn::Sequential;
using Strings = std::vector<std::string>;

struct BlockImpl : torch::nn::Module {
  Sequential inner{
      register_module("inner", Sequential(torch::nn::Conv2d(4, 4, 3), BatchNorm2d(4), torch::nn::ReLU()))};
  Tensor forward(const Tensor& x) { return inner->forward(x); }
};
TORCH_MODULE(Block);

// Two convolutions with batch norms of torch, and one of pacer's that is a member: x [N, 1, 6, 6] -> [N, 3].
struct NetImpl : torch::nn::Module {
  NetImpl() {
    torch::manual_seed(7);
    body =
        register_module("body", Sequential(torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 4, 3).bias(false)),
                                           BatchNorm2d(4), torch::nn::ReLU(), Block()));
    norm = register_module("norm", SyncBatchNorm(16));
    head = register_module("head", torch::nn::Linear(16, 3));
    to(torch::kDouble);
  }
  Tensor forward(const Tensor& x) { return head(norm(body->forward(x).flatten(1))); }
  Sequential body = nullptr;
  SyncBatchNorm norm = nullptr;
  torch::nn::Linear head = nullptr;
};
TORCH_MODULE(Net);

// Rows of batch number `step`; those of rank r of W are every W-th from the r-th on.
Tensor images(int64_t step, int64_t rows) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(step));
  return torch::randn({rows, 1, 6, 6}, generator, torch::kDouble) * 2 + 1;
}
Tensor loss_of(Net& net, const Tensor& x) {
  const Tensor target = torch::stack({x.mean({1, 2, 3}), x.amax({1, 2, 3}), x.square().mean({1, 2, 3})}, 1);
  return torch::mse_loss(net(x), target);
}

constexpr int64_t kRows = 12, kSteps = 6;

FusedAdamWOptions adam_options() { return FusedAdamWOptions(0.01).weight_decay(0.1); }

// A run of one process or of one rank, whose window has two micro-batches.
void train(Net& net, Session& session, int rank, int ranks) {
  for (int64_t step = session.progress().step; step < kSteps; ++step) {
    for (int64_t half = 0; half < 2; ++half) {
      const Tensor all = images(2 * step + half, kRows);
      auto [x] = session.begin(all.slice(0, rank, kRows, ranks).contiguous());
      session.backward(loss_of(net, x));
      session.step();
    }
  }
}

// The net after a training by so many ranks, that of rank 0.
Net trained(int ranks) {
  const CapturedStderr quiet;
  std::vector<Net> nets;
  for (int rank = 0; rank < ranks; ++rank) nets.emplace_back();
  const auto worlds = Communicator::in_process(ranks);
  const auto messages = run_ranks(ranks, [&](int rank) {
    const auto r = static_cast<size_t>(rank);
    convert_sync_batch_norm(*nets[r], worlds[r]);
    FusedAdamW optimizer(nets[r]->parameters(), adam_options());
    Session session(*nets[r], optimizer, worlds[r]);
    // Buffers need nobody's word: all ranks make the same ones.
    session.use(DataParallel(DataParallelOptions().sync_buffers(false)));
    session.use(GradientAccumulation(2)).use(GradientClipping(1.0));
    train(nets[r], session, rank, ranks);
    session.finish();
  });
  REQUIRE(first_of(messages) == "");
  for (const Net& net : nets) {
    const auto own = net->named_buffers(), first = nets[0]->named_buffers();
    for (const auto& item : first) CHECK(item.value().equal(own[item.key()]));
  }
  return nets[0];
}

double largest_difference(const Net& a, const Net& b) {
  double most = 0;
  const auto compare = [&](const auto& one, const auto& other) {
    REQUIRE(one.keys() == other.keys());
    for (const auto& item : one) {
      const Tensor difference = item.value().to(torch::kDouble) - other[item.key()].to(torch::kDouble);
      most = std::max(most, difference.abs().max().template item<double>());
    }
  };
  compare(a->named_parameters(), b->named_parameters());
  compare(a->named_buffers(), b->named_buffers());
  return most;
}

const std::shared_ptr<Communicator>& alone() {
  static const std::shared_ptr<Communicator> one = Communicator::alone(torch::kCPU);
  return one;
}

}  // namespace

TEST_CASE("batch norms of Sequentials are replaced by layers with their tensors, names and mode",
          "[sync_batch_norm]") {
  Net net;
  const auto parameters = net->named_parameters(), buffers = net->named_buffers();
  BatchNorm2d former(std::dynamic_pointer_cast<torch::nn::BatchNorm2dImpl>(net->body->ptr(1)));
  former->options.momentum(0.25).eps(0.5);
  former->eval();
  former->weight.requires_grad_(false);
  CHECK(convert_sync_batch_norm(*net, alone()) == Strings{"body.1", "body.3.inner.1", "norm"});
  CHECK(net->named_parameters().keys() == parameters.keys());
  CHECK(net->named_buffers().keys() == buffers.keys());
  for (const auto& item : parameters) CHECK(net->named_parameters()[item.key()].is_same(item.value()));
  for (const auto& item : buffers) CHECK(net->named_buffers()[item.key()].is_same(item.value()));
  // What forward calls and what is registered are one.
  const auto layer = net->body->ptr<SyncBatchNormImpl>(1);
  CHECK(net->body->named_children()["1"] == layer);
  CHECK(*layer->options.momentum() == 0.25);
  CHECK(layer->options.eps() == 0.5);
  CHECK(!layer->is_training());
  CHECK(!layer->weight.requires_grad());
  CHECK(net->norm->exchange() != nullptr);
  CHECK(layer->exchange() == net->norm->exchange());
  // Again: nothing is left to replace.
  CHECK(convert_sync_batch_norm(*net, alone()) == Strings{"body.1", "body.3.inner.1", "norm"});
  CHECK(net->body->ptr<SyncBatchNormImpl>(1) == layer);
}

TEST_CASE("a batch norm that two Sequentials share stays one", "[sync_batch_norm]") {
  const BatchNorm1d shared(4);
  const Sequential first(shared), second(torch::nn::Linear(4, 4), shared);
  torch::nn::ModuleList model(first, second);
  CHECK(convert_sync_batch_norm(*model, alone()) == Strings{"0.0"});
  CHECK(first->ptr(0) == second->ptr(1));
  CHECK(first->ptr<SyncBatchNormImpl>(0)->weight.is_same(shared->weight));
}

TEST_CASE("batch norms of one, two and three dimensions are replaced, and a model without any is left alone",
          "[sync_batch_norm]") {
  Sequential model(BatchNorm1d(2), BatchNorm2d(3), torch::nn::BatchNorm3d(4), torch::nn::Linear(2, 2));
  CHECK(convert_sync_batch_norm(*model, alone()) == Strings{"0", "1", "2"});
  CHECK(convert_sync_batch_norm(*torch::nn::Linear(2, 2), alone()).empty());
}

TEST_CASE("a batch norm that a module holds itself is refused on all ranks, and nothing changes",
          "[sync_batch_norm]") {
  struct Holder : torch::nn::Module {
    Sequential before{register_module("before", Sequential(BatchNorm1d(3)))};
    BatchNorm2d bn1{register_module("bn1", BatchNorm2d(3))};
  };
  const auto worlds = Communicator::in_process(2);
  std::vector<std::shared_ptr<torch::nn::Module>> models = {std::make_shared<Holder>(),
                                                            torch::nn::Linear(2, 2).ptr()};
  const auto messages = run_ranks(2, [&](int rank) {
    const auto r = static_cast<size_t>(rank);
    RANK_REQUIRE(
        message_of<InvalidArgument>([&] { convert_sync_batch_norm(*models[r], worlds[r]); })
            .find("rank 0 could not convert the batch norms of its model: convert_sync_batch_norm: bn1 is a "
                  "batch norm of torch::nn outside of a torch::nn::Sequential") == 0);
    worlds[r]->barrier();  // which all can still use
  });
  CHECK(first_of(messages) == "");
  CHECK(models[0]->named_children()["before"]->named_children()["0"]->as<torch::nn::BatchNorm1dImpl>() !=
        nullptr);

  const std::string words = "outside of a torch::nn::Sequential";
  torch::nn::ModuleList list(BatchNorm1d(3));
  CHECK_THAT(message_of<InvalidArgument>([&] { convert_sync_batch_norm(*list, alone()); }),
             ContainsSubstring("0 is a batch norm") && ContainsSubstring(words));
  CHECK_THAT(message_of<InvalidArgument>([&] { convert_sync_batch_norm(*BatchNorm1d(3), alone()); }),
             ContainsSubstring("the model itself is a batch norm of torch::nn"));
  CHECK_THAT(message_of<InvalidArgument>([&] { convert_sync_batch_norm(*list, nullptr); }),
             ContainsSubstring("needs the Communicator of the ranks; it is null"));
}

TEST_CASE("ranks whose batch norms differ are told where before anything is changed", "[sync_batch_norm]") {
  const auto worlds = Communicator::in_process(2);
  std::vector<Sequential> models;
  models.emplace_back(BatchNorm1d(3));
  models.emplace_back(BatchNorm1d(torch::nn::BatchNormOptions(3).eps(0.5)));
  const auto messages = run_ranks(2, [&](int rank) {
    const auto r = static_cast<size_t>(rank);
    convert_sync_batch_norm(*models[r], worlds[r]);
  });
  for (const std::string& message : messages) {
    CHECK_THAT(message,
               ContainsSubstring("batch norm 0") && ContainsSubstring("3 channels, eps 0.5, momentum 0.1"));
  }
  for (const Sequential& model : models) CHECK(model->ptr(0)->as<SyncBatchNormImpl>() == nullptr);
}

TEST_CASE("two and three ranks train a net with batch norms as one process with the whole batch",
          "[sync_batch_norm][session][ranks]") {
  const Net one = trained(1);
  // In fp64 a step differs by some 1e-15, by the order of sums; Adam divides by roots of squares of gradients, so what
  // is left of that after six steps is far from what statistics of a rank's own rows would make.
  for (const int ranks : {2, 3}) CHECK(largest_difference(trained(ranks), one) < 1e-9);
}

TEST_CASE("ranks with unequal rows, weighted by them, train as one process",
          "[sync_batch_norm][session][ranks]") {
  const CapturedStderr quiet;
  const auto run = [](int ranks) {
    std::vector<Net> nets;
    for (int rank = 0; rank < ranks; ++rank) nets.emplace_back();
    const auto worlds = Communicator::in_process(ranks);
    const auto messages = run_ranks(ranks, [&](int rank) {
      const auto r = static_cast<size_t>(rank);
      convert_sync_batch_norm(*nets[r], worlds[r]);
      FusedSgd optimizer(nets[r]->parameters(), FusedSgdOptions(0.01));
      Session session(*nets[r], optimizer, worlds[r]);
      session.use(GradientAccumulation(GradientAccumulationOptions(1).weight_by_tokens(true)));
      for (int64_t step = 0; step < 3; ++step) {
        const Tensor all = images(step, kRows);
        auto [x] = session.begin(ranks == 1 ? all : rank == 0 ? all.narrow(0, 0, 9) : all.narrow(0, 9, 3));
        session.count_tokens(x.size(0));
        session.backward(loss_of(nets[r], x));
        session.step();
      }
      session.finish();
    });
    REQUIRE(first_of(messages) == "");
    return nets[0];
  };
  CHECK(largest_difference(run(2), run(1)) < 1e-11);
}

TEST_CASE(
    "checkpoints and files of weights of a net before and after its batch norms are joined are the same",
    "[sync_batch_norm][session][resume]") {
  const CapturedStderr quiet;
  const TemporaryFolder folder;
  const auto begin = [&](Session& session) {
    session.use(Checkpoints(CheckpointsOptions(folder.path("run")).every(2).synchronous(true)));
    return session.resume().value_or(0);
  };
  Net plain;
  {
    FusedAdamW optimizer(plain->parameters(), adam_options());
    Session session(*plain, optimizer);
    CHECK(begin(session) == 0);
    auto [x] = session.begin(images(0, kRows));
    session.backward(loss_of(plain, x));
    session.step();
    session.finish();
  }
  const auto worlds = Communicator::in_process(2);
  std::vector<Net> nets(2, Net(nullptr));
  const auto messages = run_ranks(2, [&](int rank) {
    const auto r = static_cast<size_t>(rank);
    Net net;
    nets[r] = net;
    convert_sync_batch_norm(*net, worlds[r]);
    FusedAdamW optimizer(net->parameters(), adam_options());
    Session session(*net, optimizer, worlds[r]);
    RANK_REQUIRE(begin(session) == 1);
    RANK_REQUIRE(largest_difference(net, plain) == 0);
    auto [x] = session.begin(images(1, kRows).slice(0, rank, kRows, 2).contiguous());
    session.backward(loss_of(net, x));
    session.step();
    session.finish();
  });
  REQUIRE(first_of(messages) == "");
  FusedAdamW optimizer(plain->parameters(), adam_options());
  Session session(*plain, optimizer);
  CHECK(begin(session) == 2);
  CHECK(largest_difference(nets[0], plain) == 0);

  save_weights(*nets[0], folder.path("joined.safetensors"));
  Net other;
  load_weights(*other, folder.path("joined.safetensors"));
  CHECK(largest_difference(other, plain) == 0);
  save_weights(*Net(), folder.path("plain.safetensors"));
  load_weights(*nets[0], folder.path("plain.safetensors"));
  CHECK(largest_difference(nets[0], Net()) == 0);
}

TEST_CASE("update_batch_norm measures the statistics of all ranks' batches",
          "[sync_batch_norm][weight_average]") {
  const auto worlds = Communicator::in_process(2);
  std::vector<Sequential> models;
  for (int rank = 0; rank < 2; ++rank) models.emplace_back(BatchNorm1d(1));
  const auto messages = run_ranks(2, [&](int rank) {
    const auto r = static_cast<size_t>(rank);
    convert_sync_batch_norm(*models[r], worlds[r]);
    update_batch_norm(*models[r], [&] {
      for (const double value : {0.0, 4.0})
        models[r]->forward(torch::tensor({{value + rank}, {value - rank}}, torch::kFloat));
    });
  });
  REQUIRE(first_of(messages) == "");
  for (const Sequential& model : models) {
    const auto norm = model->ptr<SyncBatchNormImpl>(0);
    CHECK(norm->running_mean.item<double>() == Catch::Approx(2.0));       // of batches around 0 and 4
    CHECK(norm->running_var.item<double>() == Catch::Approx(2.0 / 3.0));  // of 0, 0, 1 and -1, by 4 - 1
    CHECK(norm->num_batches_tracked.item<int64_t>() == 2);
    CHECK(*norm->options.momentum() == 0.1);
  }
}

}  // namespace pacer::testing::convert_sync_batch_norm_tests
