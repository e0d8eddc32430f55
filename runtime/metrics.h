// metrics.jsonl in the run folder: first line the run, then one flat object a step. Programs read this file, never the
// terminal, so each line is complete and valid JSON the moment it is there.
#pragma once
#include <cstdint>
#include <string>

#include "runtime/record.h"

class Metrics {
 public:
  // Creates the folder (parents too) and an empty metrics.jsonl in it. A metrics.jsonl of an earlier run is renamed to
  // metrics.1.jsonl, metrics.2.jsonl, ...: the first name that is free. "" = write nothing. Throws RunError, also where
  // another process has a Metrics in this folder.
  // after_step > 0: goes on with the file that is there, cut after the line of that step.
  // Ignores SIGXFSZ from then on, so that a file-size limit is a failed write and not the end of the run.
  explicit Metrics(const std::string& folder, int64_t after_step = 0);
  ~Metrics();
  Metrics(const Metrics&) = delete;
  Metrics& operator=(const Metrics&) = delete;

  // Writes one line. If the disk refuses it, no part of the line stays, stderr gets one warning for the whole run, and
  // training goes on; later lines are tried again.
  void write(const Record& record);

  // Where an earlier run's file went, "" if there was none.
  const std::string& moved_to() const { return moved_to_; }
  bool empty() const { return size_ == 0; }  // no line yet, not even that of the run
  const std::string& path() const { return path_; }

 private:
  std::string path_, moved_to_;
  int fd_ = -1, lock_ = -1;  // the lock: of the folder
  int64_t size_ = 0;         // bytes of whole lines
  bool warned_ = false;
};

// The record as one line of JSON, without the line's end. Not-finite numbers become null, invalid UTF-8 is replaced.
std::string to_json(const Record& record);
