// One JSON object on its way to metrics.jsonl: keys in the order in which they were added. It needs no JSON library, so
// that every file may include it; metrics.cpp turns it into text.
#pragma once
#include <cmath>
#include <concepts>
#include <cstdint>
#include <string>
#include <utility>
#include <variant>
#include <vector>

struct Record {
  struct Field;
  std::vector<Field> fields;

  // Appends key: value. Value: bool, any integer, float or double (a float is written as the double it equals), text,
  // or another Record (a nested object). A number that is not finite is written as null.
  template <typename Value>
  Record& add(std::string key, const Value& value);

  // Appends only what was computed: NaN stands for "not computed" and is left out.
  Record& add_if_computed(std::string key, double value);
};

struct Record::Field {
  std::string key;
  std::variant<bool, int64_t, double, std::string, Record> value;
};

template <typename Value>
Record& Record::add(std::string key, const Value& value) {
  if constexpr (std::same_as<Value, bool> || std::same_as<Value, Record>) {
    fields.push_back({std::move(key), value});
  } else if constexpr (std::integral<Value>) {
    fields.push_back({std::move(key), static_cast<int64_t>(value)});
  } else if constexpr (std::floating_point<Value>) {
    fields.push_back({std::move(key), static_cast<double>(value)});
  } else {
    fields.push_back({std::move(key), std::string(value)});
  }
  return *this;
}

inline Record& Record::add_if_computed(std::string key, double value) {
  return std::isnan(value) ? *this : add(std::move(key), value);
}
