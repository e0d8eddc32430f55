// Several ranks, without processes: the cut into parts, the sum in rank order, the optimizer and the norm by parts, the
// TCP star among threads, and how a launch is recognised. comm_test.py runs the real thing.
#include "runtime/comm.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <limits>
#include <thread>

#include "dev/tests/numbers.h"
#include "dev/tests/optimizing.h"
#include "mcf/adamw.cuh"
#include "runtime/error.h"
#include "runtime/launch.h"
#include "runtime/random.h"

namespace {

// Tensors of these sizes, one after the other as in the parameter table.
struct Flat {
  std::vector<Block> blocks;
  size_t elements = 0;
  explicit Flat(const std::vector<size_t>& tensors) {
    for (size_t i = 0; i < tensors.size(); i++) {
      append_blocks(blocks, elements, tensors[i], i % 2 == 0);
      elements += (tensors[i] + tensor_alignment - 1) / tensor_alignment * tensor_alignment;
    }
  }
};

const std::vector<std::vector<size_t>> tables = {{1},
                                                 {64},
                                                 {8192},
                                                 {8193, 1},
                                                 {5 * 8192 + 77, 51, 3 * 8192 + 1, 64},
                                                 {1, 1, 1, 1, 1, 1, 1},
                                                 {100 * 8192},
                                                 {7, 90000, 65, 64, 20000, 8191, 8192, 8193}};

TEST(Cut, CoversEveryBlockOnceAndIsEven) {
  for (const auto& tensors : tables)
    for (int ranks = 1; ranks <= 9; ranks++) {
      const Flat flat(tensors);
      const Cut cut = cut_blocks(flat.blocks, flat.elements, ranks);
      ASSERT_EQ(cut.blocks.size(), static_cast<size_t>(ranks) + 1);
      ASSERT_EQ(cut.elements.size(), static_cast<size_t>(ranks) + 1);
      EXPECT_EQ(cut.blocks.front(), 0u);
      EXPECT_EQ(cut.blocks.back(), flat.blocks.size());
      EXPECT_EQ(cut.elements.front(), 0u);
      EXPECT_EQ(cut.elements.back(), flat.elements);
      for (int r = 0; r < ranks; r++) {
        const Part part = cut.part(r);
        ASSERT_LE(part.first_block, part.last_block);
        ASSERT_LE(part.begin, part.end);
        EXPECT_EQ(part.begin % tensor_alignment, 0u);
        // A part is its blocks: none of them reaches outside, so no rank sums another's gradient.
        for (size_t b = part.first_block; b < part.last_block; b++) {
          EXPECT_GE(flat.blocks[b].begin, part.begin);
          EXPECT_LE(flat.blocks[b].begin + flat.blocks[b].n, part.end);
        }
        EXPECT_LE(part.n(), flat.elements / static_cast<size_t>(ranks) + block_elements + tensor_alignment + 9);
      }
    }
}

template <class floatX>
void expect_rank_order_sum() {
  for (const size_t n : {size_t{0}, size_t{1}, size_t{2047}, size_t{2049}, size_t{10000}})
    for (const size_t ranks : {1u, 2u, 3u, 4u, 7u}) {
      std::vector<std::vector<floatX>> x(ranks, std::vector<floatX>(n + 1));
      for (size_t r = 0; r < ranks; r++)
        for (size_t i = 0; i <= n; i++) store(x[r][i], static_cast<float>(normal(r + 1, i)));
      std::vector<float> expected(n);
      for (size_t i = 0; i < n; i++) {
        expected[i] = to_float(x[0][i]);
        for (size_t r = 1; r < ranks; r++) expected[i] += to_float(x[r][i]);
      }
      std::vector<const floatX*> addends;
      for (const auto& a : x) addends.push_back(a.data());
      const size_t me = ranks / 2;  // in place, as the owner does it
      const float guard = to_float(x[me][n]);
      sum_in_rank_order(x[me].data(), addends, n);
      for (size_t i = 0; i < n; i++) {
        floatX rounded;
        store(rounded, expected[i]);
        ASSERT_EQ(to_float(x[me][i]), to_float(rounded)) << i;
      }
      EXPECT_EQ(to_float(x[me][n]), guard);
    }
}
TEST(RankOrderSum, IsTheFp32SumRoundedOnce) {
  expect_rank_order_sum<float>();
  expect_rank_order_sum<bf16>();
}

TEST(RankOrderSum, OrderAndRoundingMatter) {
  // 2^24 + 1 + 1 - 2^24 is 0 in this order and 2 in others; 1 + 2^-8 + 2^-8 is 1 where bf16 rounds on the way.
  const float a = 0x1p24f, b = 1, c = 1, d = -0x1p24f;
  float out;
  sum_in_rank_order(&out, {&a, &b, &c, &d}, 1);
  EXPECT_EQ(out, 0);
  bf16 one, half_ulp, sum;
  store(one, 1), store(half_ulp, 0x1p-8f);
  sum_in_rank_order(&sum, {&one, &half_ulp, &half_ulp}, 1);
  EXPECT_EQ(to_float(sum), 1 + 0x1p-7f);
}

TEST(RankOrderSum, NonFiniteStaysSo) {
  bf16 x, inf, nan, out;
  store(x, 1), store(inf, HUGE_VALF), store(nan, std::nanf(""));
  sum_in_rank_order(&out, {&x, &inf}, 1);
  EXPECT_EQ(to_float(out), HUGE_VALF);
  sum_in_rank_order(&out, {&x, &nan}, 1);
  EXPECT_TRUE(std::isnan(to_float(out)));
  float largest = std::numeric_limits<float>::max(), sum;
  sum_in_rank_order(&sum, {&largest, &largest}, 1);
  EXPECT_EQ(sum, HUGE_VALF);
}

// Every strategy, three steps: optimizers that own a part each do together, bit for bit, what one does that owns all.
template <class S>
void expect_parts_make_the_whole(int ranks) {
  using floatX = typename S::Theta;
  const Flat flat(tables[4]);
  const Cut cut = cut_blocks(flat.blocks, flat.elements, ranks);
  Device device(2);
  std::vector<floatX> theta(flat.elements), grads(flat.elements);
  for (const Block& b : flat.blocks)
    for (size_t i = 0; i < b.n; i++) store(theta[b.begin + i], static_cast<float>(.02 * normal(1, b.begin + i)));
  std::vector<floatX> theta_by_parts = theta;
  const BlockList blocks(flat.blocks, device);
  AdamW<S> whole(theta.data(), blocks, flat.elements, device);
  const int64_t whole_bytes = device.bytes(Memory::states);
  std::vector<std::unique_ptr<AdamW<S>>> parts;
  for (int r = 0; r < ranks; r++)
    parts.push_back(std::make_unique<AdamW<S>>(theta.data(), blocks, cut.part(r), device));
  EXPECT_EQ(device.bytes(Memory::states), 2 * whole_bytes) << "parts have more or less than the whole";
  for (int64_t t = 1; t <= 3; t++) {
    for (const Block& b : flat.blocks)
      for (size_t i = 0; i < b.n; i++)
        store(grads[b.begin + i], static_cast<float>(1e-3 * normal(1 + static_cast<uint64_t>(t), b.begin + i)));
    std::vector<double> partial(flat.blocks.size());
    const double norm = norm_of(grads.data(), flat.blocks, device);
    double unused = 0, by_parts = 0;
    for (int r = 0; r < ranks; r++) {
      const Part part = cut.part(r);
      const auto take = [&](double* p) {
        std::copy(p + part.first_block, p + part.last_block, &partial[part.first_block]);
      };
      global_norm(&unused, grads.data(), blocks, part, take, device);
    }
    const auto give = [&](double* p) { std::copy(partial.begin(), partial.end(), p); };
    global_norm(&by_parts, grads.data(), blocks, Part(0, 0, 0, 0), give, device);
    EXPECT_EQ(norm, by_parts);
    const AdamWScalars k = adamw_scalars(1e-3, .9, .95, 1e-8, .1, 1, norm, t);
    const QualitySums all = update<floatX>(whole, theta.data(), grads.data(), k, 1, norm, true, device);
    QualitySums together;
    for (int r = 0; r < ranks; r++) {
      const auto& p = parts[static_cast<size_t>(r)];
      update<floatX>(*p, theta_by_parts.data(), grads.data(), k, 1, norm, true, device);
      for (size_t b = cut.part(r).first_block; b < cut.part(r).last_block; b++) together += p->block_sums()[b];
    }
    EXPECT_EQ(memcmp(&all, &together, sizeof all), 0);
    ASSERT_EQ(memcmp(theta.data(), theta_by_parts.data(), theta.size() * sizeof(floatX)), 0);
  }
  for (int r = 0; r < ranks; r++) {
    const Part part = cut.part(r);
    if (part.n() == 0) continue;
    for (size_t s = 0; s < whole.states().size(); s++) {
      const auto& a = whole.states()[s];
      const auto& b = parts[static_cast<size_t>(r)]->states()[s];
      EXPECT_EQ(memcmp(static_cast<char*>(a.data) + part.begin * a.element_bytes, b.data, part.n() * b.element_bytes),
                0)
          << a.name;
    }
  }
}
TEST(Parts, TogetherDoWhatOneOptimizerDoes) {
  for (const int ranks : {1, 2, 3, 4, 13})
    [&]<class... S>(std::tuple<S...>*) {
      (expect_parts_make_the_whole<S>(ranks), ...);
    }(static_cast<AllStrategies*>(nullptr));
}

// The star among threads of this process: every pair's bytes arrive, whatever the sizes, empty ones too.
TEST(Star, ExchangesBytes) {
  for (const int ranks : {2, 3, 5}) {
    const auto value = [](int from, int to, int round, size_t i) {
      return static_cast<char>(17 * from + 29 * to + 5 * round + static_cast<int>(i % 251));
    };
    const auto size = [](int from, int to, int round) {
      return round == 0 ? size_t{0}
                        : static_cast<size_t>(
                              random_uniform(9, static_cast<uint64_t>(from * 8 + to), static_cast<uint64_t>(round), 0) *
                              300000);
    };
    Star zero(0, ranks, 20, 20);
    const int port = zero.listen(0);
    const auto run = [&](int me, Star& star) {
      star.connect({"localhost"}, port);
      for (int round = 0; round < 4; round++) {
        std::vector<std::vector<char>> out(static_cast<size_t>(ranks)), in(out.size());
        std::vector<Bytes> send, receive;
        for (int r = 0; r < ranks; r++) {
          auto &o = out[static_cast<size_t>(r)], &i = in[static_cast<size_t>(r)];
          o.resize(size(me, r, round)), i.resize(size(r, me, round));
          for (size_t k = 0; k < o.size(); k++) o[k] = value(me, r, round, k);
          send.push_back({o.data(), o.size()}), receive.push_back({i.data(), i.size()});
        }
        star.exchange(send, receive);
        for (int r = 0; r < ranks; r++)
          for (size_t k = 0; r != me && k < in[static_cast<size_t>(r)].size(); k++)
            ASSERT_EQ(in[static_cast<size_t>(r)][k], value(r, me, round, k)) << r << " to " << me << ", byte " << k;
      }
      EXPECT_GT(star.peers()[static_cast<size_t>(ranks) - 1].pid, 0);
      star.leave();
    };
    std::vector<std::thread> others;
    for (int r = 1; r < ranks; r++)
      others.emplace_back([&, r] {
        Star star(r, ranks, 20, 20);
        run(r, star);
      });
    run(0, zero);
    for (auto& t : others) t.join();
  }
}

// In a process of its own, for it ends.
TEST(StarDeathTest, SizesThatDisagreeEndTheRun) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto disagree = [] {
    Star zero(0, 2, 20, 20);
    const int port = zero.listen(0);
    char bytes[8] = {};
    std::thread other([&] {
      Star one(1, 2, 20, 20);
      one.connect({"localhost"}, port);
      one.exchange({{bytes, 4}, {}}, {{bytes, 4}, {}});
    });
    zero.connect({}, port);
    try {
      zero.exchange({{}, {bytes, 4}}, {{}, {bytes, 8}});
    } catch (const RunError& e) {
      zero.fail(1, e.what());
    }
    other.join();
  };
  EXPECT_EXIT(disagree(), testing::ExitedWithCode(1), "error: rank 1 .* sends 4 bytes where 8 are expected");
}

TEST(Comm, OneRankDoesNothing) {
  Comm comm;
  EXPECT_EQ(comm.ranks(), 1);
  EXPECT_EQ(comm.sum(3), 3);
  EXPECT_EQ(comm.gather(5), std::vector<int>{5});
  EXPECT_EQ(comm.gather_text("x"), std::vector<std::string>{"x"});
  EXPECT_EQ(comm.threads(0), 0);
  float g[4] = {1, 2, 3, 4};
  comm.reduce_scatter(g, 0, 4, cut_blocks(Flat({4}).blocks, 4, 1));
  comm.all_gather(g, {0, 4});
  comm.require_same("flags", "x");
  comm.wait(), comm.leave();
  EXPECT_EQ(g[3], 4);
}

TEST(Comm, DuplicateDevices) {
  const std::vector<std::string> names = {"GPU 0", "GPU 1", "GPU 0"};
  EXPECT_EQ(duplicate_device({"a", "b", "c"}, names), "");
  EXPECT_EQ(duplicate_device({"", "", ""}, names), "");
  const std::string line = duplicate_device({"a", "b", "a"}, names);
  EXPECT_NE(line.find("ranks 0 and 2 both use GPU 0"), std::string::npos) << line;
}

// detect_launch() under exactly these variables.
class LaunchTest : public testing::Test {
 protected:
  static constexpr const char* names[] = {"OMPI_COMM_WORLD_RANK",
                                          "OMPI_COMM_WORLD_SIZE",
                                          "OMPI_COMM_WORLD_LOCAL_RANK",
                                          "PMI_RANK",
                                          "PMI_SIZE",
                                          "MPI_LOCALRANKID",
                                          "RANK",
                                          "WORLD_SIZE",
                                          "LOCAL_RANK",
                                          "SLURM_PROCID",
                                          "SLURM_STEP_NUM_TASKS",
                                          "SLURM_NTASKS",
                                          "SLURM_LOCALID",
                                          "MASTER_ADDR",
                                          "MASTER_PORT"};
  void TearDown() override { clear(); }
  static void clear() {
    for (const char* name : names) unsetenv(name);
  }
  static Launch launched(const std::vector<std::pair<const char*, const char*>>& environment) {
    clear();
    for (const auto& [name, value] : environment) setenv(name, value, 1);
    return detect_launch();
  }
};

TEST_F(LaunchTest, Alone) {
  EXPECT_EQ(launched({}).ranks, 1);
  EXPECT_EQ(launched({{"RANK", "0"}, {"WORLD_SIZE", "1"}}).ranks, 1);
  EXPECT_EQ(launched({{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "1"}}).ranks, 1);
  // A batch script's own process, beside which there is no other.
  EXPECT_EQ(launched({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "8"}, {"SLURM_LOCALID", "0"}}).ranks, 1);
}

TEST_F(LaunchTest, Launchers) {
  Launch l =
      launched({{"OMPI_COMM_WORLD_RANK", "2"}, {"OMPI_COMM_WORLD_SIZE", "4"}, {"OMPI_COMM_WORLD_LOCAL_RANK", "1"}});
  EXPECT_EQ(l.by + std::to_string(l.rank) + std::to_string(l.ranks) + std::to_string(l.local_rank), "mpirun241");
  EXPECT_EQ(l.master_port, 0);
  l = launched(
      {{"RANK", "3"}, {"WORLD_SIZE", "8"}, {"LOCAL_RANK", "2"}, {"MASTER_ADDR", "h"}, {"MASTER_PORT", "29500"}});
  EXPECT_EQ(l.by + std::to_string(l.rank) + std::to_string(l.ranks) + std::to_string(l.local_rank), "torchrun382");
  EXPECT_EQ(l.master_address + std::to_string(l.master_port), "h29500");
  l = launched({{"SLURM_PROCID", "1"}, {"SLURM_STEP_NUM_TASKS", "2"}, {"SLURM_LOCALID", "0"}});
  EXPECT_EQ(l.by + std::to_string(l.rank) + std::to_string(l.ranks) + std::to_string(l.local_rank), "srun120");
  l = launched({{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}});
  EXPECT_EQ(l.by + std::to_string(l.rank) + std::to_string(l.ranks) + std::to_string(l.local_rank), "mpirun12-1");
}

TEST_F(LaunchTest, NonsenseIsRefused) {
  const std::pair<const char*, const char*> address{"MASTER_ADDR", "h"}, port{"MASTER_PORT", "29500"};
  EXPECT_THROW(launched({{"RANK", "0"}, address, port}), UsageError);
  EXPECT_THROW(launched({{"WORLD_SIZE", "2"}, address, port}), UsageError);
  EXPECT_THROW(launched({{"RANK", "2"}, {"WORLD_SIZE", "2"}, address, port}), UsageError);
  EXPECT_THROW(launched({{"RANK", "-1"}, {"WORLD_SIZE", "2"}, address, port}), UsageError);
  EXPECT_THROW(launched({{"RANK", "0"}, {"WORLD_SIZE", "0"}, address, port}), UsageError);
  EXPECT_THROW(launched({{"RANK", "0x1"}, {"WORLD_SIZE", "2"}, address, port}), UsageError);
  EXPECT_THROW(launched({{"RANK", "1"}, {"WORLD_SIZE", "2"}, address}), UsageError);
  EXPECT_THROW(launched({{"RANK", "1"}, {"WORLD_SIZE", "2"}, port}), UsageError);
  EXPECT_THROW(launched({{"RANK", "1"}, {"WORLD_SIZE", "2"}, address, {"MASTER_PORT", "0"}}), UsageError);
  EXPECT_THROW(launched({{"RANK", "1"}, {"WORLD_SIZE", "2"}, address, {"MASTER_PORT", "65536"}}), UsageError);
}

}  // namespace
