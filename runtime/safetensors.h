// safetensors files: 8 bytes of header length, a JSON header with each tensor's type, shape and place, the data, all
// little endian (https://github.com/huggingface/safetensors, "Format").
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "dataloader/file.h"

struct TensorInfo {
  std::string name;
  std::string dtype;  // as in the file: "BF16", "F32", "I16", ...
  std::vector<int64_t> shape;
  int64_t begin = 0, end = 0;  // bytes within the file's data

  int64_t elements() const;  // of this shape
};

// Bytes of an element; 0 for a type that is not known.
int64_t dtype_bytes(std::string_view dtype);

// A file, memory-mapped. The header is checked whole before anything of it is used, so what tensors() says can be
// relied on: known types, shapes that make up their bytes, data without overlaps and holes, names that differ.
class Safetensors {
 public:
  // who: what messages begin with, e.g. "--model: gpt2/model.safetensors". Throws RunError with what is wrong. Takes
  // memory in proportion to the header at most.
  Safetensors(const std::string& path, const std::string& who);

  const std::string& who() const { return who_; }
  int64_t bytes() const { return file_.size(); }                       // of the file
  const std::vector<TensorInfo>& tensors() const { return tensors_; }  // in the order of their data
  const TensorInfo* find(std::string_view name) const;                 // nullptr: not there
  // The first of a tensor's bytes. Not aligned. For one of tensors().
  const char* data(const TensorInfo& tensor) const { return data_ + tensor.begin; }

 private:
  std::string who_;
  MappedFile file_;
  const char* data_ = nullptr;
  std::vector<TensorInfo> tensors_;
  std::map<std::string_view, size_t> places_;  // in tensors_
};

// The start of a file with these tensors, in this order and without holes: header length and header, padded with spaces
// so that the data begins at a multiple of 64. Sets each tensor's begin and end. pt: with the metadata "format": "pt",
// without which transformers takes no file.
std::string safetensors_header(std::vector<TensorInfo>& tensors, bool pt);
