#include "runtime/product.h"

#include <atomic>
#include <chrono>
#include <map>
#include <tuple>

#include "kernels/vector_math.h"
#ifdef WITH_ONEDNN
#include <oneapi/dnnl/dnnl.hpp>
#endif

namespace {

// Operands that are widened to fp32 are multiplied in slices of this depth, so that they stay in the cache.
constexpr int slice_depth = 512;
enum Slot { panel_slot, a_slot, b_slot, library_slot };  // of Device::scratch; the first is the caller's

// Adds the time from its construction on to what product_seconds() tells. 50 ns, beside 100 us and more for a panel.
std::atomic<int64_t> product_nanoseconds{0};
struct Stopwatch {
  const std::chrono::steady_clock::time_point start = std::chrono::steady_clock::now();
  ~Stopwatch() { product_nanoseconds += std::chrono::nanoseconds(std::chrono::steady_clock::now() - start).count(); }
};

#ifdef WITH_ONEDNN
using dnnl::memory;

constexpr memory::data_type data_type(const float*) { return memory::data_type::f32; }
constexpr memory::data_type data_type(const bf16*) { return memory::data_type::bf16; }

struct Primitive {
  dnnl::matmul matmul;
  memory a, b, c, scratchpad;
  size_t scratchpad_bytes;
};

// Creation takes milliseconds, so primitives are kept, by shape. A cache a thread and the scratchpad in our hands: one
// created in one thread and run in another with the library's own scratchpad gives wrong results now and then.
template <class floatX>
Primitive& primitive(const Matrix<floatX>& a, const Matrix<floatX>& b, int m, int n, int k, bool accumulate,
                     const dnnl::engine& engine) {
  using Key = std::tuple<int, int, int, int64_t, int64_t, int64_t, int64_t, bool>;
  thread_local std::map<Key, Primitive> cache;
  const Key key{m, n, k, a.row, a.column, b.row, b.column, accumulate};
  if (const auto found = cache.find(key); found != cache.end()) return found->second;
  const memory::desc a_desc({m, k}, data_type(a.data), {a.row, a.column});
  const memory::desc b_desc({k, n}, data_type(b.data), {b.row, b.column});
  const memory::desc c_desc({m, n}, memory::data_type::f32, memory::dims{panel_columns, 1});
  dnnl::primitive_attr attributes;
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  if (accumulate) {
    dnnl::post_ops sum;
    sum.append_sum(1.0f);
    attributes.set_post_ops(sum);
  }
#if DNNL_VERSION_MAJOR >= 3
  const dnnl::matmul::primitive_desc description(engine, a_desc, b_desc, c_desc, attributes);
#else
  const dnnl::matmul::primitive_desc description({a_desc, b_desc, c_desc}, attributes, engine);
#endif
  const auto of = [&](const memory::desc& desc) { return memory(desc, engine, nullptr); };
  const auto scratchpad = description.scratchpad_desc();
  return cache
      .emplace(key, Primitive{dnnl::matmul(description), of(a_desc), of(b_desc), of(c_desc), of(scratchpad),
                              scratchpad.get_size()})
      .first->second;
}

template <class floatX>
void library_product(float* c, const Matrix<floatX>& a, const Matrix<floatX>& b, int m, int n, int k, bool accumulate,
                     Device& device) try {
  thread_local dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  thread_local dnnl::stream stream(engine);
  Primitive& p = primitive(a, b, m, n, k, accumulate, engine);
  p.a.set_data_handle(const_cast<floatX*>(a.data));
  p.b.set_data_handle(const_cast<floatX*>(b.data));
  p.c.set_data_handle(c);
  p.scratchpad.set_data_handle(device.scratch<char>(library_slot, p.scratchpad_bytes + 64));
  Stopwatch stopwatch;
  p.matmul.execute(
      stream, {{DNNL_ARG_SRC, p.a}, {DNNL_ARG_WEIGHTS, p.b}, {DNNL_ARG_DST, p.c}, {DNNL_ARG_SCRATCHPAD, p.scratchpad}});
  stream.wait();
} catch (const dnnl::error& e) {
  // Inside a parallel region, which no exception may leave.
  fprintf(stderr, "train_gpt: error: oneDNN can't multiply (%d,%d) by (%d,%d): %s; a build with WITH_ONEDNN=OFF can\n",
          m, k, k, n, e.message);
  _Exit(1);
}

int isa() { return static_cast<int>(dnnl::get_effective_cpu_isa()); }
bool has(dnnl::cpu_isa wanted) { return (isa() & static_cast<int>(wanted)) == static_cast<int>(wanted); }
#endif

// Dense fp32 copy of a (rows, columns) matrix, its contiguous direction kept.
template <class floatX>
Matrix<float> widened(const Matrix<floatX>& a, int rows, int columns, float* buffer) {
  const bool by_row = a.column == 1;
  const int outer = by_row ? rows : columns, inner = by_row ? columns : rows;
  const int64_t stride = by_row ? a.row : a.column;
  for (int i = 0; i < outer; i++) {
    const floatX* from = a.data + i * stride;
    float* to = buffer + static_cast<size_t>(i) * inner;
#pragma omp simd
    for (int j = 0; j < inner; j++) to[j] = to_float(from[j]);
  }
  return by_row ? Matrix<float>{buffer, columns, 1} : Matrix<float>{buffer, 1, rows};
}

#ifdef WITH_ONEDNN
// By the library in fp32, on copies that stay in the cache.
template <class floatX>
void widened_product(float* c, const Matrix<floatX>& a, const Matrix<floatX>& b, int m, int n, int k, Device& device) {
  float* A = device.scratch<float>(a_slot, size_t{panel_rows} * slice_depth);
  float* B = device.scratch<float>(b_slot, size_t{slice_depth} * panel_columns);
  for (int k0 = 0; k0 < k; k0 += slice_depth) {
    const int depth = std::min(slice_depth, k - k0);
    library_product(c, widened(a.at(0, k0), m, depth, A), widened(b.at(k0, 0), depth, n, B), m, n, depth, k0 > 0,
                    device);
  }
}
#endif

// Row-major fp32 copy with row stride ld, the padding zero: what tile_product takes.
template <class floatX>
void packed(const Matrix<floatX>& a, int rows, int columns, float* buffer, int ld) {
  for (int i = 0; i < rows; i++) {
    float* to = buffer + static_cast<size_t>(i) * ld;
    for (int j = 0; j < columns; j++) to[j] = to_float(a.data[i * a.row + j * a.column]);
    for (int j = columns; j < ld; j++) to[j] = 0;
  }
}

template <class floatX>
void plain_product(float* c, const Matrix<floatX>& a, const Matrix<floatX>& b, int m, int n, int k, Device& device) {
  float* A = device.scratch<float>(a_slot, size_t{panel_rows} * slice_depth);
  float* B = device.scratch<float>(b_slot, size_t{slice_depth} * panel_columns);
  for (int k0 = 0; k0 < k; k0 += slice_depth) {
    const int depth = std::min(slice_depth, k - k0);
    packed(a.at(0, k0), m, depth, A, depth);
    packed(b.at(k0, 0), depth, n, B, panel_columns);
    Stopwatch stopwatch;
    tile_product(c, panel_columns, A, depth, B, panel_columns, m, n, depth, k0 > 0);
  }
}

}  // namespace

void panel_product(float* c, const Matrix<float>& a, const Matrix<float>& b, int m, int n, int k, Device& device) {
#ifdef WITH_ONEDNN
  // A weight gradient reads its left operand across rows: 40 GFLOP/s straight from memory, 86 from a dense copy (AVX2).
  if (a.column != 1) return widened_product(c, a, b, m, n, k, device);
  library_product(c, a, b, m, n, k, false, device);
#else
  plain_product(c, a, b, m, n, k, device);
#endif
}

void panel_product(float* c, const Matrix<bf16>& a, const Matrix<bf16>& b, int m, int n, int k, Device& device) {
#ifdef WITH_ONEDNN
  if (product_native_bf16()) return library_product(c, a, b, m, n, k, false, device);
  widened_product(c, a, b, m, n, k, device);
#else
  plain_product(c, a, b, m, n, k, device);
#endif
}

bool product_native_bf16() {
#ifdef WITH_ONEDNN
  // Without AVX512_BF16 oneDNN either refuses bf16 (AVX2) or crawls: 37 against fp32's 118 GFLOP/s on AVX-512.
  static const bool native = has(dnnl::cpu_isa::avx512_core_bf16);
  return native;
#else
  return false;
#endif
}

std::string product_library() {
#ifdef WITH_ONEDNN
  const auto* version = dnnl::version();
#if defined(__x86_64__)
  const char* name = has(dnnl::cpu_isa::avx512_core_amx)    ? "AVX-512 with AMX"
                     : has(dnnl::cpu_isa::avx512_core_bf16) ? "AVX-512 with BF16"
                     : has(dnnl::cpu_isa::avx512_core)      ? "AVX-512"
                     : has(dnnl::cpu_isa::avx2)             ? "AVX2"
                                                            : "SSE4.1";
#else
  const char* name = "this processor's vectors";
#endif
  return strf("oneDNN %d.%d.%d, %s", version->major, version->minor, version->patch, name);
#else
  return "plain product";
#endif
}

std::string product_warning([[maybe_unused]] bool in_bf16) {
#ifdef WITH_ONEDNN
  if (!in_bf16 || product_native_bf16()) return "";
  return "no bf16 products on this processor (AVX512_BF16 or AMX): bf16 operands are widened and multiplied in fp32";
#else
  return "built without oneDNN: matrix products are 2 to 10 times slower; install libdnnl-dev and build again";
#endif
}

double product_seconds() { return static_cast<double>(product_nanoseconds) * 1e-9; }

double measured_product_peak(bool in_bf16, Device& device) {
  constexpr int depth = 512, repeats = 2;
  double best = 0;
  for (int attempt = 0; attempt < 4; attempt++) {
    const auto start = std::chrono::steady_clock::now();
    int threads = 1;
#pragma omp parallel
    {
      omp_set_num_threads(1);
#pragma omp single
      threads = omp_get_num_threads();
      float* c = device.scratch<float>(panel_slot, size_t{panel_rows} * panel_columns);
      const auto* operands = device.scratch<float>(a_slot, size_t{panel_rows} * slice_depth);
      for (int i = 0; i < repeats; i++)
        if (in_bf16 && product_native_bf16()) {
          const auto* x = reinterpret_cast<const bf16*>(operands);
          panel_product(c, Matrix<bf16>{x, depth, 1}, Matrix<bf16>{x, 1, depth}, panel_rows, panel_columns, depth,
                        device);
        } else {
          panel_product(c, Matrix<float>{operands, depth, 1}, Matrix<float>{operands, 1, depth}, panel_rows,
                        panel_columns, depth, device);
        }
    }
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    best = std::max(best, 2.0 * panel_rows * panel_columns * depth * repeats * threads / seconds);
  }
  return best;
}
