// report.html in the run folder: one page that shows the run in any browser, without a network. It is the template
// runtime/report.html with the lines of metrics.jsonl put in, so it shows what is in that file and nothing else.
#pragma once
#include <memory>
#include <string>

class Report {
 public:
  // Of the run whose metrics.jsonl this is; "" = write nothing. Writes nothing yet.
  explicit Report(const std::string& metrics_path);
  ~Report();

  // Reads the lines that came since the last call and writes the page anew. The file is complete at any time: a new one
  // takes the place of the old one whole. If that fails, stderr gets one warning for the whole run.
  void update();

  const std::string& path() const { return path_; }

 private:
  struct Rows;
  void read_new_lines();
  std::string page() const;

  std::string metrics_path_, path_;
  std::unique_ptr<Rows> rows_;
  bool warned_ = false;
};
