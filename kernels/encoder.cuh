// Token and position embedding.
#pragma once
#include "kernels/device.h"
#include "kernels/reduce.cuh"
#include "kernels/token_buckets.h"

// --- Forward: out (B,T,C) = wte (Vp,C)[tokens (B,T)] + wpe (max_T,C)[t] ---------------------------------------------

template <class floatX>
void encoder_forward_cpu(floatX* out, const int* tokens, const floatX* wte, const floatX* wpe, int B, int T, int C) {
#pragma omp parallel for
  for (int bt = 0; bt < B * T; bt++) {
    floatX* o = out + static_cast<size_t>(bt) * C;
    const floatX* e = wte + static_cast<size_t>(tokens[bt]) * C;
    const floatX* p = wpe + static_cast<size_t>(bt % T) * C;
#pragma omp simd
    for (int c = 0; c < C; c++) store(o[c], to_float(e[c]) + to_float(p[c]));
  }
}

// A warp makes the row of a position.
template <class floatX, int width>
__global__ void __launch_bounds__(256)
    encoder_forward_kernel(floatX* out, const int* tokens, const floatX* wte, const floatX* wpe, int BT, int T, int C) {
  const int bt = static_cast<int>(blockIdx.x) * block_warps() + warp_index();
  if (bt >= BT) return;
  floatX* o = out + static_cast<size_t>(bt) * C;
  const floatX* token = wte + static_cast<size_t>(tokens[bt]) * C;
  const floatX* position = wpe + static_cast<size_t>(bt % T) * C;
  for (int c = lane_index() * width; c < C; c += warp_size * width) {
    float e[width], p[width];
    load_run(e, token + c);
    load_run(p, position + c);
    UNROLL
    for (int j = 0; j < width; j++) e[j] += p[j];
    store_run(o + c, e);
  }
}

template <class floatX>
void encoder_forward_cuda(floatX* out, const int* tokens, const floatX* wte, const floatX* wpe, int B, int T, int C,
                          cudaStream_t stream) {
  with_width<floatX>(
      C,
      [&]<int width>() {
        launch(encoder_forward_kernel<floatX, width>, blocks_for(static_cast<size_t>(B) * T, 8), 256, 0, stream, out,
               tokens, wte, wpe, B * T, T, C);
      },
      out, wte, wpe);
}

template <class floatX>
void encoder_forward(floatX* out, const int* tokens, const floatX* wte, const floatX* wpe, int B, int T, int C,
                     Device& device) {
  Scope scope("encoder_forward", device);
  if (device.is_cuda()) return encoder_forward_cuda(out, tokens, wte, wpe, B, T, C, device.stream());
  encoder_forward_cpu(out, tokens, wte, wpe, B, T, C);
}

// --- Backward: dwte (Vp,C) += dout rows by token; dwpe (max_T,C) += dout summed over B ------------------------------
//
// dwte is fp32 scratch, which the classifier's contribution goes into as well before it is rounded once.

// Threads share the channels, not the rows: each sum runs over b, t in order, whatever the number of threads.
template <class floatX>
void encoder_backward_cpu(float* dwte, floatX* dwpe, const floatX* dout, const int* tokens, int B, int T, int C) {
  constexpr int strip = 64;
#pragma omp parallel for
  for (int c0 = 0; c0 < C; c0 += strip) {
    const int width = std::min(strip, C - c0);
    for (int bt = 0; bt < B * T; bt++) {
      const floatX* d = dout + static_cast<size_t>(bt) * C + c0;
      float* w = dwte + static_cast<size_t>(tokens[bt]) * C + c0;
#pragma omp simd
      for (int c = 0; c < width; c++) w[c] += to_float(d[c]);
    }
    for (int t = 0; t < T; t++) {
      float sum[strip] = {};
      for (int b = 0; b < B; b++) {
        const floatX* d = dout + (static_cast<size_t>(b) * T + t) * C + c0;
#pragma omp simd
        for (int c = 0; c < width; c++) sum[c] += to_float(d[c]);
      }
      floatX* w = dwpe + static_cast<size_t>(t) * C + c0;
#pragma omp simd
      for (int c = 0; c < width; c++) store(w[c], to_float(w[c]) + sum[c]);
    }
  }
}

// Tokens by runs of their positions (kernels/token_buckets.h): a warp adds one run's rows, 32 * width channels of them,
// in order. The only run of a token goes onto dwte itself, in the CPU twin's order; the runs of a frequent one go to
// partial (runs,C) and from there by add_long_tokens. So nothing is added by two warps, and no token is slow.
// buckets lies on the device: how much there is to do is read there, and the grid need not depend on it.
template <class floatX, int width>
__global__ void __launch_bounds__(256)
    sum_token_runs(float* dwte, float* partial, const floatX* dout, const int* buckets, int BT, int C) {
  const TokenBuckets b(buckets, BT);
  const int c = (static_cast<int>(blockIdx.y) * warp_size + lane_index()) * width;
  if (c >= C) return;
  const int warps = static_cast<int>(gridDim.x) * block_warps();
  for (int i = static_cast<int>(blockIdx.x) * block_warps() + warp_index(); i < b.runs(); i += warps) {
    const TokenBuckets::Run run = b.run(i);
    float* to =
        run.slot < 0 ? dwte + static_cast<size_t>(run.token) * C + c : partial + static_cast<size_t>(run.slot) * C + c;
    float sum[width] = {};
    if (run.slot < 0) load_run(sum, to);
    const int* position = b.positions() + run.begin;
    constexpr int ahead = 4;  // rows in flight, added one after the other
    for (int k = 0; k < run.n; k += ahead) {
      float d[ahead][width] = {};
      UNROLL
      for (int a = 0; a < ahead; a++)
        if (k + a < run.n) load_run(d[a], dout + static_cast<size_t>(position[k + a]) * C + c);
      UNROLL
      for (int a = 0; a < ahead; a++)
        if (k + a < run.n) UNROLL
      for (int j = 0; j < width; j++) sum[j] += d[a][j];
    }
    store_run(to, sum);
  }
}

// A block adds the runs of one frequent token, 32 channels: thread row y the runs y, y + 8, ..., then the eight in
// order.
template <class floatX>
__global__ void __launch_bounds__(256)
    add_long_tokens(float* dwte, const float* partial, const int* buckets, int BT, int C) {
  SHARED(float, sums, [8][warp_size]);
  const TokenBuckets b(buckets, BT);
  if (static_cast<int>(blockIdx.x) >= b.long_tokens()) return;
  const TokenBuckets::Long token = b.long_token(static_cast<int>(blockIdx.x));
  const int c = static_cast<int>(blockIdx.y) * warp_size + lane_index(), y = warp_index();
  float sum = 0;
  if (c < C)
    for (int k = y; k < token.runs; k += 8) sum += partial[static_cast<size_t>(token.slot + k) * C + c];
  sums[y][lane_index()] = sum;
  __syncthreads();
  if (y != 0 || c >= C) return;
  float* to = dwte + static_cast<size_t>(token.token) * C + c;
  sum = *to;
  UNROLL
  for (int k = 0; k < 8; k++) sum += sums[k][lane_index()];
  *to = sum;
}

// dwpe: a thread adds `width` channels of a position t over the sequences, in the CPU twin's order.
template <class floatX, int width>
__global__ void __launch_bounds__(256) position_gradient_kernel(floatX* dwpe, const floatX* dout, int B, size_t TC) {
  const size_t i = (static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x) * width;
  if (i >= TC) return;
  float sum[width] = {}, d[width], w[width];
  for (int b = 0; b < B; b++) {
    load_run(d, dout + static_cast<size_t>(b) * TC + i);
    UNROLL
    for (int j = 0; j < width; j++) sum[j] += d[j];
  }
  load_run(w, dwpe + i);
  UNROLL
  for (int j = 0; j < width; j++) w[j] += sum[j];
  store_run(dwpe + i, w);
}

// Floats of scratch that encoder_backward_cuda needs.
inline size_t encoder_backward_scratch(int B, int T, int C) {
  return static_cast<size_t>(TokenBuckets::max_slots(B * T)) * C;
}

// buckets (TokenBuckets::ints(B*T)): made by bucket_tokens() on the host, copied to the device.
template <class floatX>
void encoder_backward_cuda(float* dwte, floatX* dwpe, const floatX* dout, const int* buckets, float* scratch, int B,
                           int T, int C, cudaStream_t stream) {
  const int BT = B * T;
  const size_t TC = static_cast<size_t>(T) * C;
  with_width<floatX>(
      C,
      [&]<int width>() {
        const unsigned groups = std::min(blocks_for(static_cast<size_t>(BT), 8), 1024u);
        const dim3 grid(groups, blocks_for(static_cast<size_t>(C), warp_size * width));
        launch(sum_token_runs<floatX, width>, grid, 256, 0, stream, dwte, scratch, dout, buckets, BT, C);
        launch(position_gradient_kernel<floatX, width>, blocks_for(TC, 256 * width), 256, 0, stream, dwpe, dout, B, TC);
      },
      dwte, dwpe, dout, scratch);
  const unsigned tokens = static_cast<unsigned>(TokenBuckets::max_long_tokens(BT));
  if (tokens)
    launch(add_long_tokens<floatX>, dim3(tokens, blocks_for(static_cast<size_t>(C), warp_size)), 256, 0, stream, dwte,
           scratch, buckets, BT, C);
}

// tokens (B,T) lie in host memory, each in [0, V): a GPU gets them sorted.
template <class floatX>
void encoder_backward(float* dwte, floatX* dwpe, const floatX* dout, const int* tokens, int B, int T, int C, int V,
                      Device& device) {
  Scope scope("encoder_backward", device);
  if (device.is_cuda()) {
    std::vector<int> host(TokenBuckets::ints(B * T));
    bucket_tokens(host.data(), tokens, B * T, V);
    int* buckets = device.scratch<int>(0, host.size());
    device.upload(buckets, host.data(), host.size());
    float* scratch = device.scratch<float>(1, encoder_backward_scratch(B, T, C));
    return encoder_backward_cuda(dwte, dwpe, dout, buckets, scratch, B, T, C, device.stream());
  }
  encoder_backward_cpu(dwte, dwpe, dout, tokens, B, T, C);
}

// --- dwte (n) += scratch (n), rounded once --------------------------------------------------------------------------

template <class floatX>
void add_embedding_gradient_cpu(floatX* dwte, const float* scratch, size_t n) {
#pragma omp parallel for simd
  for (size_t i = 0; i < n; i++) store(dwte[i], to_float(dwte[i]) + scratch[i]);
}

template <class floatX, int width>
__global__ void __launch_bounds__(256) add_embedding_gradient_kernel(floatX* dwte, const float* scratch, size_t n) {
  const size_t i = (static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x) * width;
  if (i + width <= n) {
    float w[width], s[width];
    load_run(w, dwte + i);
    load_run(s, scratch + i);
    UNROLL
    for (int j = 0; j < width; j++) w[j] += s[j];
    store_run(dwte + i, w);
  } else {
    for (size_t j = i; j < n; j++) store(dwte[j], to_float(dwte[j]) + scratch[j]);
  }
}

template <class floatX>
void add_embedding_gradient_cuda(floatX* dwte, const float* scratch, size_t n, cudaStream_t stream) {
  with_width<floatX>(
      0,
      [&]<int width>() {
        launch(add_embedding_gradient_kernel<floatX, width>, blocks_for(n, 256 * width), 256, 0, stream, dwte, scratch,
               n);
      },
      dwte, scratch);
}

template <class floatX>
void add_embedding_gradient(floatX* dwte, const float* scratch, size_t n, Device& device) {
  Scope scope("add_embedding_gradient", device);
  if (device.is_cuda()) return add_embedding_gradient_cuda(dwte, scratch, n, device.stream());
  add_embedding_gradient_cpu(dwte, scratch, n);
}
