// Two Sessions, a generator's and a discriminator's, whose losses share a graph: the backward of each leaves
// gradients on the other's parameters.
#include <string>

#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <pacer/pacer.h>

#include "support/catch.h"
#include "support/message_of.h"
#include "support/optimizers/optimizers.h"
#include "support/session/mistakes.h"
#include "support/session/two_layers.h"

namespace pacer::testing::session_shared_graph {
namespace {

using torch::optim::SGD;
using torch::optim::SGDOptions;

torch::nn::Sequential one_layer() {
  torch::manual_seed(8);
  return torch::nn::Sequential(torch::nn::Linear(2, 1));
}

// A generator and a discriminator, alike in every one.
struct Gan {
  Tensor loss_of_discriminator(const Tensor& real, const Tensor& noise) {
    return (discriminator->forward(generator->forward(noise)) - discriminator->forward(real)).mean();
  }
  Tensor loss_of_generator(const Tensor& noise) {
    return discriminator->forward(generator->forward(noise)).square().mean();
  }
  torch::nn::Sequential generator = two_layers(), discriminator = one_layer();
  SGD of_generator{generator->parameters(), SGDOptions(0.1)};
  SGD of_discriminator{discriminator->parameters(), SGDOptions(0.1)};
};

// torch's loop, which clears gradients before each pass.
void train_by_hand(Gan& gan, int64_t steps) {
  for (int64_t step = 0; step < steps; ++step) {
    gan.of_discriminator.zero_grad();
    gan.loss_of_discriminator(batch_of(step, 2), batch_of(step, 3)).backward();
    gan.of_discriminator.step();
    gan.of_generator.zero_grad();
    gan.loss_of_generator(batch_of(step, 3)).backward();
    gan.of_generator.step();
  }
}

void train_in_sessions(Gan& gan, int64_t steps, bool clears) {
  Session of_discriminator(gan.discriminator, gan.of_discriminator);
  Session of_generator(gan.generator, gan.of_generator);
  for (int64_t step = 0; step < steps; ++step) {
    if (clears) gan.of_discriminator.zero_grad();
    auto [real] = of_discriminator.begin(batch_of(step, 2));
    of_discriminator.backward(gan.loss_of_discriminator(real, batch_of(step, 3)));
    of_discriminator.step();
    if (clears) gan.of_generator.zero_grad();
    auto [noise] = of_generator.begin(batch_of(step, 3));
    of_generator.backward(gan.loss_of_generator(noise));
    of_generator.step();
  }
  of_discriminator.finish();
  of_generator.finish();
}

}  // namespace

TEST_CASE("two Sessions whose losses share a graph train as torch's loop does", "[session][gradients]") {
  Gan reference, cleared, left;
  train_by_hand(reference, 4);
  const std::string of_cleared = heard_of([&] { train_in_sessions(cleared, 4, /*clears=*/true); });
  const std::string of_left = heard_of([&] { train_in_sessions(left, 4, /*clears=*/false); });
  for (const Gan* gan : {&cleared, &left}) {
    CHECK(same_bits(gan->discriminator->parameters(), reference.discriminator->parameters()));
    CHECK(same_bits(gan->generator->parameters(), reference.generator->parameters()));
  }
  CHECK(of_cleared == "");
  CHECK(fault_of(of_left, {"0.weight", "zero_grad()", "cleared"}) == "");
  const size_t first = of_left.find("was cleared");
  CHECK(of_left.find("was cleared", of_left.find("was cleared", first + 1) + 1) ==
        std::string::npos);  // one each
}

TEST_CASE("micro-steps of two Sessions that share a graph do not mix", "[session][gradients]") {
  Gan gan;
  Session of_discriminator(gan.discriminator, gan.of_discriminator);
  Session of_generator(gan.generator, gan.of_generator);
  of_discriminator.use(GradientAccumulation(2));
  of_generator.use(GradientAccumulation(2));
  auto [real] = of_discriminator.begin(batch_of(0, 2));
  of_discriminator.backward(gan.loss_of_discriminator(real, batch_of(0, 3)));
  of_discriminator.step();
  auto [noise] = of_generator.begin(batch_of(0, 3));
  of_generator.backward(gan.loss_of_generator(noise));
  of_generator.step();
  const std::string message = message_of([&] {
    auto [again] = of_discriminator.begin(batch_of(0, 2));
    of_discriminator.backward(gan.loss_of_discriminator(again, batch_of(0, 3)));
  });
  CHECK(fault_of(message, {"0.weight", "not this Session's", "detach()"}) == "");
}

}  // namespace pacer::testing::session_shared_graph
