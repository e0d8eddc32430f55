#include "dev/bench/library_peak.h"

#include <chrono>
#include <cstdint>
#include <cstring>

#ifdef WITH_ONEDNN
#include <oneapi/dnnl/dnnl.hpp>

namespace {
using dnnl::memory;

// The time of the second of two runs: the first fetches the operands and the code.
double seconds_of(const ProductShape& shape, memory::data_type type, dnnl::engine& engine, dnnl::stream& stream) {
  const auto matrix = [&](int rows, int columns, bool turned) {
    const memory::dims strides = turned ? memory::dims{1, rows} : memory::dims{columns, 1};
    return memory::desc({rows, columns}, type, strides);
  };
  const auto filled = [&](const memory::desc& desc) {
    memory m(desc, engine);
    // 0x3e3e3e3e: 0.186 in either type, so that no operand is zero, subnormal or NaN.
    if (desc.get_size()) memset(m.get_data_handle(), 0x3e, desc.get_size());
    return m;
  };
  const memory a = filled(matrix(shape.m, shape.k, shape.a_turned)),
               b = filled(matrix(shape.k, shape.n, shape.b_turned));
  const memory c = filled(matrix(shape.m, shape.n, false));
  dnnl::primitive_attr attributes;
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
#if DNNL_VERSION_MAJOR >= 3
  const dnnl::matmul::primitive_desc description(engine, a.get_desc(), b.get_desc(), c.get_desc(), attributes);
#else
  const dnnl::matmul::primitive_desc description({a.get_desc(), b.get_desc(), c.get_desc()}, attributes, engine);
#endif
  const memory scratchpad(description.scratchpad_desc(), engine);
  dnnl::matmul matmul(description);
  double seconds = 0;
  for (int run = 0; run < 2; run++) {
    const auto start = std::chrono::steady_clock::now();
    matmul.execute(stream,
                   {{DNNL_ARG_SRC, a}, {DNNL_ARG_WEIGHTS, b}, {DNNL_ARG_DST, c}, {DNNL_ARG_SCRATCHPAD, scratchpad}});
    stream.wait();
    seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }
  return seconds;
}
}  // namespace

std::vector<double> library_seconds(const std::vector<ProductShape>& shapes, bool in_bf16) {
  dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  dnnl::stream stream(engine);
  std::vector<double> seconds;
  for (const ProductShape& shape : shapes)
    seconds.push_back(seconds_of(shape, in_bf16 ? memory::data_type::bf16 : memory::data_type::f32, engine, stream));
  return seconds;
}
#else
std::vector<double> library_seconds(const std::vector<ProductShape>&, bool) { return {}; }
#endif
