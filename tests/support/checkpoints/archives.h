// Optimizer archives taken apart: every entry by its path, and copies with one entry dropped or altered.
#pragma once

#include <functional>
#include <sstream>
#include <string>
#include <vector>

#include <torch/serialize.h>

namespace pacer::testing {

template <class Optimizer>
std::string saved(const Optimizer& optimizer) {
  std::stringstream file;
  torch::save(optimizer, file);
  return file.str();
}

template <class Optimizer>
void load_from(Optimizer& optimizer, const std::string& archive) {
  std::stringstream file(archive);
  torch::load(optimizer, file);
}

// Called with the path of each entry ("state > 94027 > step") and its value; what it returns is written
// instead, and nothing where it returns None.
using Rewrite = std::function<c10::IValue(const std::string& path, const c10::IValue& value)>;

inline void rewrite_into(torch::serialize::InputArchive& from, torch::serialize::OutputArchive& to,
                         const std::string& prefix, const Rewrite& rewrite) {
  for (const std::string& key : from.keys()) {
    const std::string path = prefix.empty() ? key : prefix + " > " + key;
    torch::serialize::InputArchive child;
    if (from.try_read(key, child)) {
      // A folder: dropped or replaced as a whole where its own entry is.
      const c10::IValue folder("folder"), replacement = rewrite(path, folder);
      if (!replacement.isString() || replacement.toStringRef() != "folder") {
        if (!replacement.isNone()) to.write(key, replacement);
        continue;
      }
      torch::serialize::OutputArchive copy(to.compilation_unit());
      rewrite_into(child, copy, path, rewrite);
      to.write(key, copy);
      continue;
    }
    c10::IValue value;
    from.read(key, value);
    const c10::IValue replacement = rewrite(path, value);
    if (!replacement.isNone()) to.write(key, replacement);
  }
}

inline std::string rewritten(const std::string& archive, const Rewrite& rewrite) {
  std::stringstream in(archive), out;
  torch::serialize::InputArchive from;
  from.load_from(in);
  torch::serialize::OutputArchive to;
  rewrite_into(from, to, "", rewrite);
  to.save_to(out);
  return out.str();
}

struct ArchiveEntry {
  std::string path;
  bool is_folder;
};

inline std::vector<ArchiveEntry> entries_of(const std::string& archive) {
  std::vector<ArchiveEntry> entries;
  rewritten(archive, [&](const std::string& path, const c10::IValue& value) {
    entries.push_back({path, value.isString() && value.toStringRef() == "folder"});
    return value;
  });
  return entries;
}

inline std::string without(const std::string& archive, const std::string& dropped) {
  return rewritten(archive, [&](const std::string& path, const c10::IValue& value) {
    return path == dropped ? c10::IValue() : value;
  });
}

// Another value of the same type.
inline c10::IValue altered(const c10::IValue& value) {
  if (value.isTensor()) {
    const at::Tensor tensor = value.toTensor();
    return tensor.scalar_type() == at::kLong ? tensor + 1 : (tensor + 1).to(tensor.scalar_type());
  }
  if (value.isBool()) return !value.toBool();
  if (value.isInt()) return value.toInt() + 1;
  if (value.isDouble()) return value.toDouble() * 0.5 + 0.1;
  if (value.isString()) return value.toStringRef() + "9";
  if (value.isTuple()) {
    const auto& pair = value.toTupleRef().elements();
    return c10::ivalue::Tuple::create({altered(pair[0]), pair[1]});
  }
  return value;
}

inline std::string with_altered(const std::string& archive, const std::string& target) {
  return rewritten(archive, [&](const std::string& path, const c10::IValue& value) {
    return path == target ? altered(value) : value;
  });
}

}  // namespace pacer::testing
