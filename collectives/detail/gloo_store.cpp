#include <pacer/collectives/detail/gloo_store.h>

#include <pacer/collectives/detail/gather.h>
#include <pacer/collectives/detail/store.h>
#include <pacer/core/error.h>

namespace pacer::detail {

void GlooStore::set(const std::string& key, const std::vector<uint8_t>& value) {
  require<Error>(!is_gathered_, "Gloo sets ", key, " after it has asked for the others' values");
  own_.push_back(key);
  own_.emplace_back(value.begin(), value.end());
}

const std::map<std::string, std::string>& GlooStore::values() {
  if (!is_gathered_) {
    for (const std::string& pairs : gather_(pack(own_))) {
      const std::vector<std::string> texts = unpack(pairs);
      for (size_t i = 0; i + 1 < texts.size(); i += 2) values_[texts[i]] = texts[i + 1];
    }
    gather_ = nullptr;  // what it is over need not live on
    is_gathered_ = true;
  }
  return values_;
}

std::vector<uint8_t> GlooStore::get(const std::string& key) {
  const auto found = values().find(key);
  require<Error>(found != values().end(), "Gloo asks for ", key, ", which no rank has set");
  return {found->second.begin(), found->second.end()};
}

bool GlooStore::check(const std::vector<std::string>& keys) {
  for (const std::string& key : keys) {
    if (values().count(key) == 0) return false;
  }
  return true;
}

void GlooStore::wait(const std::vector<std::string>& keys) { wait(keys, timeout_); }

void GlooStore::wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& /*timeout*/) {
  require<Error>(check(keys), "Gloo waits for a value that no rank has set");
}

c10::intrusive_ptr<c10d::Store> GlooStore::clone() { throw Error("Gloo's store cannot be shared"); }
int64_t GlooStore::add(const std::string& key, int64_t /*value*/) { throw Error("Gloo cannot count " + key); }
bool GlooStore::deleteKey(const std::string& key) { throw Error("Gloo cannot take away " + key); }
int64_t GlooStore::getNumKeys() { throw Error("Gloo's values are not counted"); }

Gather gather_over(std::shared_ptr<Transport> transport, int world_size, std::chrono::milliseconds timeout) {
  return [transport = std::move(transport), world_size, timeout](const std::string& own) {
    return gather_texts(own, world_size, [&](const at::Tensor& all, const at::Tensor& one) {
      transport->all_gather(all, one, timeout)->wait();
    });
  };
}

}  // namespace pacer::detail
