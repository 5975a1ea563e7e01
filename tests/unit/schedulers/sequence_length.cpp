// The sequence-length curriculum on batches: what is cut and where, that no token is lost or mixed up, what
// is counted, what is refused, and that training on a cut batch is training on one that was short from the
// start.
#include <torch/optim/sgd.h>

#include <pacer/hooks/gradient_accumulation.h>
#include <pacer/schedulers/sequence_length.h>
#include <pacer/session/session.h>

#include "support/captured_stderr.h"
#include "support/catch.h"
#include "support/session/small_model.h"

namespace pacer::testing {
namespace {

Progress curriculum_progress(int64_t step, int64_t tokens = 0) {
  Progress progress;
  progress.step = step;
  progress.tokens = tokens;
  return progress;
}

// Always of length 4, of at most 16.
SequenceLengthOptions four_tokens(LengthMode mode = LengthMode::truncate) {
  return SequenceLengthOptions(4, 16).ramp_steps(1'000'000).mode(mode);
}

MicroBatch cut_batch(const SequenceLengthOptions& options, std::vector<Tensor> tensors,
                     const Progress& progress = {}) {
  MicroBatch batch;
  batch.tensors = std::move(tensors);
  batch.tokens = -1;
  SequenceLength(options).begin(progress, batch);
  return batch;
}

Tensor numbered(std::vector<int64_t> shape) {
  int64_t count = 1;
  for (const int64_t size : shape) count *= size;
  return torch::arange(count).reshape(shape);
}

}  // namespace

TEST_CASE("truncate cuts inputs, labels, features and masks alike", "[session][sequence_length]") {
  const Tensor ids = numbered({3, 16}), features = numbered({3, 16, 5}), mask = numbered({3, 1, 16, 16}),
               labels = numbered({3, 16}), classes = numbered({3}), weight = torch::tensor(2.5);
  const MicroBatch batch = cut_batch(four_tokens(), {ids, features, mask, labels, classes, weight});
  using torch::indexing::Slice;
  const Slice all, short_one(0, 4);
  CHECK(batch.tensors[0].equal(ids.index({all, short_one})));
  CHECK(batch.tensors[1].equal(features.index({all, short_one})));
  CHECK(batch.tensors[2].equal(mask.index({all, all, short_one, short_one})));
  CHECK(batch.tensors[3].equal(labels.index({all, short_one})));
  CHECK(batch.tensors[4].is_same(classes));
  CHECK(batch.tensors[5].is_same(weight));
  CHECK(batch.tokens == 3 * 4);
}

TEST_CASE("named dimensions are cut and no others, counted from the end where negative",
          "[session][sequence_length]") {
  using torch::indexing::Slice;
  const Tensor first = numbered({16, 3}), mask = numbered({2, 16, 16}), whole = numbered({3, 16}),
               deep = numbered({3, 2, 2, 2, 16});
  const SequenceLengthOptions options = four_tokens().dimensions({{0}, {-1, -2}, {}, {4}});
  const MicroBatch batch = cut_batch(options, {first, mask, whole, deep});
  CHECK(batch.tensors[0].equal(first.index({Slice(0, 4)})));
  CHECK(batch.tensors[1].equal(mask.index({Slice(), Slice(0, 4), Slice(0, 4)})));
  CHECK(batch.tensors[2].is_same(whole));
  CHECK(batch.tensors[3].equal(deep.narrow(4, 0, 4)));
}

TEST_CASE("each tensor's cut is said once, and of square ones that they may be masks",
          "[session][sequence_length]") {
  const auto said = [](const SequenceLengthOptions& options,
                       const std::vector<std::vector<int64_t>>& shapes) {
    torch::nn::Linear model(2, 2);
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    Session session(*model, optimizer);
    session.use(SequenceLength(options));
    const CapturedStderr output;
    static_cast<void>(session.begin(numbered(shapes[0]), numbered(shapes[1])));
    return output.text();
  };
  const std::string cuts = "pacer: SequenceLength cuts dimension 1 of tensor 0, of shape [3, 16], ";
  CHECK(said(four_tokens(), {{3, 16}, {3, 16}}) ==
        cuts + "dimension 1 of tensor 1, of shape [3, 16], to 4, and later to up to 16\n");
  CHECK(said(four_tokens(), {{3, 16}, {16, 16}}) == cuts +
                                                        "dimension 1 of tensor 1, of shape [16, 16], to 4, "
                                                        "and later to up to 16; if tensor 1 is a mask, name "
                                                        "both of its sides with dimensions()\n");
  CHECK(said(four_tokens(), {{3, 16}, {3, 1, 16, 16}}) ==
        cuts + "dimensions 2 and 3 of tensor 1, of shape [3, 1, 16, 16], to 4, and later to up to 16\n");
  CHECK(said(four_tokens().dimensions({{1}, {1}}), {{3, 16}, {16, 16}}) ==
        cuts + "dimension 1 of tensor 1, of shape [16, 16], to 4, and later to up to 16\n");
  CHECK(said(four_tokens(LengthMode::reshape), {{3, 16}, {3, 16}}) ==
        "pacer: SequenceLength reshapes dimension 1 of tensor 0, of shape [3, 16], dimension 1 of tensor 1, "
        "of shape "
        "[3, 16], to 4, and later to up to 16\n");
}

TEST_CASE("tokens are counted by batch and length wherever the sequence is", "[session][sequence_length]") {
  // [sequence, batch], three sequences.
  CHECK(cut_batch(four_tokens().dimensions({{0}, {0}}), {numbered({16, 3}), numbered({16, 3})}).tokens == 12);
  CHECK(cut_batch(four_tokens().dimensions({{0}}), {numbered({16, 3, 5})}).tokens == 12);
  CHECK(cut_batch(four_tokens().dimensions({{-1}}), {numbered({16})}).tokens == 4);
  // The first tensor has no sequence, the second has.
  CHECK(cut_batch(four_tokens(), {numbered({3}), numbered({3, 16})}).tokens == 12);
  CHECK(cut_batch(four_tokens(), {torch::tensor(1), numbered({3, 16})}).tokens == 12);
  CHECK(
      cut_batch(four_tokens(LengthMode::reshape).dimensions({{}, {1}}), {torch::tensor(1), numbered({3, 7})})
          .tokens == 20);
}

TEST_CASE("reshape keeps every token in order and drops fewer than one sequence",
          "[session][sequence_length]") {
  for (int64_t full = 1; full <= 9; ++full) {
    for (int64_t rows = 1; rows <= 4; ++rows) {
      for (int64_t length = 1; length <= full; ++length) {
        CAPTURE(full, rows, length);
        const auto options =
            SequenceLengthOptions(length, full + 1).ramp_steps(1000).mode(LengthMode::reshape);
        const Tensor ids = numbered({rows, full}), features = numbered({rows, full, 2});
        const MicroBatch batch = cut_batch(options, {ids, features});
        const int64_t pieces = rows * full / length;
        REQUIRE(batch.tensors[0].sizes() == std::vector<int64_t>{pieces, length});
        REQUIRE(batch.tensors[1].sizes() == std::vector<int64_t>{pieces, length, 2});
        int64_t next = 0;
        for (int64_t i = 0; i < pieces; ++i) {
          for (int64_t s = 0; s < length; ++s, ++next) {
            REQUIRE(batch.tensors[0][i][s].item<int64_t>() == next);
            REQUIRE(batch.tensors[1][i][s][1].item<int64_t>() == 2 * next + 1);
          }
        }
        REQUIRE(batch.tokens == next);
        REQUIRE(rows * full - next < length);
      }
    }
  }
  // Memory of a larger tensor, not in order.
  const Tensor strided = numbered({8, 3}).t();
  const auto options = SequenceLengthOptions(4, 9).ramp_steps(1000).mode(LengthMode::reshape);
  const Tensor cut = cut_batch(options, {strided}).tensors[0];
  CHECK(cut.sizes() == std::vector<int64_t>{6, 4});
  CHECK(cut.is_contiguous());
  CHECK(cut.flatten().equal(strided.contiguous().flatten()));
}

TEST_CASE("reshape refuses tensors it cannot keep in step", "[session][sequence_length]") {
  const Tensor ids = numbered({3, 16});
  const auto reshape = [] { return four_tokens(LengthMode::reshape); };
  CHECK(contains(refusal([&] {
                   cut_batch(reshape(), {ids, numbered({3, 1, 16, 16})});
                 }),
                 "cannot reshape tensor 1"));
  CHECK(contains(refusal([&] { cut_batch(reshape(), {ids, numbered({3})}); }), "cannot reshape tensor 1"));
  CHECK(contains(refusal([&] {
                   cut_batch(reshape().dimensions({{0}}), {numbered({16, 3})});
                 }),
                 "[batch, sequence, ...]"));
  const MicroBatch batch = cut_batch(reshape().dimensions({{1}, {}}), {ids, numbered({3})});
  CHECK(batch.tensors[0].size(0) == 12);
  CHECK(batch.tensors[1].size(0) == 3);
}

TEST_CASE("batches that do not fit the curriculum are refused and stay whole", "[session][sequence_length]") {
  const Tensor ids = numbered({3, 16});
  const auto message = [](const SequenceLengthOptions& options, const std::vector<Tensor>& tensors) {
    MicroBatch batch;
    batch.tensors = tensors;
    const std::string text = refusal([&] { SequenceLength(options).begin({}, batch); });
    for (size_t i = 0; i < tensors.size(); ++i) REQUIRE(batch.tensors[i].is_same(tensors[i]));
    return text;
  };
  CHECK(contains(message(four_tokens(), {ids, numbered({3, 15})}), "tensor 1"));
  CHECK(contains(message(four_tokens(), {ids, numbered({3, 1, 16, 15})}), "is not 16 long"));
  CHECK(contains(message(four_tokens(), {numbered({3}), torch::tensor(1)}), "no sequence"));
  CHECK(contains(message(four_tokens(), {numbered({1, 1, 1, 16, 16})}), "dimensions()"));
  CHECK(contains(message(four_tokens().dimensions({{1}}), {ids, ids}), "the batch has 2"));
  CHECK(contains(message(four_tokens().dimensions({{2}}), {ids}), "no dimension 2"));
  CHECK(contains(message(four_tokens().dimensions({{-3}}), {ids}), "no dimension -3"));
  CHECK(contains(refusal([] { SequenceLength(SequenceLengthOptions(4, 16)); }), "no way from 4 to 16"));

  const auto longer = SequenceLengthOptions(20, 32).ramp_steps(10);
  CHECK(contains(message(longer, {ids}), "end the curriculum at 16"));
  const MicroBatch batch = cut_batch(SequenceLengthOptions(longer).allow_shorter(true), {ids});
  CHECK(batch.tensors[0].is_same(ids));
  CHECK(batch.tokens == 3 * 16);
}

TEST_CASE("the length is a function of progress, not of the calls so far", "[session][sequence_length]") {
  SequenceLength one(SequenceLengthOptions(4, 16).ramp_steps(100).difficulty_step(2));
  const auto length_of = [](SequenceLength& hook, int64_t step) {
    MicroBatch batch;
    batch.tensors = {numbered({2, 16})};
    hook.begin(curriculum_progress(step), batch);
    return batch.tensors[0].size(1);
  };
  const auto expected = [](int64_t step) { return step >= 100 ? 16 : (4 + 12 * step / 100) / 2 * 2; };
  for (const int64_t step : {99, 0, 50, 50, 1000, 17, 100, 33, 0}) {
    CHECK(length_of(one, step) == expected(step));
    SequenceLength fresh(SequenceLengthOptions(4, 16).ramp_steps(100).difficulty_step(2));
    CHECK(length_of(fresh, step) == expected(step));
    CHECK(one.settled(curriculum_progress(step)) == (step >= 100));
  }
  const SequenceLength by_tokens(SequenceLengthOptions(4, 16).ramp_tokens(1000));
  CHECK_FALSE(by_tokens.settled(curriculum_progress(1'000'000, 999)));
  CHECK(by_tokens.settled(curriculum_progress(0, 1000)));
}

TEST_CASE("a ramp by tokens follows the tokens that were trained on", "[session][sequence_length]") {
  for (const LengthMode mode : {LengthMode::truncate, LengthMode::reshape}) {
    auto model = small_model();
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    Session session(*model, optimizer);
    session.use(GradientAccumulation(2));
    session.use(SequenceLength(SequenceLengthOptions(2, 16).ramp_tokens(600).difficulty_step(1).mode(mode)));
    int64_t tokens = 0, in_window = 0;
    bool grew = false;
    for (int64_t i = 0; i < 60; ++i) {
      const auto batch = small_batch(i, 3);
      auto [x, y] = session.begin(batch.first, batch.second);
      const int64_t length = tokens >= 600 ? 16 : 2 + 14 * tokens / 600;
      REQUIRE(x.size(1) == length);
      REQUIRE(y.sizes() == x.sizes());
      REQUIRE(x.size(0) == (mode == LengthMode::reshape ? 48 / length : 3));
      REQUIRE(session.progress().tokens == tokens);
      session.backward(model->loss(x, y));
      in_window += x.numel();
      if (session.step()) tokens += std::exchange(in_window, 0);
      grew = grew || length == 16;
    }
    CHECK(session.progress().tokens == tokens);
    CHECK(grew);
  }
}

TEST_CASE("evaluation sees full length", "[session][sequence_length]") {
  auto model = small_model();
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  Session session(*model, optimizer);
  session.use(SequenceLength(four_tokens()));
  const auto batch = small_batch(0);
  {
    auto [x, y] = session.begin(batch.first, batch.second);
    CHECK(x.size(1) == 4);
    session.backward(model->loss(x, y));
    session.step();
  }
  const Tensor logits = session.evaluate([&] { return model->forward(batch.first); });
  CHECK(logits.size(1) == kFullLength);
  CHECK(session.progress().tokens == 2 * 4);
}

TEST_CASE("training on a truncated batch is training on one cut by hand, to the bit",
          "[session][sequence_length]") {
  auto model = small_model(), twin = small_model();
  FusedAdamW optimizer(model->parameters(), FusedAdamWOptions(0.01)),
      peer(twin->parameters(), FusedAdamWOptions(0.01));
  Session session(*model, optimizer);
  session.use(SequenceLength(SequenceLengthOptions(2, 16).ramp_steps(10).difficulty_step(1)));
  for (int64_t step = 0; step < 14; ++step) {
    const auto batch = small_batch(step);
    auto [x, y] = session.begin(batch.first, batch.second);
    session.backward(model->loss(x, y));
    const int64_t length = std::min<int64_t>(16, 2 + 14 * step / 10);
    twin->loss(batch.first.narrow(1, 0, length).contiguous(), batch.second.narrow(1, 0, length).contiguous())
        .backward();
    const auto ours = model->parameters(), theirs = twin->parameters();
    for (size_t i = 0; i < ours.size(); ++i) REQUIRE(same_bits(ours[i].grad(), theirs[i].grad()));
    session.step();
    peer.step();
    peer.zero_grad();
    REQUIRE(same_bits(ours, theirs));
  }
}

}  // namespace pacer::testing
