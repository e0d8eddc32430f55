#include "runtime/safetensors.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <nlohmann/json.hpp>

#include "runtime/error.h"
#include "runtime/options.h"

static_assert(std::endian::native == std::endian::little, "safetensors files are little endian");

namespace {

constexpr int64_t kLengthBytes = 8;
constexpr uint64_t kMostHeaderBytes = 100'000'000;  // the format's own limit
constexpr const char* kCopyAgain = "copy the file again";

// Takes the header's tokens as they are parsed, and refuses the first that does not belong there: so no nesting is
// followed and nothing is kept that is not asked for.
class HeaderReader : public nlohmann::json_sax<nlohmann::json> {
 public:
  HeaderReader(const std::string& who, std::vector<TensorInfo>& tensors) : who_(who), tensors_(tensors) {}

  bool null() override { unexpected("null"); }
  bool boolean(bool value) override { unexpected(value ? "true" : "false"); }
  bool number_integer(number_integer_t value) override { unexpected(std::to_string(value)); }
  bool number_float(number_float_t, const string_t& text) override { unexpected(text.substr(0, 40)); }
  bool binary(binary_t&) override { unexpected("binary data"); }

  bool number_unsigned(number_unsigned_t value) override {
    if ((place_ != Place::shape && place_ != Place::offsets) || value > INT64_MAX) unexpected(std::to_string(value));
    if (place_ == Place::offsets && offsets_ == 2) unexpected("a third number");
    if (place_ == Place::shape)
      tensors_.back().shape.push_back(static_cast<int64_t>(value));
    else
      (offsets_++ == 0 ? tensors_.back().begin : tensors_.back().end) = static_cast<int64_t>(value);
    return true;
  }

  bool string(string_t& text) override {
    if (place_ == Place::dtype)
      tensors_.back().dtype = text, place_ = Place::tensor;
    else if (place_ != Place::metadata)
      unexpected(in_quotes(text));
    return true;
  }

  bool start_object(size_t) override {
    switch (place_) {
      case Place::start:
        place_ = Place::file;
        break;
      case Place::of_metadata:
        place_ = Place::metadata;
        break;
      case Place::of_tensor:
        place_ = Place::tensor;
        fields_ = 0, offsets_ = 0;
        break;
      default:
        unexpected("{");
    }
    return true;
  }

  bool key(string_t& name) override {
    if (place_ == Place::file && name == "__metadata__") {
      if (metadata_) RUN_ERROR("%s: its header has __metadata__ twice; %s", who_.c_str(), kCopyAgain);
      metadata_ = true;
      place_ = Place::of_metadata;
    } else if (place_ == Place::file) {
      tensors_.push_back({name, "", {}, 0, 0});
      place_ = Place::of_tensor;
    } else if (place_ == Place::tensor) {
      const int field = name == "dtype" ? 1 : name == "shape" ? 2 : name == "data_offsets" ? 4 : 0;
      if (field == 0 || (fields_ & field)) {
        RUN_ERROR("%s: tensor %s: found the field %s%s, expected dtype, shape and data_offsets", who_.c_str(),
                  in_quotes(tensors_.back().name).c_str(), in_quotes(name).c_str(), field ? " twice" : "");
      }
      fields_ |= field;
      place_ = field == 1 ? Place::dtype : field == 2 ? Place::of_shape : Place::of_offsets;
    }
    return true;
  }

  bool end_object() override {
    if (place_ == Place::tensor && (fields_ != 7 || offsets_ != 2)) {
      RUN_ERROR("%s: tensor %s: expected dtype, shape and two data_offsets in the header, found no %s", who_.c_str(),
                in_quotes(tensors_.back().name).c_str(),
                !(fields_ & 1)   ? "dtype"
                : !(fields_ & 2) ? "shape"
                                 : "such data_offsets");
    }
    place_ = Place::file;  // or the end of all: then the parser allows nothing more
    return true;
  }

  bool start_array(size_t) override {
    if (place_ != Place::of_shape && place_ != Place::of_offsets) unexpected("[");
    place_ = place_ == Place::of_shape ? Place::shape : Place::offsets;
    return true;
  }

  bool end_array() override {
    place_ = Place::tensor;
    return true;
  }

  bool parse_error(size_t position, const std::string&, const nlohmann::json::exception&) override {
    RUN_ERROR("%s: its header is not JSON from byte %zu on; %s", who_.c_str(), kLengthBytes + position, kCopyAgain);
  }

 private:
  // Where the next token belongs: of_x is before the brace or bracket that opens x.
  enum class Place {
    start,
    file,
    of_metadata,
    metadata,
    of_tensor,
    tensor,
    dtype,
    of_shape,
    shape,
    of_offsets,
    offsets
  };

  [[noreturn]] void unexpected(const std::string& found) const {
    const char* expected = place_ == Place::metadata                                  ? "text"
                           : place_ == Place::dtype                                   ? "a dtype in quotes"
                           : place_ == Place::of_shape || place_ == Place::of_offsets ? "a list of numbers"
                           : place_ == Place::shape   ? "a size, a whole number from 0 on"
                           : place_ == Place::offsets ? "two offsets, whole numbers from 0 on"
                                                      : "{ and its fields";
    const bool within = place_ != Place::start && place_ != Place::of_metadata && place_ != Place::metadata;
    RUN_ERROR("%s: %s: found %s in the header, expected %s", who_.c_str(),
              within ? ("tensor " + in_quotes(tensors_.back().name)).c_str() : "metadata", found.c_str(), expected);
  }

  const std::string& who_;
  std::vector<TensorInfo>& tensors_;
  Place place_ = Place::start;
  int fields_ = 0;   // of the tensor, seen so far: dtype 1, shape 2, data_offsets 4
  int offsets_ = 0;  // of the tensor, seen so far
  bool metadata_ = false;
};

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < std::min<size_t>(shape.size(), 8); i++) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + (shape.size() > 8 ? ", ...]" : "]");
}

// The tensor by itself: its type, its shape, its place in a file with so many bytes of data.
void check(const TensorInfo& t, int64_t data_bytes, const std::string& who) {
  const std::string where = who + ": tensor " + in_quotes(t.name);
  int64_t bytes = dtype_bytes(t.dtype);
  if (bytes == 0) RUN_ERROR("%s: unknown dtype %s", where.c_str(), in_quotes(t.dtype).c_str());
  if (t.begin > t.end || t.end > data_bytes) {
    RUN_ERROR("%s: data_offsets %lld to %lld, expected a part of the file's %lld bytes of data; %s", where.c_str(),
              static_cast<long long>(t.begin), static_cast<long long>(t.end), static_cast<long long>(data_bytes),
              t.begin > t.end ? kCopyAgain : "the file is cut short: copy it again");
  }
  int64_t n = 1;
  bool overflow = false;
  for (const int64_t size : t.shape) overflow |= __builtin_mul_overflow(n, size, &n);
  overflow |= __builtin_mul_overflow(n, bytes, &bytes);
  if (overflow || bytes != t.end - t.begin) {
    RUN_ERROR("%s: %s of shape %s does not make its %lld bytes; %s", where.c_str(), t.dtype.c_str(),
              shape_text(t.shape).c_str(), static_cast<long long>(t.end - t.begin), kCopyAgain);
  }
}

}  // namespace

int64_t TensorInfo::elements() const {
  int64_t n = 1;
  for (const int64_t size : shape) n *= size;
  return n;
}

int64_t dtype_bytes(std::string_view dtype) {
  static constexpr std::pair<std::string_view, int64_t> all[] = {
      {"BOOL", 1}, {"U8", 1},  {"I8", 1},  {"F8_E4M3", 1}, {"F8_E5M2", 1}, {"I16", 2}, {"U16", 2}, {"F16", 2},
      {"BF16", 2}, {"I32", 4}, {"U32", 4}, {"F32", 4},     {"I64", 8},     {"U64", 8}, {"F64", 8}};
  for (const auto& [name, bytes] : all)
    if (dtype == name) return bytes;
  return 0;
}

Safetensors::Safetensors(const std::string& path, const std::string& who) : who_(who), file_(path, who) {
  const int64_t size = file_.size();
  if (size <= kLengthBytes || file_.data()[kLengthBytes] != '{') {
    RUN_ERROR("%s: not a safetensors file: %lld bytes, %s; expected 8 bytes of header length and {", who.c_str(),
              static_cast<long long>(size), first_bytes(file_.data(), size).c_str());
  }
  uint64_t length = 0;
  std::memcpy(&length, file_.data(), sizeof(length));
  if (length > kMostHeaderBytes) {
    RUN_ERROR("%s: states a header of %llu bytes, expected at most %llu", who.c_str(),
              static_cast<unsigned long long>(length), static_cast<unsigned long long>(kMostHeaderBytes));
  }
  const int64_t data_bytes = size - kLengthBytes - static_cast<int64_t>(length);
  if (data_bytes < 0) {
    RUN_ERROR("%s: cut short: its %lld bytes end within the header of %llu; %s", who.c_str(),
              static_cast<long long>(size), static_cast<unsigned long long>(length), kCopyAgain);
  }
  const char* header = file_.data() + kLengthBytes;
  data_ = header + length;
  HeaderReader reader(who_, tensors_);
  nlohmann::json::sax_parse(header, data_, &reader);

  for (const TensorInfo& t : tensors_) check(t, data_bytes, who_);
  std::stable_sort(tensors_.begin(), tensors_.end(), [](const TensorInfo& a, const TensorInfo& b) {
    return a.begin != b.begin ? a.begin < b.begin : a.end < b.end;
  });
  int64_t end = 0;
  for (size_t i = 0; i < tensors_.size(); i++) {
    const TensorInfo& t = tensors_[i];
    if (t.begin != end) {
      RUN_ERROR("%s: tensor %s begins at byte %lld of the data, expected %lld, where the one before it ends; %s",
                who.c_str(), in_quotes(t.name).c_str(), static_cast<long long>(t.begin), static_cast<long long>(end),
                kCopyAgain);
    }
    end = t.end;
    if (!places_.emplace(t.name, i).second)
      RUN_ERROR("%s: tensor %s is there twice; %s", who.c_str(), in_quotes(t.name).c_str(), kCopyAgain);
  }
  if (end != data_bytes) {
    RUN_ERROR("%s: too long: %lld bytes of data, but its tensors end at %lld; %s", who.c_str(),
              static_cast<long long>(data_bytes), static_cast<long long>(end), kCopyAgain);
  }
}

const TensorInfo* Safetensors::find(std::string_view name) const {
  const auto found = places_.find(name);
  return found == places_.end() ? nullptr : &tensors_[found->second];
}

std::string safetensors_header(std::vector<TensorInfo>& tensors, bool pt) {
  std::string header = pt ? R"({"__metadata__":{"format":"pt"},)" : "{";
  int64_t end = 0;
  for (TensorInfo& t : tensors) {
    t.begin = end;
    t.end = end += t.elements() * dtype_bytes(t.dtype);
    const nlohmann::json entry = {{"dtype", t.dtype}, {"shape", t.shape}, {"data_offsets", {t.begin, t.end}}};
    header += nlohmann::json(t.name).dump() + ":" + entry.dump() + ",";
  }
  if (header.back() == ',') header.pop_back();
  header += '}';
  header.resize((kLengthBytes + header.size() + 63) / 64 * 64 - kLengthBytes, ' ');
  const uint64_t length = header.size();
  return std::string(reinterpret_cast<const char*>(&length), sizeof(length)) + header;
}
