// Parsing of request bytes with errors that a client can act on: a message that does not parse is
// the client's fault (INVALID_ARGUMENT), and invalid UTF-8 in a string field is named by its field
// path.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "google/protobuf/message.h"

namespace lockstep {

// INVALID_ARGUMENT: INVALID_UTF8 with the path of the string field ("stopping.stop_strings[1]"),
// else MALFORMED_MESSAGE.
absl::Status ParseRequest(const std::string& bytes, google::protobuf::Message* message);

// Path of the first string field of a serialized `descriptor` message that holds invalid UTF-8, in
// field order of the wire; empty when there is none or when the bytes are no such message.
std::string FindInvalidUtf8(const google::protobuf::Descriptor* descriptor,
                            const std::string& bytes);

}  // namespace lockstep
