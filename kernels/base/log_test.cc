#include "kernels/base/log.h"

#include <string>

#include "absl/time/time.h"
#include "gtest/gtest.h"
#include "kernels/base/log_line.h"
#include "nlohmann/json.hpp"

namespace lockstep {
namespace {

LogLine Warning(const std::string& message, absl::Time time) {
  LogLine line;
  line.time = time;
  line.severity = Severity::kWarning;
  line.message = message;
  return line;
}

TEST(LogLineTest, JsonHasTheFieldsThatAreKnown) {
  LogLine line = Warning("two\nlines \"quoted\" \xe2 tail", absl::FromUnixMillis(1500));
  line.role = "worker";
  line.rank = 3;
  line.epoch = 7;
  line.request_id = "r-1";
  const std::string text = FormatLogLine(line, LogFormat::kJson);
  ASSERT_EQ(text.find('\n'), text.size() - 1) << "one line";
  const nlohmann::json object = nlohmann::json::parse(text);
  EXPECT_EQ(object["time"], "1970-01-01T00:00:01.5+00:00");
  EXPECT_EQ(object["severity"], "warning");
  EXPECT_EQ(object["role"], "worker");
  EXPECT_EQ(object["rank"], 3);
  EXPECT_EQ(object["epoch"], 7);
  EXPECT_EQ(object["request_id"], "r-1");
  EXPECT_EQ(object["message"], "two\nlines \"quoted\" \xef\xbf\xbd tail");

  const nlohmann::json bare =
      nlohmann::json::parse(FormatLogLine(Warning("x", absl::UnixEpoch()), LogFormat::kJson));
  EXPECT_EQ(bare.size(), 3u) << bare;
}

TEST(LogLineTest, TextIsOneLineToo) {
  LogLine line = Warning("two\nlines", absl::UnixEpoch());
  line.role = "coordinator";
  line.epoch = 2;
  line.request_id = "r-1";
  const std::string text = FormatLogLine(line, LogFormat::kText);
  EXPECT_EQ(text.substr(0, 2), "W ");
  EXPECT_EQ(text.substr(text.find('[')), "[coordinator] [epoch 2] [request r-1] two lines\n");
}

TEST(RepeatCounterTest, CountsWhatRepeats) {
  RepeatCounter counter;
  const absl::Time start = absl::UnixEpoch();
  EXPECT_TRUE(counter.Admit(Warning("full", start)));
  for (int i = 0; i < 1000; ++i) EXPECT_FALSE(counter.Admit(Warning("full", start)));
  EXPECT_TRUE(counter.Admit(Warning("other", start)));
  EXPECT_TRUE(counter.TakeExpired(start + RepeatCounter::kWindow / 2).empty());

  const auto expired = counter.TakeExpired(start + RepeatCounter::kWindow);
  ASSERT_EQ(expired.size(), 1u);
  EXPECT_EQ(expired[0].message, "full (repeated 1000 times)");
  EXPECT_EQ(expired[0].severity, Severity::kWarning);
  // A new window for what was repeated; what was not is new again.
  const absl::Time later = start + RepeatCounter::kWindow;
  EXPECT_FALSE(counter.Admit(Warning("full", later)));
  EXPECT_TRUE(counter.Admit(Warning("other", later)));
  EXPECT_EQ(counter.TakeExpired(later + RepeatCounter::kWindow)[0].message,
            "full (repeated 1 times)");
  EXPECT_TRUE(counter.TakeExpired(later + 2 * RepeatCounter::kWindow).empty());
  EXPECT_TRUE(counter.Admit(Warning("full", later + 2 * RepeatCounter::kWindow)));
}

TEST(RepeatCounterTest, RequestsAreCountedApartAndInfosNot) {
  RepeatCounter counter;
  LogLine line = Warning("slow", absl::UnixEpoch());
  line.request_id = "a";
  EXPECT_TRUE(counter.Admit(line));
  line.request_id = "b";
  EXPECT_TRUE(counter.Admit(line));
  line.severity = Severity::kInfo;
  EXPECT_TRUE(counter.Admit(line));
  EXPECT_TRUE(counter.Admit(line));
}

TEST(RepeatCounterTest, RemembersABoundedNumberOfLines) {
  RepeatCounter counter;
  const absl::Time start = absl::UnixEpoch();
  for (size_t i = 0; i < 3 * RepeatCounter::kMaxLines; ++i) {
    EXPECT_TRUE(counter.Admit(Warning(std::to_string(i), start)));
  }
  EXPECT_FALSE(counter.Admit(Warning("0", start)));
  EXPECT_TRUE(counter.Admit(Warning(std::to_string(2 * RepeatCounter::kMaxLines), start)));
}

TEST(LogTest, WritesToStderrInTheFormatThatIsSet) {
  SetLogFormat(LogFormat::kJson);
  SetLogEpoch(5);
  SetLogRank(1);
  ::testing::internal::CaptureStderr();
  LogFields fields;
  fields.request_id = "r-2";
  Log(Severity::kError, "gone", fields);
  Log(Severity::kError, "gone", fields);
  SetLogLevel(Severity::kError);
  LogWarning("dropped");
  const std::string text = ::testing::internal::GetCapturedStderr();
  SetLogLevel(Severity::kInfo);
  SetLogFormat(LogFormat::kText);
  const nlohmann::json object = nlohmann::json::parse(text);  // one line only
  EXPECT_EQ(object["epoch"], 5);
  EXPECT_EQ(object["rank"], 1);
  EXPECT_EQ(object["request_id"], "r-2");
  EXPECT_EQ(object["message"], "gone");
}

}  // namespace
}  // namespace lockstep
