// The state of a run as the tensors of a checkpoint (docs/reliability.md): a copy of it in host memory, and the way
// back, also into another precision and other parts.
#pragma once
#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "mcf/listeners.cuh"
#include "mcf/shadow.cuh"
#include "runtime/checkpoint.h"
#include "runtime/crc32.h"
#include "runtime/model_file.h"
#include "runtime/parameter.h"

// "wte.weight.m", "wte.weight.v.lo"; "wte.weight.lo" is theta's, "lockstep.bf16.wte.weight.theta" theta itself.
inline std::string saved_name(const std::string& prefix, const Parameter& p, const std::string& state) {
  return prefix + p.name + "." + (state.starts_with("theta.") ? state.substr(6) : state);
}

// A copy of what a checkpoint holds of this rank.
template <class floatX>
class SavedRun {
 public:
  // params: all weights, a flat buffer of so many elements; rank 0, with_weights, saves them. part: of the optimizers'
  // states, nothing where another rank has the same. All that is given must stay.
  SavedRun(const floatX* params, size_t elements, const std::vector<Listener<floatX>>& listeners,
           const Shadow<floatX>& shadow, const std::vector<Parameter>& parameters, const Part& part, bool with_weights)
      : params_(params),
        elements_(with_weights ? elements : 0),
        listeners_(listeners),
        shadow_(shadow),
        parameters_(parameters),
        part_(part) {}

  // Asks for the memory now, so that the first copy takes no longer than the others.
  void reserve() {
    size_t bytes = elements_ * sizeof(floatX);
    for (const auto& l : listeners_) {
      if (!l.prefix.empty()) bytes += part_.n() * sizeof(floatX);
      for (const auto& state : l.optimizer->states()) bytes += part_.n() * state.element_bytes;
    }
    memory_.resize(bytes);
  }
  size_t bytes() const { return memory_.size(); }

  void copy(Device& device) {
    reserve();
    model.clear(), optimizer.clear();
    char* to = memory_.data();
    const auto copied = [&](const void* from, size_t bytes) {
      device.download(to, static_cast<const char*>(from), bytes);
      return std::exchange(to, to + bytes);
    };
    if (elements_) {
      const char* theta = copied(params_, elements_ * sizeof(floatX));
      for (const Parameter& p : parameters_) {
        std::vector<int64_t> shape = {p.used_rows};
        if (p.decay) shape.push_back(p.columns);
        if (p.transposed) std::swap(shape[0], shape[1]);
        model.push_back({p.name, dtype_name<floatX>, shape, theta + p.begin * sizeof(floatX), p.transposed});
      }
    }
    const auto add = [&](const std::string& prefix, const char* state, const char* dtype, const void* from,
                         size_t element) {
      const char* data = copied(from, part_.n() * element);
      for_each_piece(parameters_, part_, [&](const Parameter& p, size_t, size_t n, size_t begin) {
        std::vector<int64_t> shape = {static_cast<int64_t>(n)};
        if (n == p.used() && p.decay) shape = {p.used_rows, p.columns};
        optimizer.push_back({saved_name(prefix, p, state), dtype, shape, data + (begin - part_.begin) * element});
      });
    };
    for (const auto& l : listeners_) {
      if (!l.prefix.empty()) add(l.prefix, "theta", dtype_name<floatX>, l.params + part_.begin, sizeof(floatX));
      for (const auto& s : l.optimizer->states()) add(l.prefix, s.name, s.dtype, s.data, s.element_bytes);
    }
    shadow_arrays_ = shadow_.arrays();
    for (const auto& [name, values] : shadow_arrays_)
      if (part_.n() && !values.empty())
        optimizer.push_back({"shadow." + name,
                             "F64",
                             {static_cast<int64_t>(values.size())},
                             reinterpret_cast<const char*>(values.data())});
  }

  std::vector<SavedTensor> model, optimizer;  // the last copy's

 private:
  const floatX* params_;
  size_t elements_;
  const std::vector<Listener<floatX>>& listeners_;
  const Shadow<floatX>& shadow_;
  const std::vector<Parameter>& parameters_;
  Part part_;
  std::vector<char> memory_;
  ShadowArrays shadow_arrays_;
};

// The optimizer files of a checkpoint, read as if each tensor were whole.
class SavedStates {
 public:
  explicit SavedStates(const Checkpoint& checkpoint) : folder_(checkpoint.folder) {
    for (const auto& name : checkpoint.optimizer_files())
      files_.push_back(std::make_unique<Safetensors>(folder_ + "/" + name, "--resume: " + folder_ + "/" + name));
  }

  // The elements of a tensor, over all ranks that wrote a part of it.
  size_t elements(const std::string& name) const {
    size_t n = 0;
    for (const auto& file : files_)
      if (const TensorInfo* t = file->find(name)) n += static_cast<size_t>(t->elements());
    return n;
  }
  // Copies elements [first, first + n) of a tensor that must have so many in all. Throws RunError where it has not.
  void read(const std::string& name, const std::string& dtype, size_t all, size_t first, size_t n, void* out) const {
    const size_t element = static_cast<size_t>(dtype_bytes(dtype));
    size_t begin = 0;  // of a file's part
    for (const auto& file : files_) {
      const TensorInfo* t = file->find(name);
      if (!t) continue;
      if (t->dtype != dtype)
        RUN_ERROR("%s: %s is %s, expected %s", file->who().c_str(), name.c_str(), t->dtype.c_str(), dtype.c_str());
      const size_t end = begin + static_cast<size_t>(t->elements());
      const size_t from = std::max(begin, first), to = std::min(end, first + n);
      if (from < to)
        memcpy(static_cast<char*>(out) + (from - first) * element, file->data(*t) + (from - begin) * element,
               (to - from) * element);
      begin = end;
    }
    if (begin != all)
      RUN_ERROR("--resume: %s: %s has %zu elements in all optimizer files, expected %zu", folder_.c_str(), name.c_str(),
                begin, all);
  }

 private:
  std::string folder_;
  std::vector<std::unique_ptr<Safetensors>> files_;
};

// The weights of a model file, rounded to floatX, into a flat buffer whose padding is 0 and stays so. Positions that
// the model has not are left out. Returns the CRC-32 of what they have become.
template <class floatX>
uint32_t load_weights(floatX* params, const ModelFile& file, const std::vector<Parameter>& parameters, Device& device) {
  std::vector<float> wide;
  std::vector<floatX> narrow;
  uint32_t crc = 0;
  for (const Parameter& p : parameters)
    for (size_t first = 0, n; first < p.used(); first += n) {
      n = std::min(p.used() - first, size_t{1} << 20);
      wide.resize(n), narrow.resize(n);
      file.read(p.name, first, n, wide.data());
#pragma omp parallel for
      for (size_t i = 0; i < n; i++) store(narrow[i], wide[i]);
      device.upload(params + p.begin + first, narrow.data(), n);
      crc = crc32(narrow.data(), n * sizeof(floatX), crc);
    }
  return crc;
}

// Throws RunError where the files of a checkpoint are not as they were written, or its weights are of another model
// than that of its flags: before one is allocated, whatever size they state. Collective.
inline void require_whole(const Checkpoint& checkpoint, const ModelConfig& config, Comm& comm) {
  checkpoint.verify(comm.rank(), comm.ranks());
  comm.gather(0);  // of the other ranks too
  const ModelFile weights(checkpoint.folder, "--resume");
  const auto text = [](int L, int NH, int C, int T, int V) {
    return strf("%d layers, %d heads, %d channels, T = %d and a vocabulary of %d", L, NH, C, T, V);
  };
  const std::string found = text(weights.L, weights.NH, weights.C, weights.max_T, weights.V);
  const std::string expected = text(config.L, config.NH, config.C, config.max_T, config.V);
  if (found != expected)
    RUN_ERROR("--resume: %s: its model has %s, its flags make %s", printable(checkpoint.folder).c_str(), found.c_str(),
              expected.c_str());
}

// Puts a checkpoint back. Its states are of `stored`; the run's own optimizer, listeners[0], may have another
// precision: then returns lines that say what was rounded. Weights that belong to other parts are as the file has them.
template <class floatX>
std::string restore_run(const Checkpoint& checkpoint, const PrecisionName& stored, floatX* params,
                        std::vector<Listener<floatX>>& listeners, Shadow<floatX>& shadow,
                        const std::vector<Parameter>& parameters, const Part& part, Device& device, Comm& comm) {
  const ModelFile weights(checkpoint.folder, "--resume");
  const SavedStates states(checkpoint);
  load_weights(params, weights, parameters, device);
  Changes changes;
  std::vector<float> wide;
  for (auto& l : listeners) {
    const bool own = l.prefix.empty(), converts = own && stored.precision != l.precision.precision;
    const PrecisionName& from = own ? stored : l.precision;
    for_each_piece(parameters, part, [&](const Parameter& p, size_t piece_first, size_t piece_n, size_t piece_begin) {
      for (size_t done = 0, n; done < piece_n; done += n) {
        n = std::min(piece_n - done, size_t{1} << 20);
        const size_t first = piece_first + done;
        StateSlice slice = empty_slice(from, n);
        if (converts) {
          wide.resize(n);
          weights.read(p.name, first, n, wide.data());
          const bool in_bf16 = slice[0].dtype == dtype_name<bf16>;
          for (size_t i = 0; i < n; i++) {
            if (in_bf16)
              store(reinterpret_cast<bf16*>(slice[0].bytes.data())[i], wide[i]);
            else
              store(reinterpret_cast<float*>(slice[0].bytes.data())[i], wide[i]);
          }
        } else if (own) {
          slice[0].bytes.clear();  // the weights are there
        }
        for (auto& array : slice)
          if (!own || array.name != "theta")
            states.read(saved_name(l.prefix, p, array.name), array.dtype, p.used(), first, n, array.bytes.data());
        if (converts) slice = convert(slice, from, l.precision, changes);
        l.optimizer->write(l.params, piece_begin + done, slice, device);
      }
    });
  }
  if (shadow.size()) {
    ShadowArrays arrays = shadow.arrays();
    for (auto& [name, values] : arrays) {
      values.resize(states.elements("shadow." + name));
      states.read("shadow." + name, "F64", values.size(), 0, values.size(), values.data());
    }
    if (!shadow.restore(arrays))
      RUN_ERROR("--resume: %s: the shadow has %zu weights, expected %zu", checkpoint.folder.c_str(),
                arrays[0].second.size(), shadow.all());
  }
  return stored.precision == listeners[0].precision.precision ? "" : changes_text(changes, comm);
}

// What --resume goes on from.
struct Resumed {
  std::unique_ptr<Checkpoint> checkpoint;  // null: the run begins anew
  PrecisionName stored;                    // what its weights and states are in
  std::vector<std::string> changes;        // of flags, as take_flags() has them

  // What the run trains in: what it was switched to, unless another precision is asked for.
  PrecisionName precision(const Options& o) const {
    const bool asked = std::any_of(changes.begin(), changes.end(), [](const std::string& change) {
      return change.starts_with("--precision ") || change.starts_with("--mcf ");
    });
    return checkpoint && !asked ? stored : PrecisionName{o.precision, o.precision, o.mcf};
  }
  bool converts(const PrecisionName& to) const {
    return checkpoint && (stored.precision != to.precision || stored.mode != to.mode);
  }
  // For the header. rounded: what restore_run() returned.
  std::vector<std::string> lines(const Options& o, const PrecisionName& to, const std::string& rounded) const {
    if (!checkpoint && o.resume) return {"nothing: no checkpoint in " + o.out + " yet"};
    if (!checkpoint) return {};
    std::vector<std::string> lines = changes;
    lines.insert(lines.begin(), checkpoint->folder);
    if (converts(to)) lines.push_back("from " + stored.text + rounded);
    return lines;
  }
};
