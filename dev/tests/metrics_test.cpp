// metrics.jsonl: valid lines whatever the numbers, nothing lost of an earlier run, and a disk that refuses.
#include "runtime/metrics.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cfloat>
#include <filesystem>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>

#include "dev/tests/temp_dir.h"
#include "runtime/error.h"

namespace fs = std::filesystem;
using nlohmann::json;

namespace {

// A folder of its own for each test, gone afterwards.
struct MetricsTest : testing::Test {
  TempDir temp;
  fs::path folder{temp.path};
};

std::vector<std::string> lines_of(const fs::path& file) {
  std::ifstream in(file);
  std::vector<std::string> lines;
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

std::string error_of(const fs::path& folder) {
  return message_of<RunError>([&] { Metrics metrics(folder.string()); });
}

}  // namespace

TEST(Json, KeepsOrderAndTypes) {
  Record nested;
  nested.add("b", 2).add("a", int64_t{1} << 62);
  Record record;
  record.add("step", 1).add("loss", 3.5f).add("ok", true).add("text", "a\"b\n").add("in", nested);
  EXPECT_EQ(to_json(record), R"({"step":1,"loss":3.5,"ok":true,"text":"a\"b\n","in":{"b":2,"a":4611686018427387904}})");
  EXPECT_EQ(to_json(Record()), "{}");
}

TEST(Json, NumbersReadBackAsTheSameDouble) {
  for (double x : {0.1, 1.0 / 3, -0.0, 5e-324, DBL_MIN, DBL_MAX, 1e22, 123456789.123456789, 3.0}) {
    const double back = json::parse(to_json(Record().add("x", x)))["x"].get<double>();
    EXPECT_EQ(memcmp(&back, &x, sizeof x), 0) << x << " " << back;
  }
  EXPECT_EQ(json::parse(to_json(Record().add("x", 0.1f)))["x"].get<double>(), static_cast<double>(0.1f));
  EXPECT_EQ(to_json(Record().add("x", 0.1)), R"({"x":0.1})");
}

TEST(Json, NothingIsABareWord) {
  const double inf = std::numeric_limits<double>::infinity();
  EXPECT_EQ(to_json(Record().add("loss", NAN).add("norm", inf).add("x", -inf)),
            R"({"loss":null,"norm":null,"x":null})");
  Record record;
  record.add_if_computed("edq", NAN).add_if_computed("val_loss", inf).add_if_computed("y", 1.5);
  EXPECT_EQ(to_json(record), R"({"val_loss":null,"y":1.5})");
  // A file name need not be UTF-8; JSON must be.
  const std::string text = to_json(Record().add("command",
                                                "a\xff\xc3"
                                                "b"));
  EXPECT_TRUE(json::accept(text)) << text;
}

TEST_F(MetricsTest, LinesAreThereAtOnce) {
  Metrics metrics((folder / "a/b").string());  // parents too
  metrics.write(Record().add("command", "x"));
  metrics.write(Record().add("step", 1));
  EXPECT_EQ(metrics.moved_to(), "");
  EXPECT_EQ(metrics.path(), (folder / "a/b/metrics.jsonl").string());
  EXPECT_EQ(lines_of(folder / "a/b/metrics.jsonl"), (std::vector<std::string>{R"({"command":"x"})", R"({"step":1})"}));
}

TEST_F(MetricsTest, NoFolderWritesNothing) {
  Metrics metrics("");
  metrics.write(Record().add("step", 1));
  EXPECT_EQ(metrics.path(), "");
}

TEST_F(MetricsTest, EarlierRunsAreKept) {
  for (int run = 0; run < 3; run++) {
    Metrics metrics(folder.string());
    metrics.write(Record().add("run", run));
    EXPECT_EQ(metrics.moved_to(), run == 0 ? "" : (folder / strf("metrics.%d.jsonl", run)).string());
  }
  EXPECT_EQ(lines_of(folder / "metrics.1.jsonl"), std::vector<std::string>{R"({"run":0})"});
  EXPECT_EQ(lines_of(folder / "metrics.2.jsonl"), std::vector<std::string>{R"({"run":1})"});
  EXPECT_EQ(lines_of(folder / "metrics.jsonl"), std::vector<std::string>{R"({"run":2})"});
  fs::remove(folder / "metrics.1.jsonl");
  EXPECT_EQ(Metrics(folder.string()).moved_to(), (folder / "metrics.1.jsonl").string());  // never over another
}

TEST_F(MetricsTest, AResumedRunGoesOnAfterItsStep) {
  const auto write = [&](const std::string& text) { std::ofstream(folder / "metrics.jsonl") << text; };
  const std::string run = R"({"command":"x"})", one = R"({"step":1,"loss":2})", two = R"({"step":2,"loss":1})";
  const auto resumed = [&](int64_t step) {
    Metrics metrics(folder.string(), step);
    EXPECT_EQ(metrics.moved_to(), "");
    if (metrics.empty()) metrics.write(Record().add("command", "y"));
    metrics.write(Record().add("step", step + 1));
    return lines_of(folder / "metrics.jsonl");
  };
  write(run + "\n" + one + "\n" + two + "\n");
  EXPECT_EQ(resumed(1), (std::vector<std::string>{run, one, R"({"step":2})"}));
  write(run + "\n" + one + "\n" + two.substr(0, 9));  // killed in the middle of a line
  EXPECT_EQ(resumed(2), (std::vector<std::string>{run, one, R"({"step":3})"}));
  write(run + "\n" + one + "\nnonsense\n" + two + "\n");
  EXPECT_EQ(resumed(2), (std::vector<std::string>{run, one, R"({"step":3})"}));
  fs::remove(folder / "metrics.jsonl");  // nothing is there: the run's line comes first all the same
  EXPECT_EQ(resumed(2), (std::vector<std::string>{R"({"command":"y"})", R"({"step":3})"}));
}

TEST_F(MetricsTest, RefusesWhatIsNotAFolder) {
  std::ofstream(folder / "file") << "x";
  EXPECT_EQ(error_of(folder / "file").find("--out: found a file in the way"), 0u) << error_of(folder / "file");
  EXPECT_EQ(error_of(folder / "file/sub").find("--out: found a file in the way"), 0u) << error_of(folder / "file/sub");
  fs::create_directories(folder / "run/metrics.jsonl");
  EXPECT_EQ(error_of(folder / "run").find("--out: found the folder"), 0u) << error_of(folder / "run");
  // Nobody may create folders there, root included.
  EXPECT_EQ(error_of("/proc/train_gpt").find("--out: cannot create the folder '/proc/train_gpt'"), 0u);
  if (geteuid() == 0) return;  // root may write anywhere
  fs::create_directory(folder / "locked");
  fs::permissions(folder / "locked", fs::perms::owner_read | fs::perms::owner_exec);
  EXPECT_EQ(error_of(folder / "locked").find("--out: cannot write"), 0u) << error_of(folder / "locked");
}

TEST_F(MetricsTest, AFullDiskCostsLinesAndNotTheRun) {
  // A file-size limit stands for a full disk: the write that crosses it is cut short, the next one fails. It would cut
  // a captured stderr too, if that were a file.
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  const int stderr_before = dup(2);
  dup2(ends[1], 2);
  {
    Metrics metrics(folder.string());
    metrics.write(Record().add("step", 1));
    rlimit before;
    getrlimit(RLIMIT_FSIZE, &before);
    rlimit small = before;
    small.rlim_cur = 20;
    setrlimit(RLIMIT_FSIZE, &small);
    metrics.write(Record().add("step", 2).add("text", std::string(100, 'x')));
    metrics.write(Record().add("step", 3).add("text", std::string(100, 'x')));
    setrlimit(RLIMIT_FSIZE, &before);
    metrics.write(Record().add("step", 4));
  }
  dup2(stderr_before, 2);
  close(ends[1]);
  char text[1000];
  const std::string warning(text, static_cast<size_t>(std::max<ssize_t>(0, read(ends[0], text, sizeof text))));
  close(ends[0]);
  close(stderr_before);
  EXPECT_EQ(warning.find("train_gpt: warning: cannot write "), 0u) << warning;
  EXPECT_EQ(std::count(warning.begin(), warning.end(), '\n'), 1) << warning;  // one for both failures
  EXPECT_EQ(lines_of(folder / "metrics.jsonl"), (std::vector<std::string>{R"({"step":1})", R"({"step":4})"}));
}
