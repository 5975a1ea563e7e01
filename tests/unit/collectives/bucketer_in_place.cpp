// Gradients that are reduced where backward put them: the same bits as by way of flat memory, in every kind
// of window, and no other memory is touched.
#include <algorithm>

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <pacer/collectives/gradient_bucketer.h>

#include "support/catch.h"
#include "support/collectives/ranks.h"
#include "support/optimizers/optimizers.h"

namespace pacer::testing::in_place {
namespace {

using Named = std::vector<std::pair<std::string, Tensor>>;

BucketOptions options_of(bool in_place) {
  return BucketOptions().bucket_bytes(2000).first_bucket_bytes(600).in_place(in_place);
}

Named some_parameters() {
  const std::vector<std::vector<int64_t>> shapes = {{300}, {0}, {2, 3, 4, 5}, {}, {700}, {33, 3}};
  Named named;
  for (const auto& shape : shapes) {
    const Tensor zeros = torch::zeros(shape);
    const Tensor values = (torch::arange(zeros.numel()) * 0.37 + static_cast<double>(named.size())).sin();
    named.emplace_back(std::to_string(named.size()), values.to(at::kFloat).view(shape));
  }
  named[2].second = named[2].second.contiguous(at::MemoryFormat::ChannelsLast);
  for (auto& item : named) item.second.requires_grad_();
  return named;
}

// Each gradient depends on the parameter's number, its values and `factor`.
void backward(const Named& named, double factor, const std::vector<size_t>& without = {}) {
  Tensor loss = torch::zeros({});
  for (size_t i = 0; i < named.size(); ++i) {
    if (std::count(without.begin(), without.end(), i)) continue;
    loss = loss + (named[i].second.pow(2) * (factor + static_cast<double>(i))).sum();
  }
  loss.backward();
}

void add_to(std::vector<Tensor>& all, const Named& named) {
  for (const auto& item : named) {
    const Tensor& gradient = item.second.grad();
    all.push_back(gradient.defined() ? gradient.clone() : Tensor());
    if (gradient.defined() && gradient.numel() > 1) {
      RANK_REQUIRE(gradient.strides() == item.second.strides());
    }
    item.second.mutable_grad().reset();
  }
}

// Windows of every kind; the gradients after each.
std::vector<Tensor> windows(const std::shared_ptr<Communicator>& world, BucketOptions options) {
  const Named named = some_parameters();
  options.unused_is_zero(true);
  GradientBucketer bucketer(named, world, options, {named[4].second});
  const double own = world->rank() + 1;
  std::vector<Tensor> all;
  const auto end = [&] {
    bucketer.end_backward();
    bucketer.wait();
    add_to(all, named);
  };
  for (int step = 0; step < 3; ++step) {  // the order is learned after the first
    bucketer.begin_backward();
    backward(named, own + step);
    end();
  }
  backward(named, own);  // three micro-steps
  backward(named, 2 * own, {3});
  bucketer.begin_backward({}, {named[0].second});
  backward(named, 3 * own, {0});
  end();
  bucketer.begin_backward({named[2].second, named[5].second});  // dropped layers
  backward(named, own, {2, 5});
  end();
  bucketer.begin_backward();  // not reached on some ranks
  backward(named, own, world->rank() == 0 ? std::vector<size_t>{} : std::vector<size_t>{0, 4});
  end();
  backward(named, own);  // a window that ends early
  bucketer.reduce({named[5].second});
  bucketer.wait();
  add_to(all, named);
  bucketer.set_scope(GradientScope::rank);
  bucketer.begin_backward();
  backward(named, own);
  end();
  bucketer.set_scope(GradientScope::world);
  bucketer.begin_backward();  // gradients of somebody else's making
  backward(named, own, {2});
  named[2].second.mutable_grad() = torch::full({2, 3, 4, 5}, own);
  bucketer.end_backward();
  bucketer.wait();
  add_to(all, named);
  return all;
}

}  // namespace

TEST_CASE("in place and in flat memory gradients have the same bits, in every kind of window",
          "[collectives]") {
  for (const bool on_bf16_wire : {false, true}) {
    const int world_size = 3;
    std::vector<std::vector<Tensor>> flat(3), in_place(3);
    for (const bool place : {false, true}) {
      const auto worlds = Communicator::in_process(world_size);
      auto options = options_of(place);
      if (on_bf16_wire) options.wire_dtype(at::kBFloat16);
      REQUIRE(first_of(run_ranks(world_size, [&](int rank) {
                const auto r = static_cast<size_t>(rank);
                (place ? in_place : flat)[r] = windows(worlds[r], options);
              })) == "");
    }
    REQUIRE(flat[0].size() == 9 * 6);
    for (size_t r = 0; r < 3; ++r) {
      for (size_t i = 0; i < flat[r].size(); ++i) {
        INFO("rank " << r << ", gradient " << i);
        REQUIRE(flat[r][i].defined() == in_place[r][i].defined());
        if (flat[r][i].defined()) REQUIRE(flat[r][i].equal(in_place[r][i]));
      }
    }
  }
}

TEST_CASE("gradients in place stay where backward put them, and their bytes are sent", "[collectives]") {
  struct Where : torch::autograd::PostAccumulateGradHook {
    explicit Where(const void*& place) : place_(place) {}
    void operator()(const Tensor& parameter) override { place_ = parameter.grad().const_data_ptr(); }
    const void*& place_;
  };
  const auto world = Communicator::in_process(1)[0];
  const Named named = some_parameters();
  std::vector<const void*> places(named.size());
  for (size_t i = 0; i < named.size(); ++i) {
    torch::autograd::impl::set_post_acc_grad_hooks(named[i].second, std::make_unique<Where>(places[i]));
  }
  GradientBucketer bucketer(named, world, options_of(true));
  for (int step = 0; step < 2; ++step) {
    backward(named, 1);
    bucketer.begin_backward();
    backward(named, 1);
    bucketer.end_backward();
    bucketer.wait();
    for (size_t i = 0; i < named.size(); ++i) {
      CHECK(named[i].second.grad().const_data_ptr() == places[i]);
      CHECK(named[i].second.grad().storage().use_count() == 1);
      named[i].second.mutable_grad().reset();
    }
  }
  int64_t bytes = 0;
  for (const int64_t bucket : bucketer.bucket_bytes()) bytes += bucket;
  CHECK(bytes == 4 * (300 + 120 + 1 + 700 + 99));
}

TEST_CASE("larger models have larger buckets in place", "[collectives]") {
  const auto world = Communicator::in_process(1).front();
  struct Case {
    int parameters;  // of 10 MiB each
    bool in_place;
    int64_t largest;  // MiB: the first multiple of 10 that is large enough
  };
  for (const auto& [parameters, in_place, largest] : {Case{8, true, 30},
                                                      {30, true, 30},
                                                      {42, true, 40},
                                                      {60, true, 50},
                                                      {200, true, 100},
                                                      {8, false, 30}}) {
    CAPTURE(parameters, in_place);
    Named named;
    for (int i = 0; i < parameters; ++i) {  // memory that nobody touches
      named.emplace_back(std::to_string(i), torch::empty({10 << 18}).requires_grad_());
    }
    const auto bytes = GradientBucketer(named, world, BucketOptions().in_place(in_place)).bucket_bytes();
    CHECK(*std::max_element(bytes.begin(), bytes.end()) == largest << 20);
    CHECK(bytes.front() == 10 << 20);  // the first is full with 1 MiB
  }
}

// Autograd lets a gradient be a view of what something else still reads.
TEST_CASE("a gradient in place that shares its memory gets memory of its own", "[collectives]") {
  const auto worlds = Communicator::in_process(2);
  REQUIRE(first_of(run_ranks(2, [&](int rank) {
            const Tensor a = torch::ones({2, 4}).requires_grad_(), b = torch::ones({2, 4}).requires_grad_();
            const Tensor slope = torch::arange(8).to(at::kFloat) + rank;
            for (const double bytes : {1.0, 1000.0}) {
              GradientBucketer bucketer({{"a", a}, {"b", b}}, worlds[static_cast<size_t>(rank)],
                                        BucketOptions()
                                            .bucket_bytes(static_cast<int64_t>(bytes))
                                            .first_bucket_bytes(static_cast<int64_t>(bytes))
                                            .in_place(true));
              for (int micro_steps = 1; micro_steps <= 3; ++micro_steps) {
                for (int m = 1; m <= micro_steps; ++m) {
                  if (m == micro_steps) bucketer.begin_backward();
                  ((a.view({8}) + b.view({8})) * slope).sum().backward();  // both are views of one gradient
                }
                bucketer.end_backward();
                bucketer.wait();
                const Tensor sum = (torch::arange(8).to(at::kFloat) * 2 + 1) * micro_steps;
                for (const Tensor& parameter : {a, b}) {
                  RANK_REQUIRE(parameter.grad().flatten().equal(sum));
                  parameter.mutable_grad().reset();
                }
              }
            }
          })) == "");
}

TEST_CASE("fp16 gradients are divided before they are added, in place or not", "[collectives]") {
  const auto worlds = Communicator::in_process(4);
  REQUIRE(first_of(run_ranks(4, [&](int rank) {
            const Tensor parameter = torch::ones({10}, at::kHalf).requires_grad_();
            GradientBucketer bucketer({{"p", parameter}}, worlds[static_cast<size_t>(rank)],
                                      BucketOptions().in_place(true));
            bucketer.begin_backward();
            (parameter * 40000).sum(at::kHalf).backward();
            bucketer.end_backward();
            bucketer.wait();
            RANK_REQUIRE(parameter.grad().eq(40000).all().item<bool>());
          })) == "");
}

}  // namespace pacer::testing::in_place
