// ParameterShards by themselves, of groups whose values come and go: what the defaults mean, and a gathering
// that fails.
#include <chrono>
#include <string>
#include <vector>

#include <pacer/collectives/communication_error.h>
#include <pacer/parallel/parameter_shards.h>

#include "support/catch.h"
#include "support/collectives/ranks.h"
#include "support/optimizers/optimizers.h"

namespace pacer::testing::shards_values {
namespace {

// A group for each of these parameters.
std::vector<ParameterShards::Group> groups_of(const std::vector<Tensor>& parameters) {
  std::vector<ParameterShards::Group> groups;
  for (const Tensor& parameter : parameters) {
    groups.push_back({{"group " + std::to_string(groups.size()), parameter}});
  }
  return groups;
}

std::vector<Tensor> two_parameters() {
  const auto options = torch::TensorOptions().requires_grad(true);
  return {torch::full({6}, 2.0, options), torch::full({3}, 5.0, options)};
}

}  // namespace

TEST_CASE("where not all parameters come together, none stay", "[shards][blocks][ranks]") {
  const auto worlds = Communicator::in_process(2, CommunicatorOptions().timeout(std::chrono::seconds(5)));
  const auto messages = run_ranks(2, [&](int rank) {
    const auto& world = worlds[static_cast<size_t>(rank)];
    const std::vector<Tensor> parameters = two_parameters();
    ParameterShards shards(groups_of(parameters), world);
    shards.keep_parts();
    if (rank == 1) {
      shards.gather(0);
      world->leave("out of memory");
      return;
    }
    std::string message;
    try {
      shards.gather_all();
    } catch (const CommunicationError& error) {
      message = error.what();
    }
    require(message.find("it was to gather the parameters with group 1") != std::string::npos, message);
    require(!shards.all_are_gathered(), "they count as gathered");
    for (size_t group = 0; group < parameters.size(); ++group) {
      require(!shards.is_gathered(group), "group ", group, " stayed");
      message.clear();
      try {
        (void)parameters[group].sum();
      } catch (const std::exception& error) {
        message = error.what();
      }
      require(message.find("is shared out") != std::string::npos, "reading group ", group, ": ", message);
    }
  });
  CHECK(first_of(messages) == "");
}

TEST_CASE("a group leaves after each backward pass, unless it is to stay until the last one",
          "[shards][blocks]") {
  for (const bool keeps : {false, true}) {
    CAPTURE(keeps);
    const std::vector<Tensor> parameters = two_parameters();
    ParameterShardsOptions options;
    if (keeps) options.keep_after_forward(true);
    ParameterShards shards(groups_of(parameters), Communicator::alone(at::kCPU), options);
    shards.keep_parts();
    for (const bool is_last : {false, true}) {
      CAPTURE(is_last);
      Tensor loss = torch::zeros({});
      for (size_t group = 0; group < parameters.size(); ++group) {
        shards.gather(group);
        loss = loss + parameters[group].square().sum();
      }
      ParameterShards::Pass pass;
      pass.is_last = is_last;
      shards.begin_backward(pass);
      for (size_t group = 0; group < parameters.size(); ++group) shards.gather_until_landed(group);
      loss.backward();
      for (size_t group = 0; group < parameters.size(); ++group) {
        CHECK(shards.is_gathered(group) == (keeps && !is_last));
      }
      shards.end_backward();
    }
    shards.wait();
    // The derivative of x^2 is 2 x, in each of two passes.
    for (const auto& part : shards.parts())
      CHECK(part.gradient.eq(part.group == 0 ? 8 : 20).all().item<bool>());
  }
}

TEST_CASE("values that were on their way and not used are not those of the next step", "[shards][blocks]") {
  const std::vector<Tensor> parameters = two_parameters();
  ParameterShards shards(groups_of(parameters), Communicator::alone(at::kCPU));
  shards.keep_parts();
  shards.gather_ahead(1, 1);
  shards.release_all();
  for (const auto& part : shards.parts()) part.values.fill_(7);  // a step
  shards.gather(1);
  CHECK(parameters[1].eq(7).all().item<bool>());
}

TEST_CASE("a window that ends early adds over replicas, unless it is told to stay local", "[shards][nodes]") {
  for (const bool stays_local : {false, true}) {
    CAPTURE(stays_local);
    const auto worlds = Communicator::in_process(2, CommunicatorOptions().ranks_per_node(1));
    const auto messages = run_ranks(2, [&](int rank) {
      const auto& world = worlds[static_cast<size_t>(rank)];
      const Tensor parameter = torch::zeros({3}, torch::TensorOptions().requires_grad(true));
      const auto options = ParameterShardsOptions().may_stay_local({parameter});
      const ParameterShards::Group named = {{"parameter", parameter}};
      ParameterShards shards(named, world->node(), options, world->between_nodes());
      ParameterShards::Pass pass;
      pass.is_last = false;
      if (stays_local) pass.stays_local = true;
      shards.begin_backward(pass);
      (parameter * (rank + 1)).sum().backward();
      shards.end_backward();
      if (stays_local) {
        shards.reduce({}, true);
      } else {
        shards.reduce();
      }
      shards.wait();
      const Tensor& found = shards.parts().front().gradient;
      require(found.eq(stays_local ? rank + 1 : 3).all().item<bool>(), "rank ", rank, " has ", found);
    });
    CHECK(first_of(messages) == "");
  }
}

}  // namespace pacer::testing::shards_values
