// One panel of a matrix product on the CPU, by the calling thread.
//
// Products are cut into fixed output panels, one thread each (kernels/matmul.cuh), so results do not depend on the
// number of threads: oneDNN by itself splits the sum of a weight gradient by threads. A panel is computed in fp32 and
// left in fp32; the caller adds the bias, accumulates, rounds.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

#include "kernels/device.h"
#include "mcf/bf16.h"

// Element (i,j) of a matrix at data[i * row + j * column]; row or column is 1. Strides in elements.
template <class floatX>
struct Matrix {
  const floatX* data;
  int64_t row, column;
  Matrix at(int64_t i, int64_t j) const { return {data + i * row + j * column, row, column}; }
  Matrix transposed() const { return {data, column, row}; }
};

inline constexpr int panel_rows = 256, panel_columns = 256;

// c (m, panel_columns) = a (m,k) b (k,n), m <= panel_rows, n <= panel_columns. Which library multiplies: oneDNN in bf16
// where the processor does that fast, oneDNN in fp32 on widened operands, else the plain product.
void panel_product(float* c, const Matrix<float>& a, const Matrix<float>& b, int m, int n, int k, Device& device);
void panel_product(float* c, const Matrix<bf16>& a, const Matrix<bf16>& b, int m, int n, int k, Device& device);

// For the header: the library, its version and the instruction set it uses, e.g. "oneDNN 2.6.3, AVX2".
std::string product_library();
// True where bf16 products run in bf16; else operands are widened and multiplied in fp32.
bool product_native_bf16();
// A sentence where products run slower than this program can do, with the reason and what to change; else empty.
std::string product_warning(bool in_bf16);
// Seconds spent multiplying since the program started (inside the library where there is one, its copies and the
// epilogues not counted), summed over threads.
double product_seconds();
// FLOP/s that panel products of this type reach on all threads here, the best of a few tries: what MFU is measured
// against.
double measured_product_peak(bool in_bf16, Device& device);
