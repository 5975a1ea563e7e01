#include <pacer/files/save_records.h>

#include <algorithm>
#include <locale>
#include <sstream>

#include <pacer/core/error.h>
#include <pacer/files/checksum.h>

namespace pacer {
namespace {

constexpr const char* kNotFinite = "not-finite";

// No file of a checkpoint may have a dot in front.
std::string record_name(int rank) { return ".part-of-rank-" + std::to_string(rank); }

// One line for each file, and "not-finite" where parameters in them are not; or "failed" and the reason. The
// last line is the checksum of what is before it.
std::string record_text(const SaveRecord& record) {
  std::string text;
  for (const CheckpointFile& file : record.files) {
    text += file.name + ' ' + std::to_string(file.size) + ' ' + file.checksum + '\n';
  }
  if (!record.is_finite) text += kNotFinite + std::string("\n");
  if (!record.failure.empty()) text = "failed\n" + record.failure + '\n';
  return text + checksum_of(text) + '\n';
}

SaveRecord parse_record(const std::string& text, const std::string& path) {
  constexpr size_t kLastLine = 33;
  const size_t end = text.size() - std::min(text.size(), kLastLine);
  require<FileError>(text.size() >= kLastLine && text.substr(end) == checksum_of(text.substr(0, end)) + '\n',
                     path, " is damaged: its checksum does not match its text");
  SaveRecord record;
  const std::string body = text.substr(0, end);
  constexpr std::string_view kFailed = "failed\n";
  if (body.size() > kFailed.size() + 1 && body.compare(0, kFailed.size(), kFailed) == 0) {
    record.failure = body.substr(kFailed.size(), body.size() - kFailed.size() - 1);
    return record;
  }
  std::istringstream lines(body);
  for (std::string line; std::getline(lines, line);) {
    if (line == kNotFinite) {
      record.is_finite = false;
      continue;
    }
    std::istringstream fields(line);
    fields.imbue(std::locale::classic());
    CheckpointFile file;
    fields >> file.name >> file.size >> file.checksum;
    const bool is_file =
        fields && is_checkpoint_file_name(file.name) && file.size >= 0 && is_checksum(file.checksum);
    require<FileError>(is_file, path, " is damaged: a line of it is no file of a checkpoint");
    record.files.push_back(std::move(file));
  }
  return record;
}

}  // namespace

void leave_record(const std::string& staging, int rank, const SaveRecord& record, FileSystem& files) {
  const std::string path = staging + '/' + record_name(rank), unfinished = path + ".unfinished";
  const std::string text = record_text(record);
  FileWriter out(files, unfinished);
  out.write(text.data(), text.size());
  out.finish();
  rename(files, unfinished, path);
}

std::optional<SaveRecord> take_record(const std::string& staging, int rank, FileSystem& files) {
  const std::string name = record_name(rank), path = staging + '/' + name;
  const std::vector<std::string> names = list_folder(files, staging);
  if (std::find(names.begin(), names.end(), name) == names.end()) return std::nullopt;
  const std::vector<char> bytes = FileReader(files, path).read();
  SaveRecord record = parse_record(std::string(bytes.begin(), bytes.end()), path);
  remove_file(files, path);
  return record;
}

}  // namespace pacer
