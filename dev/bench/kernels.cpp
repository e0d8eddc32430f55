// bench_kernels: each layer by itself at GPT-2 124M's shapes (B = 4, T = 256), in bf16 and fp32, with Google Benchmark.
// GB/s by the bytes a layer must read and write, FLOP/s for what multiplies matrices. See README.md here.
#include <benchmark/benchmark.h>

#include "kernels/attention.cuh"
#include "kernels/encoder.cuh"
#include "kernels/fused_classifier.cuh"
#include "kernels/gelu.cuh"
#include "kernels/layernorm.cuh"
#include "kernels/matmul.cuh"
#include "runtime/random.h"

namespace {

constexpr int B = 4, T = 256, C = 768, NH = 12, V = 50257, Vp = 50304, rows = 256;  // rows: of logits at a time
constexpr size_t BT = size_t{B} * T, BTC = BT * C;

Device& device() {
  static Device device;
  return device;
}

// An array of small random numbers.
template <class floatX>
struct Array : Buffer<floatX> {
  explicit Array(size_t n) : Buffer<floatX>(device(), Memory::workspace, n) {
    for (size_t i = 0; i < n; i++) store((*this)[i], static_cast<float>(random_uniform(1, i) - 0.5));
  }
  floatX& operator[](size_t i) { return this->data()[i]; }
};

struct Ids {
  int ids[BT];
  Ids() {
    for (size_t i = 0; i < BT; i++) ids[i] = static_cast<int>(random_uniform(2, i) * V);
  }
};

void bytes(benchmark::State& state, double n) {
  state.counters["bytes/s"] = benchmark::Counter(n, benchmark::Counter::kIsIterationInvariantRate);
}
void flops(benchmark::State& state, double n) {
  state.counters["FLOP/s"] = benchmark::Counter(n, benchmark::Counter::kIsIterationInvariantRate);
}

template <class X>
void encoder_forward(benchmark::State& state) {
  Array<X> out(BTC), wte(size_t{Vp} * C), wpe(size_t{T} * C);
  const Ids tokens;
  for (auto _ : state) encoder_forward(out.data(), tokens.ids, wte.data(), wpe.data(), B, T, C, device());
  bytes(state, (2 * BTC + T * C) * sizeof(X));
}

template <class X>
void encoder_backward(benchmark::State& state) {
  Array<X> dout(BTC), dwpe(size_t{T} * C);
  Array<float> dwte(size_t{Vp} * C);
  const Ids tokens;
  for (auto _ : state) encoder_backward(dwte.data(), dwpe.data(), dout.data(), tokens.ids, B, T, C, V, device());
  bytes(state, BTC * (sizeof(X) + 8) + 2 * T * C * sizeof(X));
}

template <class X>
void layernorm_forward(benchmark::State& state) {
  Array<X> out(BTC), inp(BTC), weight(C), bias(C);
  Array<float> mean(BT), rstd(BT);
  for (auto _ : state)
    layernorm_forward(out.data(), mean.data(), rstd.data(), inp.data(), weight.data(), bias.data(), B, T, C, device());
  bytes(state, 2 * BTC * sizeof(X));
}

template <class X>
void residual_layernorm_forward(benchmark::State& state) {
  Array<X> residual(BTC), out(BTC), inp1(BTC), inp2(BTC), weight(C), bias(C);
  Array<float> mean(BT), rstd(BT);
  for (auto _ : state)
    residual_layernorm_forward(residual.data(), out.data(), mean.data(), rstd.data(), inp1.data(), inp2.data(),
                               weight.data(), bias.data(), B, T, C, device());
  bytes(state, 4 * BTC * sizeof(X));
}

template <class X>
void layernorm_backward(benchmark::State& state) {
  Array<X> dinp(BTC), dweight(C), dbias(C), dout(BTC), inp(BTC), weight(C);
  Array<float> mean(BT), rstd(BT);
  for (auto _ : state) {
    std::fill(dinp.data(), dinp.data() + BTC, X{});  // it is added to: keeps it finite, counted in neither bytes
    layernorm_backward(dinp.data(), dweight.data(), dbias.data(), dout.data(), inp.data(), weight.data(), mean.data(),
                       rstd.data(), B, T, C, device());
  }
  bytes(state, 4 * BTC * sizeof(X));
}

template <class X>
void gelu_forward(benchmark::State& state) {
  Array<X> out(4 * BTC), inp(4 * BTC);
  for (auto _ : state) gelu_forward(out.data(), inp.data(), 4 * BTC, device());
  bytes(state, 8 * BTC * sizeof(X));
}

template <class X>
void gelu_backward(benchmark::State& state) {
  Array<X> d(4 * BTC), inp(4 * BTC);
  for (auto _ : state) gelu_backward(d.data(), inp.data(), 4 * BTC, device());
  bytes(state, 12 * BTC * sizeof(X));
}

template <class X>
void classifier(benchmark::State& state) {
  constexpr size_t n = size_t{rows} * Vp;
  Array<X> logits(n);
  Array<float> losses(rows);
  const Ids targets;
  for (auto _ : state) fused_classifier(losses.data(), logits.data(), targets.ids, 1e-3f, rows, V, Vp, true, device());
  bytes(state, 2 * n * sizeof(X));
}

template <class X>
void attention_forward(benchmark::State& state) {
  Array<X> out(BTC), qkv(3 * BTC);
  Array<float> lse(BT * NH);
  for (auto _ : state) attention_forward(out.data(), lse.data(), qkv.data(), B, T, C, NH, device());
  flops(state, 2.0 * 2 * BTC * T / 2);  // two products over the keys seen, half of all
}

template <class X>
void attention_backward(benchmark::State& state) {
  Array<X> dqkv(3 * BTC), dout(BTC), out(BTC), qkv(3 * BTC);
  Array<float> lse(BT * NH);
  attention_forward(out.data(), lse.data(), qkv.data(), B, T, C, NH, device());
  for (auto _ : state)
    attention_backward(dqkv.data(), dout.data(), out.data(), lse.data(), qkv.data(), B, T, C, NH, device());
  flops(state, 5.0 * 2 * BTC * T / 2);
}

// The MLP's first layer, a quarter of the model's products: (B,T,C) to (B,T,4C).
template <class X>
void matmul_forward(benchmark::State& state) {
  Array<X> out(4 * BTC), inp(BTC), weight(4 * C * C), bias(4 * C);
  for (auto _ : state) matmul_forward(out.data(), inp.data(), weight.data(), bias.data(), B, T, C, 4 * C, device());
  flops(state, 2.0 * BTC * 4 * C);
}

template <class X>
void matmul_backward(benchmark::State& state) {
  Array<X> dinp(BTC), dweight(4 * C * C), dbias(4 * C), dout(4 * BTC), inp(BTC), weight(4 * C * C);
  for (auto _ : state)
    matmul_backward(dinp.data(), dweight.data(), dbias.data(), dout.data(), inp.data(), weight.data(), B, T, C, 4 * C,
                    device());
  flops(state, 2 * 2.0 * BTC * 4 * C);
}

#define BOTH(kernel)                                                                              \
  BENCHMARK(kernel<bf16>)->Unit(benchmark::kMillisecond)->MeasureProcessCPUTime()->UseRealTime(); \
  BENCHMARK(kernel<float>)->Unit(benchmark::kMillisecond)->MeasureProcessCPUTime()->UseRealTime()

BOTH(encoder_forward);
BOTH(encoder_backward);
BOTH(layernorm_forward);
BOTH(residual_layernorm_forward);
BOTH(layernorm_backward);
BOTH(gelu_forward);
BOTH(gelu_backward);
BOTH(classifier);
BOTH(attention_forward);
BOTH(attention_backward);
BOTH(matmul_forward);
BOTH(matmul_backward);

}  // namespace

BENCHMARK_MAIN();
