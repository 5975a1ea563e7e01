#include "nccl/rank_process.h"

#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <thread>

#include <unistd.h>

#include <pacer/collectives/detail/connect.h>
#include <pacer/core/error.h>

namespace pacer::testing {
namespace {

// Broadcasts of host memory through files, which is all that setting up NCCL needs.
class FileControl final : public detail::Transport {
 public:
  FileControl(RankProcess& process, std::string group) : process_(process), group_(std::move(group)) {}
  std::string name() const override { return "files"; }
  at::Device device() const override { return at::kCPU; }
  detail::TransportWorkPtr broadcast(const at::Tensor& tensor, int root, Milliseconds) override {
    const std::string key = concatenated("broadcast-", group_, "-", calls_++);
    const auto size = static_cast<size_t>(tensor.numel()) * tensor.element_size();
    if (process_.rank() == root) {
      process_.post(key, {static_cast<const char*>(tensor.const_data_ptr()), size});
    } else {
      const std::string bytes = process_.wait_for(key);
      expect(bytes.size() == size, "a broadcast of another size");
      std::memcpy(tensor.mutable_data_ptr(), bytes.data(), size);
    }
    return std::make_unique<Done>();
  }
  detail::TransportWorkPtr all_reduce(const at::Tensor&, Milliseconds) override { return none(); }
  detail::TransportWorkPtr reduce_scatter(const at::Tensor&, const at::Tensor&, Milliseconds) override {
    return none();
  }
  detail::TransportWorkPtr all_gather(const at::Tensor&, const at::Tensor&, Milliseconds) override {
    return none();
  }
  detail::TransportWorkPtr all_to_all(const at::Tensor&, const std::vector<int64_t>&, const at::Tensor&,
                                      const std::vector<int64_t>&, Milliseconds) override {
    return none();
  }
  detail::TransportWorkPtr exchange(const std::vector<Message>&, Milliseconds) override { return none(); }
  void abort() noexcept override {}

 private:
  class Done final : public detail::TransportWork {
   public:
    void wait() override {}
    bool is_done() override { return true; }
  };
  template <class... Parts>
  static std::string concatenated(const Parts&... parts) {
    return pacer::detail::concatenate(parts...);
  }
  static detail::TransportWorkPtr none() { throw std::logic_error("files only broadcast"); }

  RankProcess& process_;
  const std::string group_;
  int calls_ = 0;
};

}  // namespace

void expect(bool condition, const std::string& what) {
  if (!condition) throw std::runtime_error(what);
}

c10::Device RankProcess::device() const {
  return c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(first_gpu_ + rank_));
}

std::shared_ptr<detail::Transport> RankProcess::connect(const std::string& group,
                                                        std::chrono::milliseconds timeout, Trouble trouble) {
  const auto control = std::make_shared<FileControl>(*this, group);
  return detail::make_nccl_transport(control, rank_, world_, device(), timeout, /*one_host=*/true,
                                     std::move(trouble));
}

void RankProcess::check(const std::string& name, const std::function<void()>& body) {
  try {
    body();
    say("PASS " + name);
  } catch (const std::exception& error) {
    std::string text = error.what();
    text = text.substr(0, text.find("\nException raised from"));
    for (char& c : text) c = c == '\n' ? ' ' : c;
    say("FAIL " + name + " | " + text);
  }
}

void RankProcess::inform(const std::string& text) { say("INFO " + text); }

void RankProcess::say(const std::string& line) {
  const std::string text = line.substr(0, 2000) + "\n";
  if (write(report_, text.data(), text.size()) < 0) std::perror("report");
}

void RankProcess::post(const std::string& key, const std::string& text) {
  const std::string unfinished = folder_ + "/." + key + "." + std::to_string(rank_);
  std::ofstream(unfinished, std::ios::binary) << text;
  expect(std::rename(unfinished.c_str(), (folder_ + "/" + key).c_str()) == 0, "cannot post " + key);
}

std::optional<std::string> RankProcess::read(const std::string& key) const {
  const std::string path = folder_ + "/" + key;
  if (access(path.c_str(), F_OK) != 0) return std::nullopt;
  std::ifstream file(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(file), {});
}

std::string RankProcess::wait_for(const std::string& key) const {
  for (const Stopwatch watch; watch.seconds() < 60;) {
    if (auto text = read(key)) return *text;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  throw std::runtime_error("nobody posted " + key);
}

void RankProcess::meet(const std::string& key, int ranks) {
  post("meet-" + key + "-" + std::to_string(rank_));
  for (int rank = 0; rank < ranks; ++rank) wait_for("meet-" + key + "-" + std::to_string(rank));
}

}  // namespace pacer::testing
