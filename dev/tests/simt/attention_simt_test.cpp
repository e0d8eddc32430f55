// The attention kernels against fp64, against the CPU twin, and against themselves in every order of execution.
//
// The bound on errors: the same formulas in fp64 with bf16 roundings where the kernels round make some error, the
// kernels may make twice that, as maximum and as root mean square, plus a slack for fp32 sums that is stated at
// allowed().
#include "dev/tests/simt/attention_reference.h"

#include <gtest/gtest.h>

#include <set>

#include "dev/tests/simt/memory.h"
#include "dev/tests/simt/sweep.h"
#include "kernels/attention.cuh"
#include "kernels/attention_backward.cuh"
#include "kernels/attention_forward.cuh"

namespace {

template <class floatX>
std::vector<double> doubles(const std::vector<floatX>& x) {
  std::vector<double> y(x.size());
  for (size_t i = 0; i < x.size(); i++) y[i] = static_cast<double>(to_float(x[i]));
  return y;
}
template <class floatX>
std::vector<floatX> narrow(const std::vector<float>& x) {
  std::vector<floatX> y(x.size());
  for (size_t i = 0; i < x.size(); i++) store(y[i], x[i]);
  return y;
}

// Everything that forward and backward write.
template <class floatX>
struct Outputs {
  std::vector<floatX> out, dqkv;
  std::vector<float> lse, D;

  std::vector<uint32_t> bits() const {
    std::vector<uint32_t> all;
    const auto add = [&](const auto& x) {
      for (const auto& e : x) {
        uint32_t u = 0;
        memcpy(&u, &e, sizeof e);
        all.push_back(u);
      }
    };
    add(out), add(dqkv), add(lse), add(D);
    return all;
  }
};

template <class floatX>
struct Inputs {
  AttentionShape shape;
  std::vector<floatX> qkv, dout;
};

enum class Kind { normal, large_logits, offset_logits, equal_rows };

template <class floatX>
Inputs<floatX> make_inputs(const AttentionShape& s, Kind kind, unsigned seed = 1) {
  std::vector<float> qkv = normal_numbers(s.rows() * 3 * s.C(), seed),
                     dout = normal_numbers(s.rows() * s.C(), seed + 1);
  const size_t row = 3 * s.C();
  for (size_t i = 0; i < qkv.size(); i++) {
    // Scores q k / sqrt(d) have a standard deviation of 1, or of 1e4.
    if (kind == Kind::large_logits && i % row < 2 * s.C()) qkv[i] *= 100.0f;
    // 1e4 is added to all scores of a row: P stays that of scores with a standard deviation of 1.
    if (kind == Kind::offset_logits && i % row < 2 * s.C() && i % s.d == 0)
      qkv[i] = i % row < s.C() ? 100.0f : 100.0f * std::sqrt(static_cast<float>(s.d));
    if (kind == Kind::equal_rows) qkv[i] = qkv[i % row];
  }
  return {s, narrow<floatX>(qkv), narrow<floatX>(dout)};
}

// The kernels behind their entry points, all buffers guarded, outputs poisoned.
template <class floatX>
Outputs<floatX> run_kernels(const Inputs<floatX>& in) {
  const AttentionShape& s = in.shape;
  simt::Buffer<floatX> qkv(in.qkv, "qkv"), dout(in.dout, "dout");
  simt::Buffer<floatX> out(in.dout.size(), "out"), dqkv(in.qkv.size(), "dqkv");
  simt::Buffer<float> lse(s.stats(), "lse"), D(s.stats(), "D");
  attention_forward_cuda(out.data(), lse.data(), qkv.data(), s.B, s.T, static_cast<int>(s.C()), s.NH, nullptr);
  attention_backward_cuda(dqkv.data(), dout.data(), out.data(), lse.data(), D.data(), qkv.data(), s.B, s.T,
                          static_cast<int>(s.C()), s.NH, nullptr);
  return {out.values(), dqkv.values(), lse.values(), D.values()};
}

template <class floatX>
Outputs<floatX> run_twin(const Inputs<floatX>& in) {
  const AttentionShape& s = in.shape;
  Device device(1);
  Outputs<floatX> r{
      std::vector<floatX>(in.dout.size()), std::vector<floatX>(in.qkv.size()), std::vector<float>(s.stats()), {}};
  attention_forward(r.out.data(), r.lse.data(), in.qkv.data(), s.B, s.T, static_cast<int>(s.C()), s.NH, device);
  attention_backward(r.dqkv.data(), in.dout.data(), r.out.data(), r.lse.data(), in.qkv.data(), s.B, s.T,
                     static_cast<int>(s.C()), s.NH, device);
  return r;
}

// Errors of one tensor, as maximum and root mean square. NaN and infinity count as infinite.
struct Error {
  double max = 0, rms = 0;
};
Error difference(const std::vector<double>& a, const std::vector<double>& b) {
  Error e;
  for (size_t i = 0; i < a.size(); i++) {
    const double x = std::isfinite(a[i]) ? std::fabs(a[i] - b[i]) : INFINITY;
    e.max = std::max(e.max, x);
    e.rms += x * x / static_cast<double>(a.size());
  }
  e.rms = std::sqrt(e.rms);
  return e;
}

// What `which` of (0 out, 1 dQ, 2 dK, 3 dV) may differ from fp64. Slack, in units of the sum of the magnitudes of all
// terms of the worst element: 2^-17 for sums in fp32 (up to 128 additions, each half an ulp), and 2^-21 of the largest
// score, since scores and lse are fp32 numbers whose rounding the exponential turns into a relative error of P.
Error allowed(const AttentionResult& exact, const AttentionResult& rounded, int which) {
  const double slack = exact.magnitude[which] * (0x1p-17 + 0x1p-21 * exact.max_score);
  const Error model = difference(rounded.tensor(which), exact.tensor(which));
  return {2 * model.max + slack, 2 * model.rms + slack};
}

template <class floatX>
void expect_close(const Outputs<floatX>& got, const Inputs<floatX>& in, const std::string& what) {
  const std::vector<double> qkv = doubles(in.qkv), dout = doubles(in.dout);
  // The tensor-core kernels round P and dS to bf16; the simple ones, and all in fp32, round results only.
  const bool tiles = std::is_same_v<floatX, bf16> && std::set{32, 64, 80, 96, 128}.contains(in.shape.d);
  const Rounding none{}, same{std::is_same_v<floatX, bf16>, tiles};
  const AttentionResult exact = attention_reference(in.shape, qkv, dout, none);
  const AttentionResult rounded = attention_reference(in.shape, qkv, dout, same);
  const AttentionResult result = split(in.shape, doubles(got.out), doubles(got.dqkv), doubles(got.lse));
  const char* names[] = {"out", "dQ", "dK", "dV"};
  for (int which = 0; which < 4; which++) {
    const Error error = difference(result.tensor(which), exact.tensor(which)), bound = allowed(exact, rounded, which);
    EXPECT_LE(error.max, bound.max) << what << ": " << names[which];
    EXPECT_LE(error.rms, bound.rms) << what << ": " << names[which];
  }
  // lse is fp32: 2^-18 of the largest score, which bounds d additions of products and a few roundings more.
  EXPECT_LE(difference(result.lse, exact.lse).max, 0x1p-18 * (4 + exact.max_score)) << what << ": lse";
}

template <class floatX>
void check(const AttentionShape& s, Kind kind, const std::string& what) {
  const Inputs<floatX> in = make_inputs<floatX>(s, kind);
  expect_close(run_kernels(in), in, what + " " + s.name());
}

constexpr int tile_widths[] = {32, 64, 80, 96, 128};
constexpr int lengths[] = {1, 2, 15, 63, 64, 65, 130};

// --- Layout ---------------------------------------------------------------------------------------------------------

template <int d>
void check_layout() {
  using Tile = AttentionTile<d>;
  constexpr int rows = 128;
  std::set<int> places;
  for (int row = 0; row < rows; row++)
    for (int chunk = 0; chunk < Tile::chunks; chunk++) {
      const int at = Tile::offset(row, chunk);
      EXPECT_EQ(at % 16, 0);
      EXPECT_EQ(at / Tile::row_bytes, row) << "chunks stay in their row";
      places.insert(at);
    }
  EXPECT_EQ(places.size(), static_cast<size_t>(rows) * Tile::chunks);
  for (int row = 0; row < rows; row += 8)
    for (int chunk = 0; chunk < Tile::chunks; chunk++) {
      std::set<int> banks;
      for (int i = 0; i < 8; i++) banks.insert(Tile::offset(row + i, chunk) % 128);
      EXPECT_EQ(banks.size(), 8u) << "d = " << d << ", rows from " << row << ", chunk " << chunk;
    }
  for (int row = 0; row < 16; row++)
    for (int chunk = 0; chunk < Tile::chunks; chunk++)
      for (int block = 0; block < rows; block += 16) {
        const auto first = static_cast<shared_address>(Tile::offset(row, chunk % 2));
        EXPECT_EQ(Tile::along(first, chunk / 2) + static_cast<shared_address>(block * Tile::row_bytes),
                  static_cast<shared_address>(Tile::offset(block + row, chunk)));
      }
}
TEST(AttentionTile, permutes_chunks_without_bank_conflicts) {
  check_layout<16>(), check_layout<32>(), check_layout<48>(), check_layout<64>(), check_layout<80>();
  check_layout<96>(), check_layout<112>(), check_layout<128>(), check_layout<160>(), check_layout<256>();
}
TEST(AttentionTile, kernels_meet_no_bank_conflict) {
  for (const int d : tile_widths) {
    simt::counters() = {};
    run_kernels(make_inputs<bf16>({1, 130, 1, d}, Kind::normal));
    EXPECT_EQ(simt::counters().conflicts, 0u) << d;
    EXPECT_GT(simt::counters().ldmatrix_tiles, 0u) << d;
  }
}

// --- Results --------------------------------------------------------------------------------------------------------

TEST(Attention, tiles_are_as_exact_as_their_roundings_allow) {
  for (const int d : tile_widths)
    for (const int T : lengths) check<bf16>({1, T, 1, d}, Kind::normal, "normal");
}
TEST(Attention, heads_and_sequences_stay_apart) {
  for (const int d : tile_widths) check<bf16>({2, 70, 3, d}, Kind::normal, "normal");
  check<bf16>({2, 20, 3, 24}, Kind::normal, "normal");
  check<float>({2, 20, 3, 64}, Kind::normal, "normal");
}
TEST(Attention, large_logits) {
  for (const int d : tile_widths) check<bf16>({1, 130, 1, d}, Kind::large_logits, "logits of 1e4");
  for (const int d : tile_widths) check<bf16>({1, 130, 1, d}, Kind::offset_logits, "logits near 1e4");
  check<float>({1, 65, 1, 64}, Kind::offset_logits, "logits near 1e4");
  check<bf16>({1, 65, 1, 48}, Kind::large_logits, "logits of 1e4");
  check<float>({1, 65, 1, 64}, Kind::large_logits, "logits of 1e4");
}
TEST(Attention, all_rows_equal) {
  for (const int d : tile_widths) check<bf16>({1, 130, 1, d}, Kind::equal_rows, "equal rows");
  check<bf16>({1, 65, 1, 48}, Kind::equal_rows, "equal rows");
  check<float>({1, 65, 1, 64}, Kind::equal_rows, "equal rows");
}
TEST(Attention, any_other_width_and_fp32) {
  for (const int T : lengths) {
    for (const int d : {48, 17}) check<bf16>({1, T, 1, d}, Kind::normal, "simple");
    for (const int d : {64, 17, 1}) check<float>({1, T, 1, d}, Kind::normal, "fp32");
  }
  check<bf16>({1, 3, 1, 1500}, Kind::normal, "wide");  // one warp a block: two would not fit
}
TEST(AttentionDeath, misaligned_pointers_are_refused) {
  alignas(16) bf16 x[32 * 3 + 8] = {};
  float lse = 0;
  EXPECT_DEATH(attention_forward_cuda(x, &lse, x + 1, 1, 1, 32, 1, nullptr), "is not 16-byte aligned");
}
TEST(AttentionDeath, a_head_too_wide_for_shared_memory_is_refused) {
  const AttentionShape s{1, 1, 1, 12288};
  EXPECT_THROW(run_kernels(make_inputs<float>(s, Kind::normal)), RunError);
}

// The twin normalises P before it multiplies and rounds nowhere between: both errors together bound the difference.
TEST(Attention, agrees_with_the_cpu_twin) {
  const auto compare = [](const auto& in) {
    const AttentionShape& s = in.shape;
    const bool tiles = !std::is_same_v<decltype(in.qkv[0]), const float&> && s.d != 48;
    const auto got = run_kernels(in), twin = run_twin(in);
    const std::vector<double> qkv = doubles(in.qkv), dout = doubles(in.dout);
    const AttentionResult exact = attention_reference(s, qkv, dout, {});
    const AttentionResult rounded = attention_reference(s, qkv, dout, {sizeof in.qkv[0] == 2, tiles});
    const AttentionResult a = split(s, doubles(got.out), doubles(got.dqkv), doubles(got.lse));
    const AttentionResult b = split(s, doubles(twin.out), doubles(twin.dqkv), doubles(twin.lse));
    for (int which = 0; which < 4; which++)
      EXPECT_LE(difference(a.tensor(which), b.tensor(which)).max, 2 * allowed(exact, rounded, which).max)
          << s.name() << ", tensor " << which;
    EXPECT_LE(difference(a.lse, b.lse).max, 0x1p-18 * (4 + exact.max_score));
  };
  for (const int d : {32, 64, 80, 96, 128, 48}) compare(make_inputs<bf16>({1, 100, 2, d}, Kind::normal));
  compare(make_inputs<float>({2, 50, 2, 40}, Kind::normal));
}

// Loss = sum(dout * out); central differences with step 2^-7. Truncation h^2/6 f''' and rounding 2^-24/h: below 1e-4.
TEST(Attention, gradients_are_finite_differences) {
  Inputs<float> in = make_inputs<float>({1, 4, 1, 4}, Kind::normal);
  const std::vector<float> gradient = run_kernels(in).dqkv;
  const auto loss = [&] {
    const std::vector<float> out = run_kernels(in).out;
    double sum = 0;
    for (size_t i = 0; i < out.size(); i++) sum += static_cast<double>(out[i]) * in.dout[i];
    return sum;
  };
  for (size_t i = 0; i < in.qkv.size(); i++) {
    const float x = in.qkv[i], h = 0x1p-7f;
    in.qkv[i] = x + h;
    const double above = loss();
    in.qkv[i] = x - h;
    const double below = loss();
    in.qkv[i] = x;
    EXPECT_NEAR(gradient[i], (above - below) / (2 * h), 2e-4) << i;
  }
}

// ThreadSanitizer finds races in any order: there, one is enough.
template <class Run>
std::string differing_order(Run run, std::vector<uint32_t>* result) {
  if (!simt::under_tsan()) return simt::differing_order(run, result);
  *result = run();
  return "";
}

// --- Every order of execution, both extremes of cp.async, two kinds of poison: the same bits ------------------------

template <class floatX>
void check_orders(const AttentionShape& s) {
  const Inputs<floatX> in = make_inputs<floatX>(s, Kind::normal);
  std::vector<uint32_t> first;
  EXPECT_EQ(differing_order([&] { return run_kernels(in).bits(); }, &first), "") << s.name();
  EXPECT_EQ(run_kernels(in).bits(), first) << "again";
}
TEST(AttentionOrders, tiles) {
  for (const int d : tile_widths) check_orders<bf16>({1, 130, 1, d});
}
TEST(AttentionOrders, simple) {
  check_orders<bf16>({1, 40, 2, 48});
  check_orders<float>({1, 40, 2, 17});
}

// --- Tile sizes that the table does not use today -------------------------------------------------------------------

template <int d, int row_tiles, int keys, bool resident>
void check_forward_variant() {
  const Inputs<bf16> in = make_inputs<bf16>({1, 200, 1, d}, Kind::normal);
  const AttentionShape& s = in.shape;
  Outputs<bf16> usual = run_kernels(in);
  simt::Buffer<bf16> qkv(in.qkv, "qkv");
  std::vector<uint32_t> bits;
  EXPECT_EQ(differing_order(
                [&] {
                  simt::Buffer<bf16> out(in.dout.size(), "out");
                  simt::Buffer<float> lse(s.stats(), "lse");
                  attention_forward_launch<d, row_tiles, keys, resident, 1>(out.data(), lse.data(), qkv.data(), s.B,
                                                                            s.T, d, s.NH, nullptr);
                  usual.out = out.values();
                  usual.lse = lse.values();
                  return usual.bits();
                },
                &bits),
            "");
  expect_close(usual, in, "forward variant");
}
TEST(AttentionVariants, forward) {
  check_forward_variant<64, 2, 64, true>();
  check_forward_variant<64, 1, 64, true>();
  check_forward_variant<64, 1, 32, true>();  // two tiles to mask, the first without a key for half of the rows
  check_forward_variant<64, 1, 128, false>();
  check_forward_variant<128, 2, 32, false>();
  check_forward_variant<32, 1, 48, false>();  // tiles of keys that do not start where tiles of queries do
}

template <int d, AttentionTiles q, AttentionTiles k>
void check_backward_variant() {
  const Inputs<bf16> in = make_inputs<bf16>({1, 200, 1, d}, Kind::normal);
  const AttentionShape& s = in.shape;
  Outputs<bf16> usual = run_kernels(in);
  simt::Buffer<bf16> qkv(in.qkv, "qkv"), dout(in.dout, "dout");
  simt::Buffer<float> lse(usual.lse, "lse"), D(usual.D, "D");
  std::vector<uint32_t> bits;
  EXPECT_EQ(differing_order(
                [&] {
                  simt::Buffer<bf16> dqkv(in.qkv.size(), "dqkv");
                  attention_dQ_launch<d, q.row_tiles, q.tile, q.step, q.resident, 1>(
                      dqkv.data(), dout.data(), lse.data(), D.data(), qkv.data(), s.B, s.T, d, s.NH, nullptr);
                  attention_dKV_launch<d, k.row_tiles, k.tile, k.step, k.resident, 1>(
                      dqkv.data(), dout.data(), lse.data(), D.data(), qkv.data(), s.B, s.T, d, s.NH, nullptr);
                  usual.dqkv = dqkv.values();
                  return usual.bits();
                },
                &bits),
            "");
  expect_close(usual, in, "backward variant");
}
TEST(AttentionVariants, backward) {
  using Tile = AttentionTiles;
  check_backward_variant<64, Tile{1, 64, 32, true, 1}, Tile{1, 64, 32, true, 1}>();
  check_backward_variant<64, Tile{2, 64, 32, false, 1}, Tile{2, 64, 32, false, 1}>();
  check_backward_variant<64, Tile{2, 64, 64, true, 1}, Tile{2, 64, 16, true, 1}>();
  check_backward_variant<80, Tile{2, 32, 16, false, 1}, Tile{1, 32, 16, true, 1}>();
  check_backward_variant<32, Tile{1, 48, 16, false, 1}, Tile{1, 48, 16, false, 1}>();
}

}  // namespace
