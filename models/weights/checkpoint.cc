// Implementation of Checkpoint: maps safetensors files and checks their headers and the index.
#include "models/weights/checkpoint.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <set>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/base/hash.h"
#include "kernels/base/status_macros.h"
#include "nlohmann/json.hpp"

namespace lockstep {

struct Checkpoint::Mapping {
  ~Mapping() {
    if (data != nullptr) munmap(data, static_cast<size_t>(bytes));
  }
  std::string file;  // base name
  void* data = nullptr;
  int64_t bytes = 0;
};

namespace {

using Json = nlohmann::json;

constexpr int64_t kLengthBytes = 8;
constexpr uint64_t kMaxHeaderBytes = 100'000'000;
constexpr int kMaxNesting = 16;
constexpr const char* kSingleFile = "model.safetensors";
constexpr const char* kIndexFile = "model.safetensors.index.json";

absl::Status Invalid(const std::string& file, const std::string& what) {
  return absl::DataLossError(absl::StrCat("CHECKPOINT_INVALID: ", file, ": ", what));
}

absl::Status Truncated(const std::string& file, const std::string& what) {
  return absl::DataLossError(absl::StrCat("CHECKPOINT_TRUNCATED: ", file, ": ", what));
}

// Closes a file descriptor when it goes out of scope.
class FdCloser {
 public:
  explicit FdCloser(int fd) : fd_(fd) {}
  ~FdCloser() { close(fd_); }
  FdCloser(const FdCloser&) = delete;
  FdCloser& operator=(const FdCloser&) = delete;

 private:
  int fd_;
};

bool IsRegularFile(const std::string& path) {
  struct stat info;
  return stat(path.c_str(), &info) == 0 && S_ISREG(info.st_mode);
}

std::string BaseName(const std::string& path) {
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? path : path.substr(slash + 1);
}

// Parses JSON that must be an object without duplicate keys at any level.
absl::StatusOr<Json> ParseStrictObject(const char* data, size_t size, const std::string& file,
                                       const std::string& what) {
  std::vector<std::set<std::string>> keys;
  std::string problem;
  std::string duplicate;
  const auto watch = [&](int depth, Json::parse_event_t event, Json& parsed) {
    if (depth > kMaxNesting && problem.empty()) {
      problem = absl::StrCat(what, " nests deeper than ", kMaxNesting, " levels");
    }
    if (event == Json::parse_event_t::object_start) keys.emplace_back();
    if (event == Json::parse_event_t::object_end && !keys.empty()) keys.pop_back();
    if (event == Json::parse_event_t::key && duplicate.empty() &&
        !keys.back().insert(parsed.get_ref<const std::string&>()).second) {
      duplicate = parsed.get_ref<const std::string&>();
    }
    return true;
  };
  Json json = Json::parse(data, data + size, watch, /*allow_exceptions=*/false);
  if (json.is_discarded()) return Invalid(file, absl::StrCat(what, " is not valid JSON"));
  if (!json.is_object()) return Invalid(file, absl::StrCat(what, " is not a JSON object"));
  if (!problem.empty()) return Invalid(file, problem);
  if (!duplicate.empty()) {
    return absl::DataLossError(absl::StrCat("CHECKPOINT_DUPLICATE_TENSOR: ", file, ": ", what,
                                            " has the key \"", duplicate, "\" twice"));
  }
  return json;
}

// A JSON integer in [0, 2^63).
bool ReadSize(const Json& json, int64_t* out) {
  if (json.is_number_unsigned()) {
    const uint64_t value = json.get<uint64_t>();
    if (value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) return false;
    *out = static_cast<int64_t>(value);
    return true;
  }
  if (!json.is_number_integer() || json.get<int64_t>() < 0) return false;
  *out = json.get<int64_t>();
  return true;
}

struct Entry {
  TensorInfo info;
  int64_t begin = 0;
  int64_t end = 0;
};

absl::StatusOr<std::vector<int64_t>> ReadSizes(const Json& object, const char* key,
                                               const std::string& file, const std::string& tensor) {
  const auto it = object.find(key);
  if (it == object.end() || !it->is_array()) {
    return Invalid(file, absl::StrCat("tensor ", tensor, ": no array \"", key, "\""));
  }
  std::vector<int64_t> values;
  for (const Json& item : *it) {
    int64_t value = 0;
    if (!ReadSize(item, &value)) {
      return Invalid(file, absl::StrCat("tensor ", tensor, ": \"", key,
                                        "\" holds something other than integers from 0"));
    }
    values.push_back(value);
  }
  return values;
}

// Dtype, shape and offsets of one header entry; the shape must match the bytes.
absl::StatusOr<Entry> ReadEntry(const std::string& name, const Json& json,
                                const std::string& file) {
  if (!json.is_object()) return Invalid(file, absl::StrCat("tensor ", name, ": not an object"));
  Entry entry;
  entry.info.name = name;
  entry.info.file = file;
  const auto dtype = json.find("dtype");
  if (dtype == json.end() || !dtype->is_string()) {
    return Invalid(file, absl::StrCat("tensor ", name, ": no string \"dtype\""));
  }
  const absl::StatusOr<DType> parsed = ParseDType(dtype->get_ref<const std::string&>());
  if (!parsed.ok()) {
    return Invalid(file, absl::StrCat("tensor ", name, ": ", parsed.status().message()));
  }
  entry.info.dtype = *parsed;
  ASSIGN_OR_RETURN(entry.info.shape, ReadSizes(json, "shape", file, name));
  ASSIGN_OR_RETURN(const std::vector<int64_t> offsets, ReadSizes(json, "data_offsets", file, name));
  if (offsets.size() != 2 || offsets[0] > offsets[1]) {
    return Invalid(file, absl::StrCat("tensor ", name, ": data_offsets [",
                                      absl::StrJoin(offsets, ", "), "] are not a range"));
  }
  entry.begin = offsets[0];
  entry.end = offsets[1];
  entry.info.bytes = entry.end - entry.begin;
  int64_t bytes = SizeOf(entry.info.dtype);
  bool overflow = false;
  for (int64_t d : entry.info.shape) overflow |= __builtin_mul_overflow(bytes, d, &bytes);
  if (overflow || bytes != entry.info.bytes) {
    return Invalid(file, absl::StrCat("tensor ", name, ": ", entry.info.ToString(), " takes ",
                                      overflow ? "more than 2^63" : absl::StrCat(bytes),
                                      " bytes, but data_offsets give it ", entry.info.bytes));
  }
  return entry;
}

// The entries must tile the data area: no holes, no overlaps, nothing outside.
absl::Status CheckLayout(std::vector<Entry>* entries, int64_t data_bytes, const std::string& file) {
  std::sort(entries->begin(), entries->end(), [](const Entry& a, const Entry& b) {
    return std::make_tuple(a.begin, a.end, a.info.name) <
           std::make_tuple(b.begin, b.end, b.info.name);
  });
  int64_t position = 0;
  std::string previous = "the header";
  for (const Entry& entry : *entries) {
    if (entry.begin < position) {
      return Invalid(file, absl::StrCat("tensor ", entry.info.name, " begins at ", entry.begin,
                                        " and overlaps ", previous, ", which ends at ", position));
    }
    if (entry.begin > position) {
      return Invalid(file, absl::StrCat("hole of ", entry.begin - position, " bytes between ",
                                        previous, " and tensor ", entry.info.name));
    }
    position = entry.end;
    previous = absl::StrCat("tensor ", entry.info.name);
  }
  if (position > data_bytes) {
    return Truncated(
        file, absl::StrCat("the header describes ", position, " bytes of tensors, the file has ",
                           data_bytes, ": ", position - data_bytes, " bytes are missing"));
  }
  if (position < data_bytes) {
    return Invalid(
        file, absl::StrCat("the file has ", data_bytes, " bytes of data, the header ", "describes ",
                           position, ": ", data_bytes - position, " bytes belong to no tensor"));
  }
  return absl::OkStatus();
}

// The tensors of one mapped file.
absl::StatusOr<std::vector<TensorInfo>> ReadHeader(const uint8_t* data, int64_t bytes,
                                                   const std::string& file) {
  if (bytes < kLengthBytes) {
    return Truncated(file,
                     absl::StrCat("the file has ", bytes, " bytes, the length field alone 8"));
  }
  uint64_t length = 0;
  for (int i = 0; i < kLengthBytes; ++i) length |= static_cast<uint64_t>(data[i]) << (8 * i);
  if (length > kMaxHeaderBytes) {
    return Invalid(file, absl::StrCat("header of ", length, " bytes; at most ", kMaxHeaderBytes,
                                      " are allowed"));
  }
  const int64_t header_end = kLengthBytes + static_cast<int64_t>(length);
  if (header_end > bytes) {
    return Truncated(
        file, absl::StrCat("the header ends at byte ", header_end, ", the file has ", bytes));
  }
  const char* text = reinterpret_cast<const char*>(data + kLengthBytes);
  if (length == 0 || text[0] != '{') return Invalid(file, "the header does not begin with {");
  ASSIGN_OR_RETURN(const Json header,
                   ParseStrictObject(text, static_cast<size_t>(length), file, "the header"));
  std::vector<Entry> entries;
  for (const auto& item : header.items()) {
    if (item.key() == "__metadata__") {
      if (!item.value().is_object()) return Invalid(file, "__metadata__ is not an object");
      continue;
    }
    ASSIGN_OR_RETURN(Entry entry, ReadEntry(item.key(), item.value(), file));
    entries.push_back(std::move(entry));
  }
  RETURN_IF_ERROR(CheckLayout(&entries, bytes - header_end, file));
  std::vector<TensorInfo> tensors;
  for (Entry& entry : entries) {
    entry.info.data = data + header_end + entry.begin;
    tensors.push_back(std::move(entry.info));
  }
  return tensors;
}

using WeightMap = std::map<std::string, std::string>;  // tensor -> file

absl::StatusOr<std::string> ReadSmallFile(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return Invalid(BaseName(path), std::strerror(errno));
  const FdCloser closer(fd);
  std::string text;
  char buffer[65536];
  for (;;) {
    const ssize_t n = read(fd, buffer, sizeof buffer);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return Invalid(BaseName(path), std::strerror(errno));
    if (n == 0) return text;
    text.append(buffer, static_cast<size_t>(n));
    if (text.size() > kMaxHeaderBytes) {
      return Invalid(BaseName(path), absl::StrCat("longer than ", kMaxHeaderBytes, " bytes"));
    }
  }
}

absl::StatusOr<WeightMap> ReadIndex(const std::string& path) {
  ASSIGN_OR_RETURN(const std::string text, ReadSmallFile(path));
  ASSIGN_OR_RETURN(const Json index,
                   ParseStrictObject(text.data(), text.size(), kIndexFile, "the index"));
  const auto weight_map = index.find("weight_map");
  if (weight_map == index.end() || !weight_map->is_object()) {
    return Invalid(kIndexFile, "no object \"weight_map\"");
  }
  WeightMap map;
  for (const auto& item : weight_map->items()) {
    if (!item.value().is_string()) {
      return Invalid(kIndexFile, absl::StrCat("tensor ", item.key(), ": no file name"));
    }
    const std::string& file = item.value().get_ref<const std::string&>();
    if (file.empty() || file == "." || file == ".." || file.find('/') != std::string::npos ||
        file.find('\0') != std::string::npos) {
      return Invalid(kIndexFile, absl::StrCat("tensor ", item.key(), ": \"", file,
                                              "\" is not a file name in the same directory"));
    }
    map[item.key()] = file;
  }
  if (map.empty()) return Invalid(kIndexFile, "weight_map names no tensors");
  return map;
}

// The tensors of each file must be those that the index says.
absl::Status CheckIndex(const WeightMap& map, const std::map<std::string, TensorInfo>& tensors) {
  for (const auto& item : map) {
    const auto it = tensors.find(item.first);
    if (it == tensors.end() || it->second.file != item.second) {
      return absl::DataLossError(absl::StrCat(
          "CHECKPOINT_INDEX_MISMATCH: ", kIndexFile, " places tensor ", item.first, " in ",
          item.second, ", where it is not",
          it == tensors.end() ? std::string() : absl::StrCat("; it is in ", it->second.file)));
    }
  }
  for (const auto& item : tensors) {
    if (map.count(item.first) == 0) {
      return absl::DataLossError(absl::StrCat("CHECKPOINT_INDEX_MISMATCH: ", item.second.file,
                                              " has tensor ", item.first, ", which ", kIndexFile,
                                              " does not name"));
    }
  }
  return absl::OkStatus();
}

}  // namespace

std::string TensorInfo::ToString() const {
  return absl::StrCat(Name(dtype), "[", absl::StrJoin(shape, ", "), "]");
}

Checkpoint::~Checkpoint() = default;

absl::Status Checkpoint::AddFile(const std::string& path) {
  auto mapping = std::make_unique<Mapping>();
  mapping->file = BaseName(path);
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return Invalid(path, absl::StrCat("cannot be opened: ", std::strerror(errno)));
  const FdCloser closer(fd);
  struct stat info;
  if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) return Invalid(path, "not a regular file");
  mapping->bytes = info.st_size;
  if (mapping->bytes > 0) {
    void* data = mmap(nullptr, static_cast<size_t>(mapping->bytes), PROT_READ, MAP_PRIVATE, fd, 0);
    if (data == MAP_FAILED) {
      return Invalid(path, absl::StrCat("cannot be mapped: ", std::strerror(errno)));
    }
    mapping->data = data;
  }
  ASSIGN_OR_RETURN(
      std::vector<TensorInfo> tensors,
      ReadHeader(static_cast<const uint8_t*>(mapping->data), mapping->bytes, mapping->file));
  for (TensorInfo& tensor : tensors) {
    const std::string name = tensor.name;
    const auto inserted = tensors_.emplace(name, std::move(tensor));
    if (!inserted.second) {
      return absl::DataLossError(absl::StrCat("CHECKPOINT_DUPLICATE_TENSOR: ", name, " is in ",
                                              inserted.first->second.file, " and in ",
                                              mapping->file));
    }
  }
  mappings_.push_back(std::move(mapping));
  return absl::OkStatus();
}

void Checkpoint::ComputeDigest() {
  std::string text;
  for (const auto& item : tensors_) {
    absl::StrAppend(&text, item.first.size(), ":", item.first, " ", item.second.ToString(), "\n");
  }
  std::map<std::string, int64_t> sizes;
  for (const auto& mapping : mappings_) sizes[mapping->file] = mapping->bytes;
  for (const auto& item : sizes) absl::StrAppend(&text, item.second, "\n");
  digest_ = HashBytes(text);
}

absl::StatusOr<std::unique_ptr<Checkpoint>> Checkpoint::Open(const std::string& directory) {
  struct stat info;
  if (stat(directory.c_str(), &info) != 0 || !S_ISDIR(info.st_mode)) {
    return absl::NotFoundError(absl::StrCat("no directory ", directory));
  }
  std::unique_ptr<Checkpoint> checkpoint(new Checkpoint);
  checkpoint->directory_ = directory;
  const std::string index_path = absl::StrCat(directory, "/", kIndexFile);
  if (IsRegularFile(index_path)) {
    ASSIGN_OR_RETURN(const WeightMap map, ReadIndex(index_path));
    std::map<std::string, std::string> files;  // file -> one of its tensors
    for (const auto& item : map) files.emplace(item.second, item.first);
    for (const auto& file : files) {
      const std::string path = absl::StrCat(directory, "/", file.first);
      if (!IsRegularFile(path)) {
        return absl::DataLossError(absl::StrCat("CHECKPOINT_MISSING_SHARD: ", file.first,
                                                " is not in ", directory, "; ", kIndexFile,
                                                " names it (tensor ", file.second, ", for one)"));
      }
      RETURN_IF_ERROR(checkpoint->AddFile(path));
    }
    RETURN_IF_ERROR(CheckIndex(map, checkpoint->tensors_));
  } else {
    const std::string path = absl::StrCat(directory, "/", kSingleFile);
    if (!IsRegularFile(path)) {
      return absl::NotFoundError(
          absl::StrCat("neither ", kSingleFile, " nor ", kIndexFile, " in ", directory));
    }
    RETURN_IF_ERROR(checkpoint->AddFile(path));
  }
  checkpoint->ComputeDigest();
  return checkpoint;
}

absl::StatusOr<std::unique_ptr<Checkpoint>> Checkpoint::OpenFile(const std::string& path) {
  if (!IsRegularFile(path)) return absl::NotFoundError(absl::StrCat("no file ", path));
  std::unique_ptr<Checkpoint> checkpoint(new Checkpoint);
  const size_t slash = path.rfind('/');
  checkpoint->directory_ = slash == std::string::npos ? "." : path.substr(0, slash);
  RETURN_IF_ERROR(checkpoint->AddFile(path));
  checkpoint->ComputeDigest();
  return checkpoint;
}

const TensorInfo* Checkpoint::Find(const std::string& name) const {
  const auto it = tensors_.find(name);
  return it == tensors_.end() ? nullptr : &it->second;
}

absl::StatusOr<const TensorInfo*> Checkpoint::Get(const std::string& name) const {
  const TensorInfo* tensor = Find(name);
  if (tensor == nullptr) {
    return absl::NotFoundError(absl::StrCat("no tensor ", name, " in ", directory_));
  }
  return tensor;
}

int64_t Checkpoint::total_bytes() const {
  int64_t bytes = 0;
  for (const auto& item : tensors_) bytes += item.second.bytes;
  return bytes;
}

}  // namespace lockstep
