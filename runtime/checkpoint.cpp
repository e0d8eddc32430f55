// The order of what is done is what makes it safe: files and their bytes to the disk, then state.json, then the folder,
// then its name, then the folder that has the name; only then are older ones deleted, and those first lose their name.
#include "runtime/checkpoint.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <system_error>

#include "dataloader/file.h"
#include "runtime/comm.h"
#include "runtime/crc32.h"
#include "runtime/error.h"
#include "runtime/terminal.h"

namespace fs = std::filesystem;
using json = nlohmann::ordered_json;

namespace {

constexpr const char* format = "train_gpt checkpoint 1";
constexpr size_t piece = size_t{4} << 20;

std::string hex(uint32_t crc) { return strf("%08x", crc); }

// A file in the making. Throws RunError with its name and the system's words.
class NewFile {
 public:
  explicit NewFile(const fs::path& path) : path_(path) {
    fd_ = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    if (fd_ < 0) fail();
  }
  ~NewFile() {
    if (fd_ >= 0) close(fd_);
  }
  NewFile(const NewFile&) = delete;

  void write(const char* data, size_t n) {
    while (n > 0) {
      const ssize_t done = ::write(fd_, data, std::min(n, piece));
      if (done < 0 && errno == EINTR) continue;
      if (done <= 0) fail();
      crc_ = crc32(data, static_cast<size_t>(done), crc_);
      bytes_ += done, data += done, n -= static_cast<size_t>(done);
    }
  }
  // The bytes are on the disk when this returns.
  Checkpoint::File finish() {
    if (fsync(fd_)) fail();
    const int fd = std::exchange(fd_, -1);
    if (close(fd)) fail();
    return {path_.filename().string(), bytes_, crc_};
  }

 private:
  [[noreturn]] void fail() const { RUN_ERROR("%s: %s", path_.filename().c_str(), strerror(errno)); }

  fs::path path_;
  int fd_;
  int64_t bytes_ = 0;
  uint32_t crc_ = 0;
};

// Names in a folder are on the disk when this returns.
void sync_folder(const fs::path& folder) {
  const int fd = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  const bool done = fd >= 0 && fsync(fd) == 0;
  const int error = errno;
  if (fd >= 0) close(fd);
  if (!done) RUN_ERROR("%s: %s", folder.filename().c_str(), strerror(error));
}

Checkpoint::File write_text(const fs::path& path, const std::string& text) {
  NewFile file(path);
  file.write(text.data(), text.size());
  return file.finish();
}

// Writes the transpose of a matrix (columns, rows) in bands of rows.
template <class E>
void write_transposed(NewFile& file, const E* from, size_t rows, size_t columns) {
  const size_t band = std::max<size_t>(1, piece / sizeof(E) / columns);
  std::vector<E> out;
  for (size_t r = 0, n; r < rows; r += n) {
    n = std::min(band, rows - r);
    out.resize(n * columns);
    for (size_t c = 0; c < columns; c++)
      for (size_t i = 0; i < n; i++) out[i * columns + c] = from[c * rows + r + i];
    file.write(reinterpret_cast<const char*>(out.data()), out.size() * sizeof(E));
  }
}

Checkpoint::File write_safetensors(const fs::path& path, const std::vector<SavedTensor>& tensors, bool pt) {
  std::vector<TensorInfo> infos;
  for (const auto& t : tensors) {
    infos.emplace_back();
    infos.back().name = t.name, infos.back().dtype = t.dtype, infos.back().shape = t.shape;
  }
  NewFile file(path);
  const std::string header = safetensors_header(infos, pt);
  file.write(header.data(), header.size());
  for (size_t i = 0; i < tensors.size(); i++) {
    const SavedTensor& t = tensors[i];
    const size_t n = static_cast<size_t>(infos[i].end - infos[i].begin);
    if (!t.transpose) {
      file.write(t.data, n);
      continue;
    }
    const size_t rows = static_cast<size_t>(t.shape[0]), columns = static_cast<size_t>(t.shape[1]);
    if (dtype_bytes(t.dtype) == 2)
      write_transposed(file, reinterpret_cast<const uint16_t*>(t.data), rows, columns);
    else
      write_transposed(file, reinterpret_cast<const uint32_t*>(t.data), rows, columns);
  }
  return file.finish();
}

constexpr const char *checksum_key = ",\n  \"checksum\": \"", *closing = "\"\n}\n";  // the file ends in these

std::string to_text(const RunState& s, const std::vector<Checkpoint::File>& files) {
  json j;
  j["format"] = format;
  j["version"] = version();
  j["step"] = s.step, j["updates"] = s.updates;
  j["precision"] = s.precision, j["mcf"] = s.mcf;
  for (const auto& f : files) j["files"][f.name] = {{"bytes", f.bytes}, {"crc32", hex(f.crc)}};
  j["data"] = s.data;
  j["bad_steps_in_a_row"] = s.bad_steps_in_a_row;
  j["spikes"] = {{"loss", s.losses}, {"grad_norm", s.grad_norms}};
  for (const auto& [name, text] : s.flags) j["flags"][name] = text;
  std::string text = j.dump(2, ' ', false, json::error_handler_t::replace);
  text.resize(text.size() - 2);  // the end of the object
  return text + checksum_key + hex(crc32(text.data(), text.size())) + closing;
}

// Reads state.json field by field; each in turn is named where it is not what it must be.
class StateReader {
 public:
  StateReader(const fs::path& folder) : who_((folder / "state.json").string()) {
    const MappedFile file(who_, "--resume: " + printable(who_));
    who_ = "--resume: " + printable(who_);
    constexpr int64_t most = int64_t{1} << 20;  // thousands of ranks; parsed, nested lists take 75 times their bytes
    if (file.size() > most) RUN_ERROR("%s: %lld bytes, expected a few thousand", who_.c_str(), (long long)file.size());
    const std::string text(file.data(), static_cast<size_t>(file.size()));
    const size_t end = std::min(text.rfind(checksum_key), text.size());
    const std::string found = hex(crc32(text.data(), end));
    if (text.substr(end) != checksum_key + found + closing)
      RUN_ERROR("%s: its checksum is %s, and it ends in another or none: it is not as it was written; %s", who_.c_str(),
                found.c_str(), hint());
    constexpr int deepest = 4;  // deeper ones would be freed by recursion, which the stack limits
    try {
      root_ = json::parse(text, [&](int depth, json::parse_event_t, json&) {
        if (depth > deepest) RUN_ERROR("%s: nested deeper than %d levels; %s", who_.c_str(), deepest, hint());
        return true;
      });
    } catch (const json::exception&) {
      RUN_ERROR("%s: not JSON; %s", who_.c_str(), hint());
    }
    if (!root_.is_object() || text_of(root_, "format") != format)
      RUN_ERROR("%s: expected the format '%s'; was it written by another version?", who_.c_str(), format);
  }

  static const char* hint() { return "delete that folder to go on from the checkpoint before it"; }
  const std::string& who() const { return who_; }
  const json& root() const { return root_; }

  const json& field(const json& of, const char* name) const {
    const auto found = of.find(name);
    if (found == of.end()) RUN_ERROR("%s: found no '%s'; %s", who_.c_str(), name, hint());
    return *found;
  }
  const json& object(const json& of, const char* name) const {
    const json& j = field(of, name);
    return j.is_object() ? j : refuse(name, "an object");
  }
  std::string text_of(const json& of, const char* name) const {
    const json& j = field(of, name);
    return (j.is_string() ? j : refuse(name, "text")).get<std::string>();
  }
  int64_t number(const json& of, const char* name, int64_t most) const {
    const json& j = field(of, name);
    const bool in_range = j.is_number_unsigned() && j.get<uint64_t>() <= static_cast<uint64_t>(most);
    return (in_range ? j : refuse(name, strf("a whole number up to %lld", (long long)most).c_str())).get<int64_t>();
  }
  std::vector<double> numbers(const json& of, const char* name, size_t most) const {
    const json& j = field(of, name);
    bool good = j.is_array() && j.size() <= most;
    for (size_t i = 0; good && i < j.size(); i++) good = j[i].is_number();
    return (good ? j : refuse(name, strf("at most %zu numbers", most).c_str())).get<std::vector<double>>();
  }

 private:
  [[noreturn]] const json& refuse(const char* name, const char* expected) const {
    RUN_ERROR("%s: '%s' is not %s; %s", who_.c_str(), name, expected, hint());
  }

  std::string who_;
  json root_;
};

Checkpoint read_checkpoint(const fs::path& folder) {
  const StateReader r(folder);
  const json& root = r.root();
  Checkpoint c;
  c.folder = folder.string();
  RunState& s = c.state;
  s.step = r.number(root, "step", int64_t{1} << 40), s.updates = r.number(root, "updates", s.step);
  s.precision = r.text_of(root, "precision"), s.mcf = r.text_of(root, "mcf");
  s.data = r.text_of(root, "data");
  s.bad_steps_in_a_row = r.number(root, "bad_steps_in_a_row", s.step);
  const json& spikes = r.object(root, "spikes");
  s.losses = r.numbers(spikes, "loss", 128), s.grad_norms = r.numbers(spikes, "grad_norm", 128);
  for (const auto& [name, value] : r.object(root, "flags").items())
    s.flags.push_back({name, r.text_of(root["flags"], name.c_str())});
  // Names are compared with what they must be, and never used as paths.
  const json& files = r.object(root, "files");
  std::vector<std::string> names = {"model.safetensors", "config.json"};
  for (size_t rank = 0; rank + 2 < files.size(); rank++) names.push_back(optimizer_file(static_cast<int>(rank)));
  if (files.size() < 3)
    RUN_ERROR("%s: 'files' has %zu, expected 3 or more; %s", r.who().c_str(), files.size(), r.hint());
  for (const auto& name : names) {
    const json& file = r.object(files, name.c_str());
    const std::string crc = r.text_of(file, "crc32");
    c.files.push_back(
        {name, r.number(file, "bytes", INT64_MAX), static_cast<uint32_t>(strtoul(crc.c_str(), nullptr, 16))});
  }
  return c;
}

// Steps of the complete checkpoints in a folder, the newest first. Throws RunError where it cannot be read: a run must
// not begin anew because of that.
std::vector<int64_t> complete_steps(const fs::path& folder) {
  std::vector<int64_t> steps;
  std::error_code error;
  if (!fs::exists(folder, error) && !error) return steps;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    if (!name.starts_with("step_") || name.size() < 13 || name.size() > 20) continue;
    if (name.find_first_not_of("0123456789", 5) != name.npos || !fs::exists(entry->path() / "state.json", error))
      continue;
    steps.push_back(std::stoll(name.substr(5)));
  }
  if (error) RUN_ERROR("--out: cannot read %s: %s", in_quotes(folder.string()).c_str(), error.message().c_str());
  std::sort(steps.rbegin(), steps.rend());
  return steps;
}

std::string step_name(int64_t step) { return strf("step_%08lld", static_cast<long long>(step)); }

// Away with a folder that has the name of a checkpoint: first the name, so that half of it is never taken for one.
void delete_checkpoint(const fs::path& folder) {
  const fs::path doomed = folder.parent_path() / (".deleting" + folder.filename().string().substr(4));
  std::error_code error;
  fs::remove_all(doomed, error);
  fs::rename(folder, doomed, error);
  fs::remove_all(doomed, error);
}

}  // namespace

std::string optimizer_file(int rank) { return strf("optimizer.rank%04d.safetensors", rank); }

std::string config_json(const ModelConfig& c, const std::string& dtype, int eot) {
  json j;
  j["architectures"] = {"GPT2LMHeadModel"};
  j["model_type"] = "gpt2";
  j["vocab_size"] = c.V, j["n_positions"] = c.max_T, j["n_ctx"] = c.max_T;
  j["n_embd"] = c.C, j["n_layer"] = c.L, j["n_head"] = c.NH, j["n_inner"] = nullptr;
  j["activation_function"] = "gelu_new";
  j["layer_norm_epsilon"] = 1e-5;
  j["attn_pdrop"] = j["embd_pdrop"] = j["resid_pdrop"] = 0.0;
  j["initializer_range"] = 0.02;
  j["scale_attn_weights"] = j["tie_word_embeddings"] = j["use_cache"] = true;
  j["bos_token_id"] = j["eos_token_id"] = eot;
  j["torch_dtype"] = dtype;
  return j.dump(2) + "\n";
}

std::vector<std::string> Checkpoint::optimizer_files() const {
  std::vector<std::string> names;
  for (size_t i = 2; i < files.size(); i++) names.push_back(files[i].name);
  return names;
}

void Checkpoint::verify(int rank, int ranks) const {
  for (size_t i = static_cast<size_t>(rank); i < files.size(); i += static_cast<size_t>(ranks)) {
    const File& f = files[i];
    const std::string path = (fs::path(folder) / f.name).string(), who = "--resume: " + printable(path);
    const MappedFile file(path, who);
    if (file.size() != f.bytes)
      RUN_ERROR("%s: %lld bytes, expected the %lld that were written; %s", who.c_str(),
                static_cast<long long>(file.size()), static_cast<long long>(f.bytes), StateReader::hint());
    const uint32_t crc = crc32(file.data(), static_cast<size_t>(file.size()));
    if (crc != f.crc)
      RUN_ERROR("%s: its CRC-32 is %s, expected %s: it is not as it was written; %s", who.c_str(), hex(crc).c_str(),
                hex(f.crc).c_str(), StateReader::hint());
  }
}

std::unique_ptr<Checkpoint> newest_checkpoint(const std::string& out) {
  const fs::path folder = fs::path(out) / "checkpoints";
  const std::vector<int64_t> steps = complete_steps(folder);
  if (steps.empty()) return nullptr;
  Checkpoint c = read_checkpoint(folder / step_name(steps[0]));
  if (c.state.step != steps[0])
    RUN_ERROR("--resume: %s/state.json: it is of step %lld; %s", printable(c.folder).c_str(),
              static_cast<long long>(c.state.step), StateReader::hint());
  return std::make_unique<Checkpoint>(std::move(c));
}

// One that is being written.
struct Checkpoints::Saving {
  RunState state;
  std::vector<SavedTensor> model;
  std::optional<std::vector<SavedTensor>> optimizer;
  std::string config;
  std::vector<Checkpoint::File> files;  // that this rank has written; in the end rank 0 has all
  std::string error;
  std::atomic<bool> done = false;  // this rank's part of what is going on
  bool committing = false;         // all ranks' files are there
  std::chrono::steady_clock::time_point begun = std::chrono::steady_clock::now();
  std::string saving_name() const { return ".saving" + step_name(state.step).substr(4); }
};

Checkpoints::Checkpoints(const std::string& out, int64_t keep, bool resumed, Comm& comm) : keep_(keep), comm_(comm) {
  if (out.empty()) return;
  signal(SIGXFSZ, SIG_IGN);  // a file-size limit is a failed write, and not the end of the run
  folder_ = (fs::path(out) / "checkpoints").string();
  if (comm.rank() == 0) {
    std::error_code error;
    if (!resumed && !complete_steps(folder_).empty()) {
      int n = 1;
      while (fs::exists(fs::symlink_status(folder_ + strf(".%d", n), error))) n++;
      fs::rename(folder_, folder_ + strf(".%d", n), error);
      if (error)
        RUN_ERROR("--out: cannot rename the earlier run's %s: %s; choose another --out, or --resume it",
                  in_quotes(folder_).c_str(), error.message().c_str());
      moved_to_ = folder_ + strf(".%d", n);
    }
    // What a run that was killed had begun.
    std::vector<fs::path> left;
    for (const auto& entry : fs::directory_iterator(folder_, error)) {
      const std::string name = entry.path().filename().string();
      if (name.starts_with(".saving_") || name.starts_with(".deleting_")) left.push_back(entry.path());
    }
    for (const auto& path : left) fs::remove_all(path, error);
  }
  comm.gather(0);  // none writes before all that was left is gone
}

Checkpoints::~Checkpoints() { join(); }

void Checkpoints::join() {
  if (thread_.joinable()) thread_.join();
}

void Checkpoints::start(const RunState& state, std::vector<SavedTensor> model, const std::string& config,
                        std::optional<std::vector<SavedTensor>> optimizer) {
  finish();
  saving_ = std::make_unique<Saving>();
  saving_->state = state, saving_->config = config;
  saving_->model = std::move(model), saving_->optimizer = std::move(optimizer);
  try {
    thread_ = std::thread([this] { write(); });
  } catch (const std::system_error&) {  // no thread to be had
    write();
  }
}

void Checkpoints::write() {
  try {
    const fs::path folder = fs::path(folder_) / saving_->saving_name();
    std::error_code error;
    const bool is_first = fs::create_directory(folder_, error);
    if (!error) fs::create_directory(folder, error);
    if (error) RUN_ERROR("%s: %s", folder.c_str(), error.message().c_str());
    if (is_first) sync_folder(fs::path(folder_).parent_path());
    if (comm_.rank() == 0) {
      saving_->files.push_back(write_safetensors(folder / "model.safetensors", saving_->model, true));
      saving_->files.push_back(write_text(folder / "config.json", saving_->config));
    }
    if (saving_->optimizer)
      saving_->files.push_back(write_safetensors(folder / optimizer_file(comm_.rank()), *saving_->optimizer, false));
    if (comm_.ranks() == 1) return commit();
  } catch (const std::exception& e) {
    saving_->error = e.what();
  }
  saving_->done = true;
}

void Checkpoints::commit() {
  const fs::path folder = fs::path(folder_) / saving_->saving_name();
  const fs::path final_folder = fs::path(folder_) / step_name(saving_->state.step);
  try {
    std::error_code error;
    for (const auto& f : saving_->files)  // the other ranks' too
      if (static_cast<int64_t>(fs::file_size(folder / f.name, error)) != f.bytes)
        RUN_ERROR("%s is not in the %s of rank 0: --out must be one folder, which all ranks see", f.name.c_str(),
                  folder_.c_str());
    write_text(folder / "state.json", to_text(saving_->state, saving_->files));
    sync_folder(folder);
    // Its steps' metrics must not be lost where it is not.
    const int metrics = open((fs::path(folder_).parent_path() / "metrics.jsonl").c_str(), O_RDONLY | O_CLOEXEC);
    if (metrics >= 0) fsync(metrics), close(metrics);
    if (fs::exists(final_folder)) delete_checkpoint(final_folder);
    fs::rename(folder, final_folder, error);
    if (error) RUN_ERROR("%s: %s", final_folder.filename().c_str(), error.message().c_str());
    sync_folder(folder_);
    const std::vector<int64_t> steps = complete_steps(folder_);
    for (size_t i = static_cast<size_t>(keep_); keep_ > 0 && i < steps.size(); i++)
      delete_checkpoint(fs::path(folder_) / step_name(steps[i]));
  } catch (const std::exception& e) {
    saving_->error = e.what();
  }
  saving_->done = true;
}

void Checkpoints::poll() {
  if (!saving_) return;
  const bool done = saving_->done;
  if (comm_.ranks() == 1) {
    if (done) join(), report();
    return;
  }
  std::string mine;
  if (done) {
    mine = saving_->error.empty() ? "+" : "-" + saving_->error;
    if (!saving_->committing && saving_->error.empty() && saving_->optimizer)
      mine += strf("%lld %u", static_cast<long long>(saving_->files.back().bytes), saving_->files.back().crc);
  }
  const std::vector<std::string> all = comm_.gather_text(mine);
  for (const auto& text : all)
    if (text.empty()) return;  // a rank is still writing
  join();
  for (size_t r = 0; r < all.size(); r++)
    if (all[r][0] == '-' && saving_->error.empty()) saving_->error = strf("rank %zu: ", r) + all[r].substr(1);
  if (saving_->committing || !saving_->error.empty()) return report();
  saving_->committing = true;
  if (comm_.rank() != 0) return;
  for (size_t r = 1; r < all.size() && all[r].size() > 1; r++) {
    Checkpoint::File file{optimizer_file(static_cast<int>(r)), 0, 0};
    long long bytes = 0;
    if (sscanf(all[r].c_str(), "+%lld %u", &bytes, &file.crc) == 2) file.bytes = bytes, saving_->files.push_back(file);
  }
  saving_->done = false;
  try {
    thread_ = std::thread([this] { commit(); });
  } catch (const std::system_error&) {
    commit();
  }
}

void Checkpoints::report() {
  last_written_ = saving_->error.empty();
  if (comm_.rank() == 0 && last_written_) {
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - saving_->begun;
    int64_t bytes = 0;
    for (const auto& f : saving_->files) bytes += f.bytes;
    printf("checkpoint %s: %s, written in %s\n", step_name(saving_->state.step).c_str(),
           human_bytes(static_cast<double>(bytes)).c_str(), human_time(taken.count()).c_str());
  } else if (comm_.rank() == 0) {
    std::error_code error;
    fs::remove_all(fs::path(folder_) / saving_->saving_name(), error);
    fprintf(stderr, "train_gpt: warning: checkpoint of step %lld not written: %s; earlier ones stay\n",
            static_cast<long long>(saving_->state.step), printable(saving_->error).c_str());
  }
  saving_.reset();
}

bool Checkpoints::finish() {
  while (saving_) join(), poll();
  return last_written_;
}
