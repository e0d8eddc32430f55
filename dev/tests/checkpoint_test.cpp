// Checkpoint folders: what is written is read back, what is not whole is none, and what refuses costs nothing else.
// Whole runs are resume_test.py's business, kills and full disks faults_test.py's.
#include "runtime/checkpoint.h"

#include <gtest/gtest.h>

#include <filesystem>

#include "dev/tests/temp_dir.h"
#include "runtime/comm.h"
#include "runtime/error.h"

namespace fs = std::filesystem;

namespace {

struct CheckpointTest : testing::Test {
  TempDir temp;
  Comm comm;
  const std::vector<float> weights = {1, 2, 3, 4, 5, 6}, m = {7, 8, 9};

  static RunState state(int64_t step) {
    RunState s;
    s.step = step, s.updates = step - 1, s.precision = "fp32", s.mcf = "strict", s.data = "these";
    s.losses = {.1, 1e-300, -2.5}, s.flags = {{"steps", "100"}, {"prompt", "\xc3\xa9\n\"quoted\""}};
    return s;
  }
  void start(Checkpoints& checkpoints, int64_t step) {
    const char* w = reinterpret_cast<const char*>(weights.data());
    checkpoints.start(state(step), {{"a", "F32", {2, 3}, w}, {"b", "F32", {3, 2}, w, true}}, "{}\n",
                      std::vector<SavedTensor>{{"a.m", "F32", {3}, reinterpret_cast<const char*>(m.data())}});
  }
  std::vector<std::string> names() const {
    std::vector<std::string> all;
    for (const auto& e : fs::directory_iterator(temp / "checkpoints")) all.push_back(e.path().filename().string());
    std::sort(all.begin(), all.end());
    return all;
  }
  std::string error() const {
    return message_of<RunError>([&] {
      if (const auto c = newest_checkpoint(temp.path)) c->verify(0, 1);
    });
  }
};

}  // namespace

TEST_F(CheckpointTest, ComesBackAsItWasWritten) {
  EXPECT_EQ(newest_checkpoint(temp.path), nullptr);
  Checkpoints checkpoints(temp.path, 2, false, comm);
  start(checkpoints, 7);
  EXPECT_TRUE(checkpoints.finish());
  EXPECT_EQ(names(), std::vector<std::string>{"step_00000007"});
  const auto c = newest_checkpoint(temp.path);
  ASSERT_NE(c, nullptr);
  c->verify(0, 1);
  const RunState s = c->state, expected = state(7);
  EXPECT_EQ(s.step, 7);
  EXPECT_EQ(s.updates, 6);
  EXPECT_EQ(s.losses, expected.losses);  // doubles are written so that they read back as the same
  EXPECT_EQ(s.flags, expected.flags);
  EXPECT_EQ(s.data, expected.data);
  EXPECT_EQ(c->optimizer_files(), std::vector<std::string>{"optimizer.rank0000.safetensors"});
  const Safetensors model(c->folder + "/model.safetensors", "test");
  const auto floats = [&](const char* name) {
    const char* data = model.data(*model.find(name));
    return std::vector<float>(reinterpret_cast<const float*>(data), reinterpret_cast<const float*>(data) + 6);
  };
  EXPECT_EQ(floats("a"), weights);
  EXPECT_EQ(floats("b"), (std::vector<float>{1, 4, 2, 5, 3, 6}));  // (2, 3) in memory, (3, 2) in the file
}

TEST_F(CheckpointTest, KeepsTheNewest) {
  Checkpoints checkpoints(temp.path, 2, false, comm);
  for (int64_t step = 98; step <= 101; step++) start(checkpoints, step);
  start(checkpoints, 101);  // again: takes the place of the first
  checkpoints.finish();
  EXPECT_EQ(names(), (std::vector<std::string>{"step_00000100", "step_00000101"}));
}

TEST_F(CheckpointTest, WhatIsNotWholeIsNone) {
  fs::create_directories(temp / "checkpoints/step_00000009");         // no state.json
  fs::create_directories(temp / "checkpoints/.saving_00000010");      // a run died here
  fs::create_directories(temp / "checkpoints/.deleting_00000001/x");  // or here
  fs::create_directories(temp / "checkpoints/step_banana");
  EXPECT_EQ(newest_checkpoint(temp.path), nullptr);
  Checkpoints checkpoints(temp.path, 2, false, comm);
  EXPECT_EQ(checkpoints.moved_to(), "");
  EXPECT_EQ(names(), (std::vector<std::string>{"step_00000009", "step_banana"}));  // what is not ours stays
}

TEST_F(CheckpointTest, AnotherRunMovesThemAside) {
  {
    Checkpoints checkpoints(temp.path, 2, false, comm);
    start(checkpoints, 7);
  }  // its end waits for what is being written
  EXPECT_EQ(Checkpoints(temp.path, 2, true, comm).moved_to(), "");
  EXPECT_NE(newest_checkpoint(temp.path), nullptr);
  EXPECT_EQ(Checkpoints(temp.path, 2, false, comm).moved_to(), temp / "checkpoints.1");
  EXPECT_EQ(newest_checkpoint(temp.path), nullptr);
  EXPECT_TRUE(fs::exists(temp / "checkpoints.1/step_00000007/state.json"));
}

TEST_F(CheckpointTest, NamesTheFirstFileThatChanged) {
  Checkpoints checkpoints(temp.path, 2, false, comm);
  start(checkpoints, 7);
  checkpoints.finish();
  EXPECT_EQ(error(), "");
  const std::string folder = temp / "checkpoints/step_00000007/";
  for (const char* name : {"model.safetensors", "config.json", "optimizer.rank0000.safetensors"}) {
    std::ifstream file(folder + name, std::ios::binary);
    const std::string whole(std::istreambuf_iterator<char>(file), {});
    std::string other = whole;
    other.back() ^= 1;
    temp.write(std::string("checkpoints/step_00000007/") + name, other);
    EXPECT_NE(error().find(std::string(name) + ": its CRC-32 is"), std::string::npos) << error();
    temp.write(std::string("checkpoints/step_00000007/") + name, whole.substr(0, whole.size() - 1));
    EXPECT_NE(error().find(strf("%s: %zu bytes, expected", name, whole.size() - 1)), std::string::npos) << error();
    fs::remove(folder + name);
    EXPECT_NE(error().find(name), std::string::npos) << error();
    temp.write(std::string("checkpoints/step_00000007/") + name, whole);
  }
  fs::rename(temp / "checkpoints/step_00000007", temp / "checkpoints/step_00000008");
  EXPECT_NE(error().find("it is of step 7"), std::string::npos) << error();
}

TEST_F(CheckpointTest, AFailedOneCostsNothingElse) {
  Checkpoints checkpoints(temp.path, 2, false, comm);
  temp.write("checkpoints", "a file in the way");
  testing::internal::CaptureStderr();
  start(checkpoints, 7);
  EXPECT_FALSE(checkpoints.finish());
  const std::string warning = testing::internal::GetCapturedStderr();
  EXPECT_EQ(warning.find("train_gpt: warning: checkpoint of step 7 not written: "), 0u) << warning;
  fs::remove(temp / "checkpoints");
  start(checkpoints, 8);
  EXPECT_TRUE(checkpoints.finish());
}
