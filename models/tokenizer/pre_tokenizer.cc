// Pre-tokenizer patterns by PCRE2.
#define PCRE2_CODE_UNIT_WIDTH 8
#include "models/tokenizer/pre_tokenizer.h"

#include <pcre2.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/base/status_macros.h"
#include "models/tokenizer/utf8.h"

namespace lockstep {
namespace {

// Steps of one match: a floor, plus some for every byte of text, since going back over a long run
// of equal characters takes a step for each.
constexpr uint64_t kMatchSteps = 10'000'000;
constexpr uint64_t kMatchStepsPerByte = 16;
constexpr size_t kJitStackBytes = 1 << 20;
constexpr uint32_t kHeapKibibytes = 64 * 1024;

// What \s means in these files: the White_Space property. PCRE2's \s adds U+180E.
constexpr char kSpaceRanges[] = "\\t-\\r\\x{85}\\p{Z}";

// Rewrites \s and \S with explicit ranges. \S inside a class stays as it is.
std::string SpellOutSpaces(absl::string_view pattern) {
  std::string out;
  bool in_class = false;
  for (size_t i = 0; i < pattern.size(); ++i) {
    const char c = pattern[i];
    if (c == '\\' && i + 1 < pattern.size()) {
      const char escaped = pattern[++i];
      if (escaped == 's') {
        absl::StrAppend(&out, in_class ? "" : "[", kSpaceRanges, in_class ? "" : "]");
      } else if (escaped == 'S' && !in_class) {
        absl::StrAppend(&out, "[^", kSpaceRanges, "]");
      } else {
        out.push_back(c);
        out.push_back(escaped);
      }
      continue;
    }
    if (c == '[') {
      in_class = true;
    } else if (c == ']') {
      in_class = false;
    }
    out.push_back(c);
  }
  return out;
}

std::string ErrorText(int code) {
  PCRE2_UCHAR buffer[256] = {};
  pcre2_get_error_message(code, buffer, sizeof(buffer));
  return reinterpret_cast<const char*>(buffer);
}

struct MatchContextDeleter {
  void operator()(pcre2_match_context* context) const { pcre2_match_context_free(context); }
};
struct MatchDataDeleter {
  void operator()(pcre2_match_data* data) const { pcre2_match_data_free(data); }
};
struct JitStackDeleter {
  void operator()(pcre2_jit_stack* stack) const { pcre2_jit_stack_free(stack); }
};
struct CodeDeleter {
  void operator()(pcre2_code* code) const { pcre2_code_free(code); }
};

// The memory of one pattern's matches in one text.
struct MatchState {
  MatchState(const pcre2_code* code, size_t text_size)
      : data(pcre2_match_data_create_from_pattern(code, nullptr)),
        context(pcre2_match_context_create(nullptr)),
        stack(pcre2_jit_stack_create(32 * 1024, kJitStackBytes, nullptr)) {
    const uint64_t steps = kMatchSteps + kMatchStepsPerByte * text_size;
    pcre2_set_match_limit(context.get(),
                          static_cast<uint32_t>(std::min<uint64_t>(steps, UINT32_MAX)));
    pcre2_set_heap_limit(context.get(), kHeapKibibytes);
    pcre2_jit_stack_assign(context.get(), nullptr, stack.get());
  }

  std::unique_ptr<pcre2_match_data, MatchDataDeleter> data;
  std::unique_ptr<pcre2_match_context, MatchContextDeleter> context;
  std::unique_ptr<pcre2_jit_stack, JitStackDeleter> stack;
};

}  // namespace

class PreTokenizer::Pattern {
 public:
  static absl::StatusOr<Pattern> Compile(const PreTokenizerStep& step) {
    const std::string source = step.literal ? step.pattern : SpellOutSpaces(step.pattern);
    // ^ and $ match at every line, as in the engine that these files are written for.
    const uint32_t options =
        PCRE2_UTF | (step.literal ? PCRE2_LITERAL : PCRE2_UCP | PCRE2_MULTILINE);
    int error = 0;
    size_t offset = 0;
    Pattern pattern;
    pattern.code_.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(source.data()), source.size(),
                                      options, &error, &offset, nullptr));
    if (pattern.code_ == nullptr) {
      return absl::UnimplementedError(absl::StrCat("pre_tokenizer pattern \"", step.pattern,
                                                   "\" does not compile: ", ErrorText(error),
                                                   " at offset ", offset));
    }
    // Without a JIT compiler for this machine the interpreter runs the pattern.
    pcre2_jit_compile(pattern.code_.get(), PCRE2_JIT_COMPLETE);
    return pattern;
  }

  // Calls `match` with begin and end of every match in order, empty ones included.
  absl::Status ForEachMatch(absl::string_view text, const MatchState& state,
                            absl::FunctionRef<void(size_t, size_t)> match) const {
    size_t from = 0;
    while (from <= text.size()) {
      const int count = Match(text, from, state);
      if (count == PCRE2_ERROR_NOMATCH) {
        break;
      }
      if (count < 0) {
        return absl::ResourceExhaustedError(
            absl::StrCat("the pre-tokenizer pattern gave up on a text of ", text.size(),
                         " bytes at byte ", from, ": ", ErrorText(count)));
      }
      const size_t* span = pcre2_get_ovector_pointer(state.data.get());
      match(span[0], span[1]);
      from = span[1];
      if (span[0] == span[1]) {
        from += from < text.size() ? NextUtf8(text.substr(from)).length : 1;
      }
    }
    return absl::OkStatus();
  }

  const pcre2_code* code() const { return code_.get(); }

 private:
  int Match(absl::string_view text, size_t from, const MatchState& state) const {
    const PCRE2_SPTR subject = reinterpret_cast<PCRE2_SPTR>(text.data());
    // The text was checked once; a check by every match would make the whole quadratic.
    const int count = pcre2_match(code_.get(), subject, text.size(), from, PCRE2_NO_UTF_CHECK,
                                  state.data.get(), state.context.get());
    if (count != PCRE2_ERROR_JIT_STACKLIMIT) {
      return count;
    }
    // The interpreter keeps its frames on the heap, within the library's heap limit.
    return pcre2_match(code_.get(), subject, text.size(), from, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT,
                       state.data.get(), state.context.get());
  }

  std::unique_ptr<pcre2_code, CodeDeleter> code_;
};

struct PreTokenizer::Step {
  PreTokenizerStep::Behavior behavior;
  Pattern pattern;
};

struct PreTokenizer::Scratch {
  std::vector<std::unique_ptr<MatchState>> states;  // by step; null without a pattern
};

PreTokenizer::PreTokenizer() = default;
PreTokenizer::~PreTokenizer() = default;

absl::StatusOr<std::unique_ptr<PreTokenizer>> PreTokenizer::Create(
    const std::vector<PreTokenizerStep>& steps) {
  std::unique_ptr<PreTokenizer> result(new PreTokenizer());
  for (const PreTokenizerStep& step : steps) {
    Step compiled;
    compiled.behavior = step.behavior;
    if (step.behavior != PreTokenizerStep::Behavior::kAddPrefixSpace) {
      ASSIGN_OR_RETURN(compiled.pattern, Pattern::Compile(step));
    }
    result->steps_.push_back(std::move(compiled));
  }
  return result;
}

absl::Status PreTokenizer::Split(absl::string_view text,
                                 absl::FunctionRef<void(absl::string_view)> piece) const {
  Scratch scratch;
  for (const Step& step : steps_) {
    const pcre2_code* code = step.pattern.code();
    scratch.states.push_back(code == nullptr ? nullptr
                                             : std::make_unique<MatchState>(code, text.size()));
  }
  return RunStep(0, text, scratch, piece);
}

absl::Status PreTokenizer::RunStep(size_t index, absl::string_view text, const Scratch& scratch,
                                   absl::FunctionRef<void(absl::string_view)> piece) const {
  using Behavior = PreTokenizerStep::Behavior;
  if (text.empty()) {
    return absl::OkStatus();
  }
  if (index == steps_.size()) {
    piece(text);
    return absl::OkStatus();
  }
  const Step& step = steps_[index];
  if (step.behavior == Behavior::kAddPrefixSpace) {
    return text[0] == ' ' ? RunStep(index + 1, text, scratch, piece)
                          : RunStep(index + 1, absl::StrCat(" ", text), scratch, piece);
  }
  absl::Status status = absl::OkStatus();
  const auto pass = [&](size_t begin, size_t end, bool keep) {
    if (keep && begin < end && status.ok()) {
      status = RunStep(index + 1, text.substr(begin, end - begin), scratch, piece);
    }
  };
  size_t done = 0;
  RETURN_IF_ERROR(
      step.pattern.ForEachMatch(text, *scratch.states[index], [&](size_t begin, size_t end) {
        pass(done, begin, step.behavior != Behavior::kKeepMatches);
        pass(begin, end, step.behavior != Behavior::kKeepGaps);
        done = end;
      }));
  pass(done, text.size(), step.behavior != Behavior::kKeepMatches);
  return status;
}

}  // namespace lockstep
