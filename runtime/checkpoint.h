// Checkpoints: folders checkpoints/step_00001000 in the run folder, each with model.safetensors and config.json (which
// transformers loads), optimizer.rank0000.safetensors, ..., and state.json. docs/reliability.md has the format.
//
// One is written aside, and takes its name when every byte is on the disk: a folder of that name with a state.json is
// complete, whenever the machine stops. This file knows nothing of the model: tensors come as bytes with a name.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "runtime/model_config.h"
#include "runtime/options.h"
#include "runtime/safetensors.h"

class Comm;

// What state.json says.
struct RunState {
  int64_t step = 0;                        // batches seen
  int64_t updates = 0;                     // of them not skipped
  std::string precision, mcf;              // what weights and states are stored in
  std::string data;                        // the training data, as Dataset::identity() has it
  int64_t bad_steps_in_a_row = 0;          // that were not finite
  std::vector<double> losses, grad_norms;  // of the windows that spikes are judged by
  FlagTexts flags;
};

// A tensor in host memory, and how a file shall have it.
struct SavedTensor {
  std::string name, dtype;
  std::vector<int64_t> shape;  // in the file
  const char* data = nullptr;  // row-major; (shape[1], shape[0]) where it is to be transposed
  bool transpose = false;
};

// A complete checkpoint on the disk.
struct Checkpoint {
  std::string folder;
  RunState state;
  struct File {
    std::string name;
    int64_t bytes;
    uint32_t crc;
  };
  std::vector<File> files;

  // Throws RunError naming the first file that is not the one that was written: its size, then its bytes. Of so many
  // ranks each looks at some.
  void verify(int rank, int ranks) const;
  std::vector<std::string> optimizer_files() const;  // one a rank that wrote one, in their order
};

// The newest complete checkpoint of a run folder; null where there is none. Throws RunError where its state.json is not
// as it was written.
std::unique_ptr<Checkpoint> newest_checkpoint(const std::string& out);

// "optimizer.rank0000.safetensors".
std::string optimizer_file(int rank);

class Checkpoints {
 public:
  // out: the run folder, which is there; "" = there will be none. keep: how many stay, 0 = all. A run that does not go
  // on from the checkpoints in it moves them to checkpoints.1, checkpoints.2, ... Collective.
  Checkpoints(const std::string& out, int64_t keep, bool resumed, Comm& comm);
  ~Checkpoints();
  Checkpoints(const Checkpoints&) = delete;

  // Begins to write one, in the background. The tensors' memory must stay until the next start() or finish() has
  // returned. model: from rank 0, and config the text of config.json. optimizer: of each rank that writes such a file,
  // be it without tensors: the first, or all. Waits for the one before. Collective, as are the others.
  void start(const RunState& state, std::vector<SavedTensor> model, const std::string& config,
             std::optional<std::vector<SavedTensor>> optimizer);
  // Once a step: says what has become of one that is being written.
  void poll();
  // Waits for it. false if the last one started was not written.
  bool finish();

  const std::string& moved_to() const { return moved_to_; }  // where an earlier run's went, or ""

 private:
  struct Saving;
  void write();
  void commit();
  void join();
  void report();

  std::string folder_, moved_to_;
  int64_t keep_;
  Comm& comm_;
  std::unique_ptr<Saving> saving_;  // null: none is being written
  std::thread thread_;
  bool last_written_ = true;
};

// config.json for transformers. dtype: "bfloat16" or "float32"; eot: the id of the end-of-text token.
std::string config_json(const ModelConfig& config, const std::string& dtype, int eot);
