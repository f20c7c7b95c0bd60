// Parsing of request bytes: see wire_check.h.
#include "coordinator/wire_check.h"

#include <map>

#include "absl/strings/str_cat.h"
#include "coordinator/errors.h"
#include "google/protobuf/descriptor.h"
#include "google/protobuf/unknown_field_set.h"
#include "models/tokenizer/utf8.h"

namespace lockstep {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::UnknownField;
using google::protobuf::UnknownFieldSet;

// Nested messages deeper than any of ours are not followed.
constexpr int kMaxDepth = 16;

std::string FindInvalid(const Descriptor* descriptor, const std::string& bytes,
                        const std::string& prefix, int depth) {
  UnknownFieldSet fields;
  if (depth > kMaxDepth || !fields.ParseFromString(bytes)) return "";
  std::map<int, int> seen;  // by field number: how many entries came before
  for (int i = 0; i < fields.field_count(); ++i) {
    const UnknownField& unknown = fields.field(i);
    const FieldDescriptor* field = descriptor->FindFieldByNumber(unknown.number());
    if (field == nullptr || unknown.type() != UnknownField::TYPE_LENGTH_DELIMITED) continue;
    std::string path = absl::StrCat(prefix, field->name());
    if (field->is_repeated()) absl::StrAppend(&path, "[", seen[unknown.number()]++, "]");
    if (field->type() == FieldDescriptor::TYPE_STRING) {
      if (!IsValidUtf8(unknown.length_delimited())) return path;
    } else if (field->type() == FieldDescriptor::TYPE_MESSAGE) {
      const std::string inner = FindInvalid(field->message_type(), unknown.length_delimited(),
                                            absl::StrCat(path, "."), depth + 1);
      if (!inner.empty()) return inner;
    }
  }
  return "";
}

}  // namespace

std::string FindInvalidUtf8(const Descriptor* descriptor, const std::string& bytes) {
  return FindInvalid(descriptor, bytes, "", 0);
}

absl::Status ParseRequest(const std::string& bytes, google::protobuf::Message* message) {
  // The parser reports a broken string only as a failure, so the search runs only then.
  if (message->ParseFromString(bytes)) return absl::OkStatus();
  const std::string path = FindInvalidUtf8(message->GetDescriptor(), bytes);
  if (!path.empty()) {
    return InvalidField("INVALID_UTF8", path, absl::StrCat(path, " is not valid UTF-8"));
  }
  return InvalidField("MALFORMED_MESSAGE", "",
                      absl::StrCat("the request is not a well-formed ",
                                   std::string(message->GetDescriptor()->full_name())));
}

}  // namespace lockstep
