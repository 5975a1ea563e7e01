// Parameters that are not there: what an operation says that comes then, ranks that do not bring the same
// ones in, and all of them together for a while.
#include <mutex>
#include <sstream>

#include <ATen/autocast_mode.h>
#include <torch/serialize.h>

#include <pacer/parallel/shards.h>

#include "support/catch.h"
#include "support/heard_warnings.h"
#include "support/modules/odd_blocks.h"
#include "support/parallel/shard_runs.h"

namespace pacer::testing {
namespace {

// LibTorch's archives share state between threads, as which the ranks run here.
std::mutex archives;

template <class Value>
std::string bytes_of(const Value& value) {
  const std::lock_guard<std::mutex> lock(archives);
  std::ostringstream out;
  torch::save(value, out);
  return out.str();
}
template <class Value>
void load_from(const std::string& text, Value& value) {
  const std::lock_guard<std::mutex> lock(archives);
  std::istringstream in(text);
  torch::load(value, in);
}

// Two ranks with a model of shared out parameters, between two steps.
void between_steps(const std::function<void(OddModel&, Session&, int rank)>& f,
                   std::vector<std::string>& messages) {
  const auto worlds = Communicator::in_process(2, CommunicatorOptions().timeout(std::chrono::seconds(3)));
  messages = run_ranks(2, [&](int rank) {
    torch::manual_seed(5);
    OddModel model((OddOptions()));
    FusedAdamW optimizer(model->named_parameters(), FusedAdamWOptions(0.01));
    Session session(*model, optimizer, worlds[static_cast<size_t>(rank)]);
    session.use(Shards(model->blocks));
    auto [x] = session.begin(torch::ones({2, 5}));
    session.backward(model->forward(x).square().mean());
    session.step();
    f(model, session, rank);
    session.finish();
  });
}

}  // namespace

TEST_CASE("whoever touches a parameter that is not there is told its name", "[shards][blocks][mistakes]") {
  const std::vector<std::pair<std::string, std::function<void(Tensor&)>>> operations = {
      {"+", [](Tensor& w) { (void)(w + 1); }},
      {"sum", [](Tensor& w) { (void)w.sum(); }},
      {"clone", [](Tensor& w) { (void)w.clone(); }},
      {"copy_ from", [](Tensor& w) { torch::zeros_like(w, torch::kCPU).copy_(w); }},
      {"copy_ to", [](Tensor& w) { w.copy_(torch::zeros(w.sizes())); }},
      {"mul_", [](Tensor& w) { w.mul_(2); }},
      {"norm", [](Tensor& w) { (void)w.norm(); }},
      {"_foreach_norm", [](Tensor& w) { (void)torch::_foreach_norm({w}); }},
      {"item", [](Tensor& w) { (void)w.view({-1})[0].item<float>(); }},
      {"data_ptr", [](Tensor& w) { (void)w.data_ptr<float>(); }},
      {"const_data_ptr", [](Tensor& w) { (void)w.const_data_ptr<float>(); }},
      {"accessor",
       [](Tensor& w) {
         const Tensor flat = w.view({-1});
         (void)flat.accessor<float, 1>()[0];
       }},
      {"equal", [](Tensor& w) { (void)w.equal(torch::zeros(w.sizes())); }},
      {"matmul",
       [](Tensor& w) {
         (void)w.reshape({1, -1}).matmul(torch::ones({w.numel(), 1}));
       }},
      {"to another dtype", [](Tensor& w) { (void)w.to(torch::kDouble); }},
      {"cat",
       [](Tensor& w) {
         (void)torch::cat({w, w});
       }},
      {"normal_", [](Tensor& w) { w.normal_(); }},
      {"zero_", [](Tensor& w) { w.zero_(); }},
      {"contiguous copy of a transposed one",
       [](Tensor& w) {
         (void)w.reshape({-1, 1}).t().clone();
       }},
      {"a stream",
       [](Tensor& w) {
         std::ostringstream out;
         out << w;
       }},
      {"save", [](Tensor& w) { bytes_of(w); }},
  };
  std::vector<std::string> messages;
  between_steps(
      [&](OddModel& model, Session&, int) {
        const at::NoGradGuard no_grad;
        for (const char* of : {"blocks.1.up.weight", "head.bias"}) {
          for (const auto& [name, operation] : operations) {
            Tensor parameter = model->named_parameters()[of];
            std::string text = "no error";
            try {
              operation(parameter);
            } catch (const std::exception& error) {
              text = error.what();
            }
            require(text.find(std::string("parameter ") + of + " is shared out") != std::string::npos, name,
                    " of ", of, ": ", text.substr(0, 200));
          }
        }
        std::string text;
        try {
          model->to(torch::kDouble);
        } catch (const std::exception& error) {
          text = error.what();
        }
        require(text.find("is shared out") != std::string::npos, "moved: ", text);
      },
      messages);
  REQUIRE(first_of(messages) == "");
}

TEST_CASE("ranks that take other ways through the model hear of it before anything changes",
          "[shards][blocks][ranks]") {
  const auto messages_of = [](const std::vector<size_t>& of_first, const std::vector<size_t>& of_second,
                              const std::function<void(OddModel&, Session&, int)>& before) {
    std::vector<std::string> messages;
    between_steps(
        [&](OddModel& model, Session& session, int rank) {
          before(model, session, rank);
          auto [x] = session.begin(torch::ones({2, 5}));
          Tensor y = model->entry(x);
          for (const size_t i : rank == 0 ? of_first : of_second) y = model->run(i, y);
          session.backward(model->head(y).square().mean());
          session.step();
        },
        messages);
    return messages;
  };
  const auto nothing = [](OddModel&, Session&, int) {};
  for (const std::string& message : messages_of({0, 1, 2}, {0, 2, 1}, nothing)) {
    CHECK(
        message.find("rank 0 has \"block run number 1: the parameters with blocks.1.scale\", but rank 1 has "
                     "\"block run number 1: the parameters with blocks.2.scale\"") != std::string::npos);
  }
  for (const std::string& message : messages_of({0, 1, 2}, {0, 1}, nothing)) {
    CHECK(message.find("rank 1 has \"nothing more\"") != std::string::npos);
  }
  // Backward reaches a block on one rank only.
  const auto cut_off = [](OddModel& model, Session& session, int rank) {
    auto [x] = session.begin(torch::ones({2, 5}));
    const Tensor first = model->run(0, model->entry(x)), second = model->run(1, first),
                 y = model->run(2, rank == 0 ? second : first + 0 * second.detach());
    session.backward(model->head(y).square().mean());
    session.step();
  };
  for (const std::string& message : messages_of({}, {}, cut_off)) {
    CHECK((message.find("blocks.1.") != std::string::npos || message.find("blocks.0.") != std::string::npos));
  }
  const auto evaluated = [](OddModel& model, Session& session, int rank) {
    if (rank == 1) session.evaluate([&] { return model->forward(torch::ones({2, 5})).sum(); });
  };
  for (const std::string& message : messages_of({0, 1, 2}, {0, 1, 2}, evaluated)) {
    CHECK(message.find("agreement") + message.find("the same blocks") != 2 * std::string::npos);
  }
}

TEST_CASE("all parameters together are read, changed and saved", "[shards][blocks][session]") {
  std::vector<std::string> messages;
  std::vector<std::string> files(2);
  between_steps(
      [&](OddModel& model, Session& session, int rank) {
        {
          const auto whole = session.whole_parameters();
          const at::NoGradGuard no_grad;
          for (Tensor& parameter : model->parameters()) parameter.fill_(0.5);
          files[static_cast<size_t>(rank)] = bytes_of(model);
          (void)session.evaluate([&] { return model->forward(torch::zeros({1, 5})).sum(); });
          for (const Tensor& parameter : model->parameters()) {
            require(parameter.eq(0.5).all().item<bool>(), "an evaluation took them away within the scope");
          }
        }
        const Tensor sum = session.evaluate([&] { return model->forward(torch::zeros({1, 5})).sum(); });
        OddModel plain((OddOptions()));
        load_from(files[static_cast<size_t>(rank)], plain);
        for (const Tensor& parameter : plain->parameters()) {
          require(parameter.eq(0.5).all().item<bool>(), "another value was saved");
        }
        require(sum.equal(plain->forward(torch::zeros({1, 5})).sum()), "evaluation sees other values");
        session.prewarm([&] { return model->forward(torch::ones({2, 5})).sum(); });
        const auto whole = session.whole_parameters();
        for (const Tensor& parameter : model->parameters()) {
          require(parameter.eq(0.5).all().item<bool>() && !parameter.grad().defined(),
                  "prewarm left something");
        }
        std::string text;
        try {
          (void)session.begin(torch::ones({2, 5}));
        } catch (const InvalidArgument& error) {
          text = error.what();
        }
        require(text.find("end its scope") != std::string::npos, "training with whole parameters: ", text);
      },
      messages);
  REQUIRE(first_of(messages) == "");
  REQUIRE(files[0] == files[1]);
}

// autocast's copies of fp32 weights would stay until backward, and with them half of what is saved.
TEST_CASE("fp32 blocks that come and go under autocast are warned of once, 16-bit ones are not",
          "[shards][blocks]") {
  const std::string words = "autocast keeps a 16-bit copy";
  for (const bool casts : {true, false}) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      CAPTURE(casts, dtype);
      const auto worlds = Communicator::in_process(2);
      std::vector<std::string> said(2);
      const auto messages = run_ranks(2, [&](int rank) {
        HeardWarnings ear(said[static_cast<size_t>(rank)]);
        const c10::WarningUtils::WarningHandlerGuard guard(&ear);
        OddModel model((OddOptions()));
        model->to(dtype);
        FusedAdamW optimizer(model->named_parameters(), FusedAdamWOptions(0.01));
        Session session(*model, optimizer, worlds[static_cast<size_t>(rank)]);
        session.use(Shards(model->blocks));
        for (int step = 0; step < 2; ++step) {
          auto [x] = session.begin(torch::ones({2, 5}, dtype));
          at::autocast::set_autocast_enabled(at::kCPU, casts);
          const Tensor loss = model->forward(x).square().mean();
          at::autocast::clear_cache();
          at::autocast::set_autocast_enabled(at::kCPU, false);
          session.backward(loss);
          session.step();
        }
        session.finish();
      });
      REQUIRE(first_of(messages) == "");
      for (const std::string& of_rank : said) {
        const size_t first = of_rank.find(words);
        CHECK((first != std::string::npos) == (casts && dtype == at::kFloat));
        CHECK((first == std::string::npos || of_rank.find(words, first + 1) == std::string::npos));
      }
    }
  }
}

}  // namespace pacer::testing
