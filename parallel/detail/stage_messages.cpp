#include <pacer/parallel/detail/stage_messages.h>

#include <algorithm>

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <pacer/core/error.h>

namespace pacer::detail {
namespace {

constexpr int64_t kMaxTensors = 8, kMaxDimensions = 8, kMaxSize = int64_t{1} << 40;
constexpr int64_t kTensorWords = 3 + kMaxDimensions;  // dtype, requires a gradient, dimensions, sizes
constexpr int64_t kWords = 1 + kMaxTensors * kTensorWords;

at::Tensor encoded(const Outlines& outlines) {
  at::Tensor words = at::zeros({kWords}, at::kLong);
  auto* word = words.mutable_data_ptr<int64_t>();
  *word++ = static_cast<int64_t>(outlines.size());
  for (const TensorOutline& outline : outlines) {
    word[0] = static_cast<int64_t>(outline.dtype);
    word[1] = outline.requires_grad ? 1 : 0;
    word[2] = static_cast<int64_t>(outline.sizes.size());
    std::copy(outline.sizes.begin(), outline.sizes.end(), word + 3);
    word += kTensorWords;
  }
  return words;
}

Outlines decoded(const at::Tensor& words) {
  const auto* word = words.const_data_ptr<int64_t>();
  const auto require_between = [](int64_t least, int64_t value, int64_t most) {
    require<Error>(least <= value && value <= most,
                   "what the former stage of the pipeline says of its tensors arrived damaged; look at the "
                   "network and the memory of its host");
  };
  require_between(1, *word, kMaxTensors);
  Outlines outlines(static_cast<size_t>(*word++));
  for (TensorOutline& outline : outlines) {
    require_between(0, word[0], static_cast<int64_t>(at::ScalarType::NumOptions) - 1);
    require_between(0, word[2], kMaxDimensions);
    for (int64_t i = 0; i < word[2]; ++i) require_between(0, word[3 + i], kMaxSize);
    outline.dtype = static_cast<at::ScalarType>(word[0]);
    outline.requires_grad = word[1] != 0;
    outline.sizes.assign(word + 3, word + 3 + word[2]);
    word += kTensorWords;
  }
  return outlines;
}

void require_sendable(const Tensors& tensors, int64_t stage, at::Device device) {
  require(static_cast<int64_t>(tensors.size()) <= kMaxTensors && !tensors.empty(), "stage ", stage,
          " of the pipeline gives ", tensors.size(), " tensors to the next; it must be 1 to ", kMaxTensors);
  for (const at::Tensor& tensor : tensors) {
    require(tensor.defined() && tensor.layout() == at::kStrided && tensor.device() == device &&
                tensor.dim() <= kMaxDimensions,
            "stage ", stage,
            " of the pipeline gives the next one a tensor that cannot be sent; it must be "
            "dense, on ",
            device.str(), ", with at most ", kMaxDimensions, " dimensions");
  }
}

}  // namespace

Outlines outlines_of(const Tensors& tensors) {
  Outlines outlines;
  for (const at::Tensor& tensor : tensors) {
    outlines.push_back({tensor.scalar_type(), tensor.sizes().vec(), tensor.requires_grad()});
  }
  return outlines;
}

// A rank sends on the queue of its parity and receives on the other one's; where the last of an odd number of
// ranks sends to the first, or the first to the last, a third one keeps them apart.
int StageMessages::queues(const PipelineSchedule& schedule) {
  const bool is_ring = schedule.chunks > 1;
  return schedule.ranks == 1                  ? 0
         : is_ring && schedule.ranks % 2 != 0 ? 3
         : is_ring || schedule.ranks > 2      ? 2
                                              : 1;
}

int StageMessages::queue_of(Way way, int sender, const PipelineSchedule& schedule) {
  const int count = queues(schedule), last = static_cast<int>(schedule.ranks) - 1;
  if (count == 3 && sender == (way == Way::activations ? last : 0)) return 2;
  return sender % std::min(count, 2);
}

StageMessages::StageMessages(std::shared_ptr<Communicator> pipeline, const PipelineSchedule& schedule)
    : pipeline_(std::move(pipeline)), schedule_(schedule) {
  for (const Way way : {Way::activations, Way::gradients}) {
    for (int i = 0; i < queues(schedule_); ++i) {
      const char* name = way == Way::activations ? "activations " : "gradients ";
      queues_[static_cast<size_t>(way)].push_back(pipeline_->lane(concatenate(name, i)));
    }
  }
}

void StageMessages::send(Way way, int64_t from, int64_t to, Tensors tensors) {
  if (tensors.empty()) return;
  if (rank_of(from) == rank_of(to)) return to_this_rank_[{way, to}].push_back(std::move(tensors));
  std::vector<Message> messages;
  for (const at::Tensor& tensor : tensors) messages.push_back(Message::send(tensor, rank_of(to)));
  Work work = queue(way, rank_of(from)).send_receive(messages, CollectiveOptions().agreed(true));
  sent_.push_back({std::move(work), std::move(tensors)});
}

StageMessages::Incoming StageMessages::receive(Way way, int64_t from, const Outlines& outlines) {
  Incoming incoming;
  std::vector<Message> messages;
  for (const TensorOutline& outline : outlines) {
    incoming.tensors.push_back(
        at::empty(outline.sizes, at::TensorOptions().dtype(outline.dtype).device(pipeline_->device())));
    messages.push_back(Message::receive(incoming.tensors.back(), rank_of(from)));
  }
  if (!messages.empty())
    incoming.work = queue(way, rank_of(from)).send_receive(messages, CollectiveOptions().agreed(true));
  return incoming;
}

StageMessages::Incoming StageMessages::take(Way way, int64_t from, int64_t to, const Outlines& outlines) {
  if (rank_of(from) == rank_of(to) && !outlines.empty()) {
    auto& waiting = to_this_rank_[{way, to}];
    require<Error>(!waiting.empty(), "a stage of the pipeline has nothing to receive from this rank");
    Incoming incoming{std::move(waiting.front()), {}};
    waiting.pop_front();
    return incoming;
  }
  return receive(way, from, outlines);
}

void StageMessages::send_activations(int64_t from, const std::string& kind, const Tensors& tensors) {
  require_sendable(tensors, from, pipeline_->device());
  const Outlines outlines = outlines_of(tensors);
  const auto [told, is_new] = told_.emplace(std::make_pair(from, kind), outlines);
  if (!is_new && !(told->second == outlines)) {
    throw InvalidArgument(concatenate(
        "stage ", from,
        " of the pipeline gives the next one tensors of other shapes, dtypes or need of a gradient "
        "than for an earlier micro-batch of the same shape; let them follow from the batch alone"));
  }
  if (rank_of(from) == rank_of(from + 1)) {
    known_[{from + 1, kind}] = outlines;
  } else if (is_new) {
    send(Way::activations, from, from + 1, {encoded(outlines).to(pipeline_->device())});
  }
  Tensors sent;
  for (const at::Tensor& tensor : tensors) sent.push_back(tensor.detach().contiguous());
  send(Way::activations, from, from + 1, std::move(sent));
}

Outlines StageMessages::receive_outlines(int64_t from) {
  Incoming words = receive(Way::activations, from, {{at::kLong, {kWords}, false}});
  words.work.wait();
  return decoded(words.tensors.front().cpu());
}

Tensors StageMessages::take_activations(int64_t to, const std::string& kind) {
  auto known = known_.find({to, kind});
  if (known == known_.end()) {
    known = known_.emplace(std::make_pair(to, kind), receive_outlines(to - 1)).first;
  }
  Incoming incoming = take(Way::activations, to - 1, to, known->second);
  incoming.work.wait();
  for (size_t i = 0; i < incoming.tensors.size(); ++i) {
    // One that stays on this rank shares its memory with the sender's, but is a leaf.
    incoming.tensors[i] = incoming.tensors[i].detach();
    if (known->second[i].requires_grad) incoming.tensors[i].requires_grad_();
  }
  return incoming.tensors;
}

void StageMessages::send_gradients(int64_t from, const Tensors& gradients) {
  send(Way::gradients, from, from - 1, gradients);
}

namespace {

Outlines only_differentiable(const Outlines& of) {
  Outlines outlines;
  for (const TensorOutline& outline : of) {
    if (outline.requires_grad) outlines.push_back(outline);
  }
  return outlines;
}

}  // namespace

Tensors StageMessages::take_gradients(int64_t to, const Outlines& of) {
  const Outlines outlines = only_differentiable(of);
  if (outlines.empty()) return {};
  Incoming incoming = take(Way::gradients, to + 1, to, outlines);
  incoming.work.wait();
  return incoming.tensors;
}

void StageMessages::collect(bool wait) {
  while (!sent_.empty() && (wait || sent_.front().work.is_done())) {
    if (wait) sent_.front().work.wait();
    sent_.pop_front();
  }
}

void StageMessages::drop() {
  to_this_rank_.clear();
  sent_.clear();
}

}  // namespace pacer::detail
