// A file system in memory that knows what the disk has and what it was only told: power_cut() takes back all
// that was not synced. Faster than a disk, so that every bit of a file can be flipped in turn.
#pragma once

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <pacer/files/file_system.h>

namespace pacer::testing {

class MemoryFileSystem final : public FileSystem {
 public:
  int create_file(const std::string& path) override {
    const auto [folder, name] = parent_of(path);
    if (!folder || !folder->is_folder) return -ENOENT;
    if (folder->entries.count(name) != 0) return -EEXIST;
    return open(folder->entries[name] = std::make_shared<Node>());
  }
  int open_file(const std::string& path) override {
    const auto node = find(path);
    return node ? open(node) : -ENOENT;
  }
  int open_folder(const std::string& path) override {
    const auto node = find(path);
    return !node ? -ENOENT : node->is_folder ? open(node) : -ENOTDIR;
  }
  int64_t size(int file) override {
    const auto& node = open_.at(file).node;
    return node->is_folder ? -EINVAL : static_cast<int64_t>(node->data.size());
  }
  int64_t read(int file, char* data, size_t bytes) override {
    Open& from = open_.at(file);
    const size_t count = std::min(bytes, from.node->data.size() - std::min(from.at, from.node->data.size()));
    if (count > 0) std::memcpy(data, from.node->data.data() + from.at, count);
    from.at += count;
    return static_cast<int64_t>(count);
  }
  int64_t skip(int file, int64_t bytes) override {
    open_.at(file).at += static_cast<size_t>(bytes);
    return static_cast<int64_t>(open_.at(file).at);
  }
  int64_t write(int file, const char* data, size_t bytes) override {
    open_.at(file).node->data.append(data, bytes);
    return static_cast<int64_t>(bytes);
  }
  int sync(int file) override {
    Node& node = *open_.at(file).node;
    node.data_on_disk = node.data;
    node.entries_on_disk = node.entries;
    return 0;
  }
  int close(int file) override { return open_.erase(file) == 1 ? 0 : -EBADF; }
  int rename(const std::string& from, const std::string& to) override {
    const auto [from_folder, from_name] = parent_of(from);
    const auto [to_folder, to_name] = parent_of(to);
    if (!from_folder || !to_folder || from_folder->entries.count(from_name) == 0) return -ENOENT;
    const auto target = to_folder->entries.find(to_name);
    if (target != to_folder->entries.end() && !target->second->entries.empty()) return -ENOTEMPTY;
    to_folder->entries[to_name] = from_folder->entries[from_name];
    from_folder->entries.erase(from_name);
    return 0;
  }
  int make_folder(const std::string& path) override {
    const auto [folder, name] = parent_of(path);
    if (!folder) return -ENOENT;
    if (folder->entries.count(name) != 0) return -EEXIST;
    (folder->entries[name] = std::make_shared<Node>())->is_folder = true;
    return 0;
  }
  int remove_file(const std::string& path) override { return remove(path, false); }
  int remove_folder(const std::string& path) override { return remove(path, true); }
  int list_folder(const std::string& path, std::vector<std::string>& names) override {
    const auto node = find(path);
    if (!node) return -ENOENT;
    if (!node->is_folder) return -ENOTDIR;
    for (const auto& [name, entry] : node->entries) names.push_back(name);
    return 0;
  }

  // Past the interface, for tests: a file's content, made or replaced and taken to be on the disk, ...
  std::string& content(const std::string& path) {
    const auto [folder, name] = parent_of(path);
    auto& node = folder->entries[name];
    if (!node) node = std::make_shared<Node>();
    return node->data;
  }
  // ... how many descriptors are open, and the fall of the power: what was not synced is lost, of files in
  // any case, of folders unless names survive (either happens, depending on the file system and its luck).
  size_t open_descriptors() const { return open_.size(); }
  void power_cut(bool names_survive) {
    open_.clear();
    forget(*root_, names_survive);
  }

 private:
  struct Node {
    bool is_folder = false;
    std::string data, data_on_disk;
    std::map<std::string, std::shared_ptr<Node>> entries, entries_on_disk;
  };
  struct Open {
    std::shared_ptr<Node> node;
    size_t at = 0;
  };

  static std::shared_ptr<Node> new_folder() {
    auto node = std::make_shared<Node>();
    node->is_folder = true;
    return node;
  }
  int open(const std::shared_ptr<Node>& node) {
    open_[++last_] = {node, 0};
    return last_;
  }
  std::shared_ptr<Node> find(const std::string& path) const {
    std::vector<std::shared_ptr<Node>> way = {root_};
    for (size_t at = 0; at < path.size();) {
      const size_t end = std::min(path.find('/', at), path.size());
      const std::string name = path.substr(at, end - at);
      at = end + 1;
      if (name.empty() || name == ".") continue;
      if (name == "..") {
        if (way.size() > 1) way.pop_back();
        continue;
      }
      const auto entry = way.back()->entries.find(name);
      if (entry == way.back()->entries.end()) return nullptr;
      way.push_back(entry->second);
    }
    return way.back();
  }
  std::pair<std::shared_ptr<Node>, std::string> parent_of(const std::string& path) const {
    const size_t slash = path.rfind('/');
    if (slash == std::string::npos) return {root_, path};
    return {find(path.substr(0, slash)), path.substr(slash + 1)};
  }
  int remove(const std::string& path, bool folder_wanted) {
    const auto [folder, name] = parent_of(path);
    if (!folder || folder->entries.count(name) == 0) return -ENOENT;
    const auto node = folder->entries[name];
    if (node->is_folder != folder_wanted) return folder_wanted ? -ENOTDIR : -EISDIR;
    if (!node->entries.empty()) return -ENOTEMPTY;
    folder->entries.erase(name);
    return 0;
  }
  static void forget(Node& node, bool names_survive) {
    node.data = node.data_on_disk;
    if (!names_survive) node.entries = node.entries_on_disk;
    node.entries_on_disk = node.entries;
    for (const auto& [name, entry] : node.entries) forget(*entry, names_survive);
  }

  std::shared_ptr<Node> root_ = new_folder();
  std::map<int, Open> open_;
  int last_ = 2;
};

}  // namespace pacer::testing
