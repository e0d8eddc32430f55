// A long run is thinned while it is read, everywhere alike: at most a few thousand rows stay, and few with the values
// of each tensor group. So the page stays below a few MB, and an update costs no more than the lines that are new.
#include "runtime/report.h"

#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string_view>
#include <vector>

#include "runtime/error.h"

using json = nlohmann::ordered_json;

extern const char* const report_template;

namespace {

constexpr size_t max_rows = 4000, max_group_rows = 200;

// "h0.attn.edq" is of one tensor group; "lockstep.bf16.edq" is of a whole model.
bool is_of_group(std::string_view key) {
  return key.find('.') != std::string_view::npos && !key.starts_with("lockstep.");
}

// What the page draws by tensor group.
bool is_drawn(std::string_view key) { return key.ends_with(".edq") || key.ends_with(".lost_frac"); }

double loss_of(const json& row) {
  const auto loss = row.find("loss");
  return loss != row.end() && loss->is_number() ? loss->get<double>() : HUGE_VAL;  // null: it was not finite
}

// Moves to `kept` what stays of rows[begin, end): those with the lowest and the highest loss, so that a spike stays,
// and each that has a validation loss or was skipped. scripts/compare.py thins the rows of a long run in the same way.
void keep(std::vector<json>& kept, std::vector<json>& rows, size_t begin, size_t end) {
  size_t lowest = begin, highest = begin;
  for (size_t i = begin; i < end; i++) {
    if (loss_of(rows[i]) < loss_of(rows[lowest])) lowest = i;
    if (loss_of(rows[i]) >= loss_of(rows[highest])) highest = i;
  }
  for (size_t i = begin; i < end; i++)
    if (i == lowest || i == highest || rows[i].contains("val_loss") || rows[i].contains("skipped"))
      kept.push_back(std::move(rows[i]));
}

// A run's rows, one bucket of `stride` steps after the other. Where they become too many, the stride doubles.
struct Steps {
  std::vector<json> kept, bucket;
  size_t stride = 2, limit = max_rows;

  void add(json row) {
    bucket.push_back(std::move(row));
    if (bucket.size() < stride) return;
    keep(kept, bucket, 0, bucket.size());
    bucket.clear();
    if (kept.size() <= limit) return;
    std::vector<json> halved;
    for (size_t i = 0; i < kept.size(); i += 4) keep(halved, kept, i, std::min(i + 4, kept.size()));
    kept = std::move(halved);
    stride *= 2;
    limit = std::max(limit, kept.size() * 3 / 2);  // where most rows must stay
  }

  std::vector<json> all() const {
    std::vector<json> rows = kept;
    rows.insert(rows.end(), bucket.begin(), bucket.end());
    return rows;
  }
};

// One in `stride` of the rows with values of tensor groups.
struct Groups {
  std::vector<json> kept;
  size_t seen = 0, stride = 1;

  void add(json row) {
    if (seen++ % stride == 0) kept.push_back(std::move(row));
    if (kept.size() <= max_group_rows) return;
    for (size_t i = 0; 2 * i < kept.size(); i++) kept[i] = std::move(kept[2 * i]);
    kept.resize((kept.size() + 1) / 2);
    stride *= 2;
  }
};

// {key: [a value a row, or null]}, numbers with 7 digits.
json columns(const std::vector<json>& rows) {
  json result = json::object();
  for (size_t i = 0; i < rows.size(); i++) {
    for (const auto& [key, value] : rows[i].items()) {
      json& column = result[key];
      while (column.size() < i) column.push_back(nullptr);
      column.push_back(value.is_number_float() ? json(strtod(strf("%.7g", value.get<double>()).c_str(), nullptr))
                                               : value);
    }
  }
  for (auto& column : result)
    while (column.size() < rows.size()) column.push_back(nullptr);
  return result;
}

}  // namespace

struct Report::Rows {
  std::streamoff read = 0;  // bytes of metrics.jsonl
  json run;                 // its first line
  Steps steps;
  Groups groups;
};

Report::Report(const std::string& metrics_path) : metrics_path_(metrics_path), rows_(std::make_unique<Rows>()) {
  if (!metrics_path.empty()) path_ = (std::filesystem::path(metrics_path).parent_path() / "report.html").string();
}

Report::~Report() = default;

void Report::read_new_lines() {
  Rows& r = *rows_;
  std::ifstream in(metrics_path_, std::ios::binary);
  if (!in) throw std::runtime_error("cannot read " + metrics_path_ + ": " + strerror(errno));
  in.seekg(r.read);
  for (std::string line; std::getline(in, line) && !in.eof(); r.read += static_cast<std::streamoff>(line.size()) + 1) {
    json object = json::parse(line, nullptr, false);
    if (!object.is_object()) continue;
    if (r.run.is_null()) {
      r.run = std::move(object);
      continue;
    }
    json row = json::object(), group = json::object();
    for (const auto& [key, value] : object.items()) {
      if (!is_of_group(key))
        row[key] = value;
      else if (is_drawn(key))
        group[key] = value;
    }
    if (!group.empty()) {
      group["step"] = row["step"];
      r.groups.add(std::move(group));
    }
    r.steps.add(std::move(row));
  }
}

std::string Report::page() const {
  const json run = {
      {"run", rows_->run}, {"columns", columns(rows_->steps.all())}, {"groups", columns(rows_->groups.kept)}};
  const std::string data = json{{"runs", json::array({run})}}.dump(-1, ' ', true, json::error_handler_t::replace);
  const std::string_view page = report_template, place = "\"REPORT_DATA\"";
  const size_t at = page.find(place);
  std::string text(page.substr(0, at));
  for (const char c : data)  // "<" could end the element that holds the data; in JSON it stands in strings only
    c == '<' ? text += "\\u003c" : text += c;
  return text.append(page.substr(at + place.size()));
}

void Report::update() {
  if (path_.empty()) return;
  try {
    read_new_lines();
    const std::string text = page(), aside = path_ + ".new";
    FILE* out = fopen(aside.c_str(), "wb");
    if (!out) throw std::runtime_error(strerror(errno));
    const bool written = fwrite(text.data(), 1, text.size(), out) == text.size();
    if ((fclose(out) != 0) | !written || rename(aside.c_str(), path_.c_str()) != 0) {
      const std::string why = strerror(errno);
      remove(aside.c_str());
      throw std::runtime_error(why);
    }
  } catch (const std::exception& error) {
    if (!warned_)
      fprintf(stderr, "train_gpt: warning: cannot write %s: %s; training goes on\n", path_.c_str(), error.what());
    warned_ = true;
  }
}
