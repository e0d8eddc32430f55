// The page that a run writes: what of metrics.jsonl is in it. dev/tests/report_test.py looks at pages in a browser.
#include "runtime/report.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "dev/tests/temp_dir.h"
#include "runtime/error.h"

namespace fs = std::filesystem;
using nlohmann::json;

namespace {

constexpr const char* run_line = R"({"command":"./train_gpt","precision":"bf16","flags":{"seed":1}})";

std::string text_of(const std::string& file) {
  std::ostringstream text;
  text << std::ifstream(file).rdbuf();
  return text.str();
}

// What the page in this folder shows of its only run.
json run_of(const TempDir& folder) {
  const std::string page = text_of(folder / "report.html"), begin = R"(<script type="application/json" id="data">)";
  const size_t at = page.find(begin) + begin.size();
  return json::parse(page.substr(at, page.find("</script>", at) - at))["runs"][0];
}

int largest_gap(const json& steps) {
  int gap = 0;
  for (size_t i = 1; i < steps.size(); i++) gap = std::max(gap, steps[i].get<int>() - steps[i - 1].get<int>());
  return gap;
}

void append(const std::string& file, const std::string& text) {
  std::ofstream(file, std::ios::binary | std::ios::app) << text;
}

}  // namespace

TEST(Report, ShowsTheLinesThatAreThere) {
  TempDir folder;
  const std::string metrics = folder.write("metrics.jsonl", run_line + std::string("\n"));
  Report report(metrics);
  EXPECT_FALSE(fs::exists(report.path()));
  append(metrics, R"({"step":1,"loss":3.141592653589793,"h0.attn.edq":0.5,"h0.attn.stale_v_frac":0.5})"
                  "\n"
                  R"({"step":2,"loss":null,"skipped":true,"lockstep.bf16.edq":1,"val_loss":2.5})"
                  "\n"
                  R"({"step":3,"los)");  // a line that is not finished yet
  report.update();
  EXPECT_EQ(run_of(folder), json::parse(R"({
    "run": {"command": "./train_gpt", "precision": "bf16", "flags": {"seed": 1}},
    "columns": {"step": [1, 2], "loss": [3.141593, null], "skipped": [null, true], "lockstep.bf16.edq": [null, 1],
                "val_loss": [null, 2.5]},
    "groups": {"h0.attn.edq": [0.5], "step": [1]}})"));

  append(metrics, "s\":1}\n");  // now it is
  report.update();
  EXPECT_EQ(run_of(folder)["columns"]["loss"], json::parse("[3.141593, null, 1]"));
  EXPECT_FALSE(fs::exists(report.path() + ".new"));
}

TEST(Report, DataCannotEndItsElement) {
  TempDir folder;
  const std::string hostile = "</script><!-- <script>\xe2\x80\xa8\xf0\x9f\x99\x82 '\"\\";
  Report report(folder.write("metrics.jsonl", json{{"command", hostile}}.dump() + "\n{\"step\":1,\"loss\":1}\n"));
  report.update();
  EXPECT_EQ(run_of(folder)["run"]["command"], hostile);
}

// 40,000 steps with a spike at a step that no regular stride meets, and 40 tensor groups.
TEST(Report, ALongRunGivesASmallPage) {
  TempDir folder;
  std::string text = run_line + std::string("\n");
  for (int step = 1; step <= 40000; step++) {
    text +=
        strf(R"({"step":%d,"loss":%.6f,"grad_norm":1.23456789)", step, step == 31337 ? 99. : 2 + 100. / (99 + step));
    if (step % 500 == 0) text += R"(,"val_loss":2.5)";
    for (int group = 0; group < 40 && step % 10 == 0; group++) text += strf(R"(,"h%d.mlp.edq":0.123456789)", group);
    text += "}\n";
  }
  const std::string metrics = folder.write("metrics.jsonl", text);
  Report report(metrics);
  report.update();
  EXPECT_LT(fs::file_size(report.path()), 1'000'000);
  const json run = run_of(folder), &columns = run["columns"], &step = columns["step"];
  EXPECT_LE(step.size(), 4000u);
  EXPECT_GE(step.size(), 2000u);
  EXPECT_LE(largest_gap(step), 80);  // 2,000 rows, two a bucket: a bucket has at most 40 steps, and two lie within two
  EXPECT_EQ(std::count(columns["val_loss"].begin(), columns["val_loss"].end(), json(2.5)), 80);
  EXPECT_EQ(std::count(columns["loss"].begin(), columns["loss"].end(), json(99.)), 1);
  EXPECT_EQ(step.back(), 40000);
  EXPECT_EQ(step.front(), 1);
  const json& group_step = run["groups"]["step"];
  EXPECT_LE(group_step.size(), 200u);
  EXPECT_GE(group_step.size(), 100u);
  EXPECT_LE(largest_gap(group_step), 400);
  EXPECT_EQ(group_step.front(), 10);
  EXPECT_GT(group_step.back(), 39600);
}

TEST(Report, EveryValidationStays) {
  TempDir folder;
  std::string text = run_line + std::string("\n");
  for (int step = 1; step <= 10000; step++) text += strf("{\"step\":%d,\"loss\":2,\"val_loss\":2}\n", step);
  Report report(folder.write("metrics.jsonl", text));
  report.update();
  EXPECT_EQ(run_of(folder)["columns"]["step"].size(), 10000u);
}

TEST(Report, AFailureIsOneWarning) {
  TempDir folder;
  Report report(folder.write("metrics.jsonl", run_line + std::string("\n{\"step\":1,\"loss\":1}\n")));
  fs::create_directory(report.path());  // a folder in the way
  testing::internal::CaptureStderr();
  report.update();
  report.update();
  const std::string warning = testing::internal::GetCapturedStderr();
  EXPECT_TRUE(warning.starts_with("train_gpt: warning: cannot write " + report.path())) << warning;
  EXPECT_EQ(std::count(warning.begin(), warning.end(), '\n'), 1) << warning;
  EXPECT_FALSE(fs::exists(report.path() + ".new"));

  fs::remove(report.path());
  report.update();
  EXPECT_EQ(run_of(folder)["columns"]["step"], json::parse("[1]"));
}

TEST(Report, NothingWithoutARunFolder) {
  Report report("");
  report.update();
  EXPECT_EQ(report.path(), "");
}
