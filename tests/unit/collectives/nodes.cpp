// Nodes: who shares one, and the groups of their ranks, beside loops over what ranks hold.
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>

#include <pacer/collectives/communicator.h>
#include <pacer/collectives/detail/in_process_transport.h>
#include <pacer/collectives/gradient_bucketer.h>

#include "support/catch.h"
#include "support/collectives/ranks.h"
#include "support/optimizers/optimizers.h"

namespace pacer::testing::nodes {
namespace {

struct Shape {
  int world_size, ranks_per_node;
};
const std::vector<Shape> kShapes = {{1, 1}, {2, 1}, {2, 2}, {4, 2}, {6, 2}, {6, 3}, {4, 4}};

Ranks world_of(const Shape& shape) {
  return Communicator::in_process(shape.world_size,
                                  CommunicatorOptions().ranks_per_node(shape.ranks_per_node));
}

Tensor numbers_of(int rank, int64_t size) {
  return ((at::arange(size, at::kDouble) * 0.7 + rank * 1.3).sin() * (rank + 1)).to(at::kFloat);
}

// ((x0 + x1) + x2) ... over the ranks of a node, each rounded first.
Tensor node_sum(int node, const Shape& shape, int64_t size, at::ScalarType wire) {
  const int first = node * shape.ranks_per_node;
  Tensor sum = numbers_of(first, size).to(wire);
  for (int rank = first + 1; rank < first + shape.ranks_per_node; ++rank) {
    sum = sum + numbers_of(rank, size).to(wire);
  }
  return sum.to(at::kFloat);
}

}  // namespace

TEST_CASE("sums inside nodes are those of their ranks, in order", "[collectives][nodes]") {
  for (const Shape& shape : kShapes) {
    for (const at::ScalarType wire : {at::kFloat, at::kBFloat16}) {
      CAPTURE(shape.world_size, shape.ranks_per_node, wire);
      const Ranks ranks = world_of(shape);
      REQUIRE(first_of(run_ranks(shape.world_size, [&](int rank) {
                Communicator& node = *ranks[static_cast<size_t>(rank)]->node();
                // An even cut, a last chunk that is short, fewer elements than ranks, none.
                const std::vector<Tensor> tensors = {numbers_of(rank, 12), numbers_of(rank, 0),
                                                     numbers_of(rank, 1001), numbers_of(rank, 1)};
                const auto ordered = CollectiveOptions().ordered_sum(true);
                node.all_reduce_coalesced(tensors, wire, ordered).wait();
                node.all_reduce_coalesced({tensors[1]}, wire, ordered).wait();
                for (const Tensor& tensor : tensors) {
                  const Tensor wanted = node_sum(rank / shape.ranks_per_node, shape, tensor.numel(), wire);
                  require(same_bits(tensor, wanted), "another sum of ", tensor.numel());
                }
                const Tensor lies = numbers_of(rank, 1001);
                node.all_reduce(lies, ordered).wait();
                require(same_bits(lies, node_sum(rank / shape.ranks_per_node, shape, 1001, at::kFloat)),
                        "another sum in place");
              })) == "");
    }
  }
}

TEST_CASE("what is gathered inside nodes and exchanged between them is where it belongs",
          "[collectives][nodes]") {
  for (const Shape& shape : kShapes) {
    CAPTURE(shape.world_size, shape.ranks_per_node);
    const Ranks ranks = world_of(shape);
    const int per_node = shape.ranks_per_node, nodes = shape.world_size / per_node;
    REQUIRE(first_of(run_ranks(shape.world_size, [&](int rank) {
              Communicator& world = *ranks[static_cast<size_t>(rank)];
              require(world.ranks_per_node() == per_node, "other nodes");
              const int node = rank / per_node, number = rank % per_node;
              std::vector<Tensor> of_node, of_others, sent, from_others;
              for (int i = 0; i < per_node; ++i) of_node.push_back(numbers_of(node * per_node + i, 5));
              for (int k = 0; k < nodes; ++k) {
                of_others.push_back(numbers_of(k * per_node + number, 5));
                sent.push_back(numbers_of(rank, 3) + 100 * k);  // for node k
                from_others.push_back(numbers_of(k * per_node + number, 3) + 100 * node);
              }
              const Tensor gathered = at::zeros({per_node * 5}), between = at::zeros({nodes * 5});
              const Tensor exchanged = at::zeros({nodes * 3});
              world.node()->all_gather(gathered, numbers_of(rank, 5)).wait();
              world.between_nodes()->all_gather(between, numbers_of(rank, 5)).wait();
              world.between_nodes()->all_to_all(exchanged, at::cat(sent)).wait();
              require(same_bits(gathered, at::cat(of_node)), "gathered something else");
              require(same_bits(between, at::cat(of_others)), "gathered something else between nodes");
              require(same_bits(exchanged, at::cat(from_others)), "exchanged something else");
              require(traffic_of(world, "all_gather").bytes_sent == 20 * (per_node - 1 + nodes - 1) &&
                          traffic_of(world, "all_to_all").bytes_sent == 12 * (nodes - 1),
                      "counted other bytes");
              require(world.node() == world.node(), "made the group of a node twice");
              require(world.node()->ranks_per_node() == per_node && world.node()->local_size() == per_node &&
                          world.between_nodes()->ranks_per_node() == 1 &&
                          world.between_nodes()->rank() == node && world.node()->rank() == number,
                      "other places in the groups");
            })) == "");
  }
}

TEST_CASE("nodes that cannot be are refused", "[collectives][nodes]") {
  for (const int wrong : {3, 5, 0, -1}) {
    CAPTURE(wrong);
    CHECK(contains(refusal([&] { Communicator::in_process(4, CommunicatorOptions().ranks_per_node(wrong)); }),
                   "ranks_per_node"));
  }
  CHECK(contains(
      refusal([] { Communicator::from_file("unused", 0, 1, CommunicatorOptions().ranks_per_node(2)); }),
      "1 ranks cannot be nodes of 2"));
  CHECK(Communicator::in_process(4)[2]->ranks_per_node() == 4);
  CHECK(Communicator::alone(at::kCPU)->ranks_per_node() == 1);

  // Nodes with different numbers of ranks.
  detail::Connection connection = detail::connect_in_process(1).front();
  connection.ranks_per_node = 0;
  Communicator world(connection, {});
  CHECK(contains(refusal([&] { world.node(); }), "as many ranks"));
  CHECK(contains(refusal([&] { world.between_nodes(); }), "as many ranks"));
  CHECK(world.traffic().empty());
  CHECK(world.split(0, 0)->ranks_per_node() == 1);  // a rank by itself is a node
}

TEST_CASE("a bucketer adds gradients over the ranks of a node while it is told to", "[collectives][nodes]") {
  struct Case {
    at::ScalarType dtype;
    bool in_place;
    std::optional<at::ScalarType> wire;
  };
  for (const Case& c :
       {Case{at::kFloat, false, {}}, Case{at::kFloat, true, {}}, Case{at::kFloat, false, at::kBFloat16},
        Case{at::kFloat, true, at::kBFloat16}, Case{at::kHalf, false, {}}}) {
    CAPTURE(c.dtype, c.in_place, c.wire.has_value());
    const Shape shape{4, 2};
    const Ranks ranks = world_of(shape);
    const auto number = [&](int rank, int window) { return static_cast<float>((1 << rank) + 16 * window); };
    REQUIRE(first_of(run_ranks(4, [&](int rank) {
              std::vector<Tensor> parameters;
              GradientBucketer::NamedParameter named[2];
              for (int i = 0; i < 2; ++i) {
                parameters.push_back(at::zeros({3, 5 + i}, c.dtype).requires_grad_());
                named[i] = {std::to_string(i), parameters.back()};
              }
              const auto options = BucketOptions().in_place(c.in_place).wire_dtype(c.wire);
              GradientBucketer bucketer({named[0], named[1]}, ranks[static_cast<size_t>(rank)], options,
                                        {parameters[1]});
              for (int window = 0; window < 4; ++window) {
                const auto scope = window % 2 == 1 ? GradientScope::node : GradientScope::world;
                bucketer.set_scope(scope);
                for (const Tensor& p : parameters) p.mutable_grad() = at::full_like(p, number(rank, window));
                bucketer.reduce();
                bucketer.wait();
                for (size_t i = 0; i < 2; ++i) {
                  const bool by_node = i == 1 && scope == GradientScope::node;
                  const int first = by_node ? rank / 2 * 2 : 0, count = by_node ? 2 : 4;
                  float sum = 0;
                  for (int r = first; r < first + count; ++r) sum += number(r, window);
                  const auto wanted =
                      at::full_like(parameters[i], sum * static_cast<float>(bucketer.scale())).detach();
                  require(same_bits(parameters[i].grad(), wanted), "another sum in window ", window,
                          " of parameter ", i);
                }
              }
              require(bucketer.scale() == (c.dtype == at::kHalf ? 0.25 : 1.0), "another scale");
            })) == "");
  }
}

}  // namespace pacer::testing::nodes
