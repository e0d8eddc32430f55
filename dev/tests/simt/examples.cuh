// Kernels that prove the emulation: one for each thing that CUDA code does here. nvcc compiles them too. `plant` puts
// one fault in, to show what finds it.
#pragma once
#include "kernels/portable.cuh"

enum class Plant { none, missing_barrier, missing_second_barrier, missing_wait, wrong_swizzle, divergent_shuffle,
                   barrier_in_branch, past_the_end, misaligned_row, off_by_one_row };

// out (n): in (n), each block's part reversed. blockDim.x = 256 at most; n a multiple of blockDim.x.
template <Plant plant = Plant::none>
__global__ void reverse_blocks(float* out, const float* in) {
  SHARED(float, tile, [256]);
  const unsigned i = threadIdx.x, n = blockDim.x, first = blockIdx.x * n;
  tile[i] = in[first + i];
  if (plant != Plant::missing_barrier) __syncthreads();
  out[first + i] = tile[n - 1 - i];
}

// out (n): the sums of each element with its neighbour in the warp, by way of shared memory, three times over.
template <Plant plant = Plant::none>
__global__ void warp_neighbours(float* out, const float* in) {
  SHARED(float, tile, [256]);
  const unsigned i = threadIdx.x;
  float x = in[i];
  for (int round = 0; round < 3; round++) {
    tile[i] = x;
    if (plant != Plant::missing_barrier) __syncwarp();
    x += tile[i ^ 1];
    if (plant != Plant::missing_second_barrier) __syncwarp();
  }
  out[i] = x;
}

__device__ inline float warp_sum(float x) {
  for (int offset = 16; offset > 0; offset /= 2) x = add_rn(x, __shfl_xor_sync(all_lanes, x, offset));
  return x;
}

// out (B): the sum of each row of in (B, n), by one block a row.
template <Plant plant = Plant::none>
__global__ void row_sums(float* out, const float* in, int n) {
  SHARED(float, partial, [32]);
  const float* row = in + static_cast<size_t>(blockIdx.x) * n;
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  float sum = 0.0f;
  for (int i = static_cast<int>(threadIdx.x); i < n; i += static_cast<int>(blockDim.x)) sum = add_rn(sum, row[i]);
  if (plant == Plant::divergent_shuffle && lane == 5) {
    sum = add_rn(sum, __shfl_xor_sync(all_lanes, sum, 16));
  } else {
    sum = warp_sum(sum);
  }
  if (plant == Plant::barrier_in_branch) {
    if (lane == 3) __syncthreads();
  }
  if (lane == 0) partial[warp + (plant == Plant::past_the_end ? n / 4 : 0)] = sum;
  __syncthreads();
  if (warp == 0) {
    sum = warp_sum(lane < warps ? partial[lane] : 0.0f);
    if (lane == 0) out[blockIdx.x] = sum;
  }
}

// LayerNorm of rows (N, C): a warp for each row, the row kept in dynamic shared memory (warps of a block, C).
template <class T>
__global__ void layernorm_example(T* out, float* mean, float* rstd, const T* in, const T* weight, const T* bias, int N,
                                  int C) {
  SHARED_DYNAMIC(float, rows);
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const int n = static_cast<int>(blockIdx.x * (blockDim.x / 32)) + warp;
  if (n >= N) return;
  float* x = rows + warp * C;
  const T* source = in + static_cast<size_t>(n) * C;
  float sum = 0.0f;
  for (int c = lane; c < C; c += 32) {
    x[c] = source[c];
    sum = add_rn(sum, x[c]);
  }
  const float m = div_rn(warp_sum(sum), static_cast<float>(C));
  sum = 0.0f;
  for (int c = lane; c < C; c += 32) sum = fma_rn(sub_rn(x[c], m), sub_rn(x[c], m), sum);
  const float r = div_rn(1.0f, sqrt_rn(add_rn(div_rn(warp_sum(sum), static_cast<float>(C)), 1e-5f)));
  for (int c = lane; c < C; c += 32)
    out[static_cast<size_t>(n) * C + c] = fma_rn(mul_rn(r, sub_rn(x[c], m)), weight[c], bias[c]);
  if (lane == 0) {
    mean[n] = m;
    rstd[n] = r;
  }
}

// C (M, N) fp32 = A (M, K) B (K, N), both bf16 bits, row-major. K a multiple of 64, N of 8; any M.
// A block of 128 threads makes a 64x64 tile: warp w the rows 16w.. of it. K in steps of 64, two buffers. Rows of 64
// bf16 are eight chunks of 16 bytes; chunk c of row r lies at c ^ r%8, so that ldmatrix meets no bank twice.
template <Plant plant = Plant::none>
__global__ void __launch_bounds__(128) gemm_example(float* C, const uint16_t* A, const uint16_t* B, int M, int N,
                                                    int K) {
  SHARED_DYNAMIC(unsigned char, smem);
  constexpr unsigned row_bytes = 128, tile_bytes = 64 * row_bytes;
  const shared_address base = to_shared(smem);  // buffer i: A at 2i tiles, B behind it
  const unsigned thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int m0 = static_cast<int>(blockIdx.y) * 64, n0 = static_cast<int>(blockIdx.x) * 64;

  const auto fetch = [&](unsigned buffer, int k0) {
    const shared_address a = base + buffer * 2 * tile_bytes, b = a + tile_bytes;
    for (unsigned i = thread; i < 64 * 8; i += 128) {
      const unsigned row = i / 8, chunk = i % 8;
      const unsigned place = row * row_bytes + (chunk ^ row % 8) * 16;
      const int m = m0 + static_cast<int>(row), n = n0 + static_cast<int>(chunk) * 8;
      const bool inside_m = plant == Plant::off_by_one_row ? m <= M : m < M, inside_n = n < N;
      cp_async_16(a + place, A + static_cast<size_t>(inside_m ? m : 0) * K + k0 + chunk * 8, inside_m ? 16 : 0);
      cp_async_16(b + place, B + static_cast<size_t>(k0 + static_cast<int>(row)) * N + (inside_n ? n : 0),
                  inside_n ? 16 : 0);
    }
    cp_async_commit();
  };

  float acc[8][4] = {};
  fetch(0, 0);
  const int steps = K / 64;
  for (int step = 0; step < steps; step++) {
    if (step + 1 < steps) {
      fetch((step + 1) % 2, (step + 1) * 64);
    } else {
      cp_async_commit();
    }
    if (plant != Plant::missing_wait) cp_async_wait<1>();
    if (plant != Plant::missing_barrier) __syncthreads();
    const shared_address a = base + step % 2 * 2 * tile_bytes, b = a + tile_bytes;
    UNROLL
    for (unsigned k = 0; k < 4; k++) {
      uint32_t fa[4];
      const unsigned row = 16 * warp + lane % 16, chunk = 2 * k + lane / 16;
      const unsigned swizzle = plant == Plant::wrong_swizzle ? row % 4 : row % 8;
      ldmatrix_x4(fa, a + row * row_bytes + (chunk ^ swizzle) * 16 + (plant == Plant::misaligned_row ? 8 : 0));
      UNROLL
      for (unsigned n = 0; n < 4; n++) {
        uint32_t fb[4];
        const unsigned brow = 16 * k + lane % 16, bchunk = 2 * n + lane / 16;
        ldmatrix_x4_trans(fb, b + brow * row_bytes + (bchunk ^ brow % 8) * 16);
        mma_m16n8k16(acc[2 * n], fa, fb[0], fb[1]);
        mma_m16n8k16(acc[2 * n + 1], fa, fb[2], fb[3]);
      }
    }
    if (plant != Plant::missing_second_barrier) __syncthreads();
  }

  const int g = static_cast<int>(lane / 4), t = static_cast<int>(lane % 4);
  for (int j = 0; j < 8; j++) {
    for (int r = 0; r < 4; r++) {
      const int m = m0 + static_cast<int>(16 * warp) + g + 8 * (r / 2), n = n0 + 8 * j + 2 * t + r % 2;
      if (m < M && n < N) C[static_cast<size_t>(m) * N + n] = acc[j][r];
    }
  }
}

// Entry points as a layer file has them: the same text in all three builds.
inline void reverse_blocks_gpu(float* out, const float* in, int n, cudaStream_t stream) {
  launch(reverse_blocks<>, n / 64, 64, 0, stream, out, in);
}
template <Plant plant = Plant::none>
void row_sums_gpu(float* out, const float* in, int B, int n, cudaStream_t stream) {
  const unsigned threads = 128;
  launch(row_sums<plant>, B, threads, 0, stream, out, in, n);
}
template <class T>
void layernorm_example_gpu(T* out, float* mean, float* rstd, const T* in, const T* weight, const T* bias, int N, int C,
                           cudaStream_t stream) {
  constexpr int warps = 8;
  const size_t bytes = static_cast<size_t>(warps) * C * sizeof(float);
  launch(layernorm_example<T>, (N + warps - 1) / warps, warps * 32, bytes, stream, out, mean, rstd, in, weight, bias, N,
         C);
}
template <Plant plant = Plant::none>
void gemm_example_gpu(float* C, const uint16_t* A, const uint16_t* B, int M, int N, int K, cudaStream_t stream) {
  launch(gemm_example<plant>, dim3((N + 63) / 64, (M + 63) / 64), 128, 4 * 64 * 128, stream, C, A, B, M, N, K);
}
