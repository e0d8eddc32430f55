// Reads the golden files that dev/tests/oracle writes. safetensors: 8 bytes of header length, a JSON header with each
// tensor's type, shape and place, raw little-endian data.
#pragma once
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "mcf/bf16.h"
#include "runtime/error.h"

class Golden {
 public:
  // name: a file of dev/tests/golden without its ending.
  explicit Golden(const std::string& name) : name_(name) {
    std::ifstream file(std::string(TEST_DATA) + "/" + name + ".safetensors", std::ios::binary);
    raw_.assign(std::istreambuf_iterator<char>(file), {});
    uint64_t length = 0;
    CHECK(raw_.size() > 8, "golden file %s is missing: run dev/tests/oracle/regenerate.sh", name.c_str());
    std::memcpy(&length, raw_.data(), 8);
    header_ = nlohmann::json::parse(raw_.begin() + 8, raw_.begin() + 8 + static_cast<int64_t>(length));
    data_ = raw_.data() + 8 + length;
  }

  bool has(const std::string& tensor) const { return header_.contains(tensor); }
  std::vector<int> shape(const std::string& tensor) const { return entry(tensor)["shape"]; }
  std::string dtype(const std::string& tensor) const { return entry(tensor)["dtype"]; }
  std::vector<std::string> names() const {
    std::vector<std::string> all;
    for (const auto& [key, value] : header_.items()) all.push_back(key);
    return all;
  }

  // The elements, which must be of type T.
  template <class T>
  std::vector<T> get(const std::string& tensor) const {
    const auto& e = entry(tensor);
    CHECK(e["dtype"] == type_name(T{}), "%s of %s is %s", tensor.c_str(), name_.c_str(), dtype(tensor).c_str());
    const size_t begin = e["data_offsets"][0], end = e["data_offsets"][1];
    std::vector<T> x((end - begin) / sizeof(T));
    std::memcpy(x.data(), data_ + begin, end - begin);
    return x;
  }
  std::vector<float> f32(const std::string& tensor) const { return get<float>(tensor); }
  std::vector<int> i32(const std::string& tensor) const { return get<int>(tensor); }
  // An F32 or BF16 tensor as floats.
  std::vector<float> floats(const std::string& tensor) const {
    if (dtype(tensor) == "F32") return f32(tensor);
    std::vector<float> x;
    for (const bf16 e : get<bf16>(tensor)) x.push_back(to_float(e));
    return x;
  }

 private:
  const nlohmann::json& entry(const std::string& tensor) const {
    CHECK(has(tensor), "golden file %s has no %s: run dev/tests/oracle/regenerate.sh", name_.c_str(), tensor.c_str());
    return header_.at(tensor);
  }
  static const char* type_name(float) { return "F32"; }
  static const char* type_name(double) { return "F64"; }
  static const char* type_name(bf16) { return "BF16"; }
  static const char* type_name(int8_t) { return "I8"; }
  static const char* type_name(int16_t) { return "I16"; }
  static const char* type_name(int32_t) { return "I32"; }
  static const char* type_name(uint32_t) { return "U32"; }

  std::string name_;
  std::vector<char> raw_;
  nlohmann::json header_;
  const char* data_ = nullptr;
};
