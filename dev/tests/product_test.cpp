// runtime/product.h and kernels/matmul.cuh: every layout that the layers use, sizes that fill no panel and several,
// both element types, against sums in double; equal bits for every number of threads. Built twice: with oneDNN (where
// it is there) and with the plain product.
#include "runtime/product.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "kernels/matmul.cuh"
#include "runtime/random.h"

namespace {

template <class floatX>
std::vector<floatX> random_values(size_t n, uint64_t seed) {
  std::vector<floatX> x(n);
  for (size_t i = 0; i < n; i++) store(x[i], static_cast<float>(random_uniform(seed, i) - 0.5));
  return x;
}

template <class floatX>
Matrix<floatX> view(const std::vector<floatX>& x, int rows, int columns, bool by_row) {
  return by_row ? Matrix<floatX>{x.data(), columns, 1} : Matrix<floatX>{x.data(), 1, rows};
}

// fp32 sums of k products of numbers below 1/2: each rounding is at most 2^-24 of a partial sum, which is at most k/4
// and typically sqrt(k)/12; k roundings in the worst order give k * 2^-24 * sqrt(k)/12, doubled for safety. One more
// rounding to the type of the output.
template <class Out>
double tolerance(int k, double value) {
  const double fp32_sum = 2.0 * k * 0x1p-24 * std::sqrt(k) / 12 + 1e-7;
  return fp32_sum + std::abs(value) * (sizeof(Out) == 2 ? 0x1p-8 : 0x1p-23);
}

template <class floatX, class Out>
void expect_product(int m, int n, int k, bool a_by_row, bool b_by_row, bool with_bias, bool accumulate) {
  Device device(2);
  const auto a = random_values<floatX>(static_cast<size_t>(m) * k, 1),
             b = random_values<floatX>(static_cast<size_t>(k) * n, 2);
  const auto bias = random_values<floatX>(static_cast<size_t>(n), 3);
  const auto before = random_values<Out>(static_cast<size_t>(m) * n, 4);
  std::vector<Out> out = before;
  out.resize(out.size() + 64);
  for (size_t i = before.size(); i < out.size(); i++) store(out[i], 77.0f);  // must stay
  const auto A = view(a, m, k, a_by_row), B = view(b, k, n, b_by_row);
  matmul_cpu(out.data(), A, B, with_bias ? bias.data() : nullptr, m, n, k, accumulate, device);
  for (int i = 0; i < m; i++)
    for (int j = 0; j < n; j++) {
      double sum = accumulate  ? to_float(before[static_cast<size_t>(i) * n + j])
                   : with_bias ? to_float(bias[static_cast<size_t>(j)])
                               : 0;
      for (int l = 0; l < k; l++)
        sum += static_cast<double>(to_float(A.data[i * A.row + l * A.column])) *
               to_float(B.data[l * B.row + j * B.column]);
      ASSERT_NEAR(to_float(out[static_cast<size_t>(i) * n + j]), sum, tolerance<Out>(k, sum))
          << m << "x" << n << "x" << k << " rows " << a_by_row << b_by_row << " at " << i << "," << j;
    }
  for (size_t i = before.size(); i < out.size(); i++) ASSERT_EQ(to_float(out[i]), 77.0f);
}

struct Size {
  int m, n, k;
};
const Size sizes[] = {{1, 1, 1},       {3, 5, 7},        {17, 33, 65}, {256, 256, 512},
                      {257, 300, 513}, {130, 515, 1030}, {1, 384, 48}};

template <class floatX>
class Product : public testing::Test {};
using ElementTypes = testing::Types<float, bf16>;
TYPED_TEST_SUITE(Product, ElementTypes);

TYPED_TEST(Product, Forward) {
  for (const auto& s : sizes)
    for (const bool bias : {false, true}) expect_product<TypeParam, TypeParam>(s.m, s.n, s.k, true, false, bias, false);
}
TYPED_TEST(Product, InputGradient) {
  for (const auto& s : sizes) expect_product<TypeParam, TypeParam>(s.m, s.n, s.k, true, true, false, false);
}
TYPED_TEST(Product, WeightGradientAddsUp) {
  for (const auto& s : sizes) expect_product<TypeParam, TypeParam>(s.m, s.n, s.k, false, true, false, true);
}
TYPED_TEST(Product, WeightGradientInFp32) {
  for (const auto& s : sizes) expect_product<TypeParam, float>(s.m, s.n, s.k, false, true, false, true);
}

// A product does not depend on how many threads share it.
TYPED_TEST(Product, EqualBitsForEveryNumberOfThreads) {
  const int m = 600, n = 700, k = 800;
  const auto a = random_values<TypeParam>(static_cast<size_t>(m) * k, 1),
             b = random_values<TypeParam>(static_cast<size_t>(k) * n, 2);
  std::vector<float> first;
  for (const int threads : {1, 2, 4, 7}) {
    Device device(threads);
    std::vector<float> out(static_cast<size_t>(m) * n);
    constexpr TypeParam* no_bias = nullptr;
    matmul_cpu(out.data(), view(a, m, k, false), view(b, k, n, true), static_cast<const TypeParam*>(no_bias), m, n, k,
               true, device);
    if (first.empty()) first = out;
    ASSERT_EQ(memcmp(first.data(), out.data(), out.size() * sizeof(float)), 0) << threads << " threads";
  }
}

TEST(ProductLibrary, SaysWhatItIs) {
  EXPECT_NE(product_library(), "");
  Device device(1);
  EXPECT_GT(measured_product_peak(false, device), 1e8);
}

}  // namespace
