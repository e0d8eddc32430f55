// bench_adamw: the optimizer pass of every strategy, by all threads on arrays far larger than the caches, against a
// plain copy of memory; and by one thread on arrays in its L1 cache, against the same arithmetic one element at a time.
// See README.md here for how to read it. Arguments: [elements (default 16777216)] [rounds (default 9)].
#include <benchmark/benchmark.h>

#include <ctime>
#include <functional>
#include <memory>

#include "dev/bench/median.h"
#include "mcf/adamw.cuh"
#include "runtime/random.h"

namespace {

// What is aimed at, in % of the copy's bandwidth.
template <class S>
constexpr int target(bool with_quality) {
  if (S::state_names[S::second_moment] != S::state_names.back()) return with_quality ? 35 : 45;  // v is a pair
  if (!std::is_same_v<std::tuple_element_t<S::second_moment, typename S::States>, bf16>) return 60;
  return with_quality ? 40 : 50;
}

double cpu_seconds(clockid_t clock) {  // a neighbour that takes the core does not count
  timespec t;
  clock_gettime(clock, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

// Uniform in (-size, size), rounded to bf16.
template <class floatX>
void fill(floatX* x, size_t n, double size, uint64_t key) {
#pragma omp parallel for
  for (size_t i = 0; i < n; i++) store(x[i], rn(static_cast<float>(size * (2 * random_uniform(key, i) - 1))));
}

const AdamWScalars scalars = adamw_scalars(3e-4, 0.9, 0.95, 1e-8, 0.1, 1.0, 2.0, 100);

// One strategy with arrays of its own.
struct Case {
  const char* name;
  int bytes;
  std::array<int, 2> targets;
  std::function<void(bool with_quality)> pass;
  std::array<std::vector<double>, 2> seconds;  // [with_quality]
};

template <class S>
Case make_case(size_t n, Device& device) {
  using floatX = typename S::Theta;
  struct Arrays {
    Buffer<floatX> theta, grad;
    std::unique_ptr<BlockList> blocks;
    std::unique_ptr<Optimizer<floatX>> optimizer;
    double norm = 2.0;
  };
  auto arrays = std::make_shared<Arrays>();
  arrays->theta = Buffer<floatX>(device, Memory::weights, n);
  arrays->grad = Buffer<floatX>(device, Memory::gradients, n);
  fill(arrays->theta.data(), n, 0.02, 1);
  fill(arrays->grad.data(), n, 1e-3, 2);
  std::vector<Block> blocks;
  append_blocks(blocks, 0, n, true);
  arrays->blocks = std::make_unique<BlockList>(std::move(blocks), device);
  arrays->optimizer = make_optimizer(S::name, S::mode, arrays->theta.data(), *arrays->blocks, n, device);
  const auto pass = [arrays, &device](bool with_quality) {
    arrays->optimizer->update(arrays->theta, arrays->grad, scalars, 1.0, &arrays->norm, with_quality, device);
  };
  return {S::name, moved_bytes<S>(), {target<S>(false), target<S>(true)}, pass, {}};
}

// memcpy, each thread its part.
void copy(char* to, const char* from, size_t bytes, int threads) {
#pragma omp parallel for schedule(static)
  for (int i = 0; i < threads; i++) {
    const size_t begin = bytes * static_cast<size_t>(i) / static_cast<size_t>(threads);
    const size_t end = bytes * static_cast<size_t>(i + 1) / static_cast<size_t>(threads);
    memcpy(to + begin, from + begin, end - begin);
  }
}

void in_memory(size_t n, int rounds) {
  Device device;
  std::vector<Case> cases;
  [&]<class... S>(std::tuple<S...>*) {
    (cases.push_back(make_case<S>(n, device)), ...);
  }(static_cast<Strategies*>(nullptr));
  const size_t copied = 8 * n;  // about what a pass touches
  const Buffer<char> from(device, Memory::workspace, copied), to(device, Memory::workspace, copied);
  std::vector<double> copies;
  for (int round = 0; round <= rounds; round++)  // the first round warms up
    for (auto& c : cases)
      for (const bool with_quality : {false, true}) {
        double start = cpu_seconds(CLOCK_PROCESS_CPUTIME_ID);
        const auto since_start = [&] { return (cpu_seconds(CLOCK_PROCESS_CPUTIME_ID) - start) / device.threads(); };
        copy(to, from, copied, device.threads());
        if (round) copies.push_back(since_start());
        start = cpu_seconds(CLOCK_PROCESS_CPUTIME_ID);
        c.pass(with_quality);
        if (round) c.seconds[with_quality].push_back(since_start());
      }
  const double copy_speed = 2.0 * static_cast<double>(copied) / median(copies);
  printf("%d threads, %zu elements, medians of %d rounds interleaved with the copy, CPU time / threads\n",
         device.threads(), n, rounds);
  printf("copy (memcpy by all threads, bytes read + written): %.1f GB/s\n\n", copy_speed / 1e9);
  printf("%-14s %8s %9s %11s %7s %10s %8s\n", "precision", "quality", "B/element", "ns/element", "GB/s", "% of copy",
         "target");
  for (const auto& c : cases)
    for (const bool with_quality : {false, true}) {
      const double ns = median(c.seconds[with_quality]) * 1e9 / static_cast<double>(n);
      printf("%-14s %8s %9d %11.2f %7.1f %10.0f %8d\n", c.name, with_quality ? "on" : "off", c.bytes, ns, c.bytes / ns,
             100 * c.bytes / ns / (copy_speed / 1e9), c.targets[with_quality]);
    }
}

// Seconds of CPU time an element, the median over many short runs.
template <class F>
double seconds_per_element(size_t n, F&& run) {
  constexpr int passes = 200, tries = 15;
  std::vector<double> times;
  for (int i = 0; i < tries; i++) {
    const double start = cpu_seconds(CLOCK_THREAD_CPUTIME_ID);
    for (int j = 0; j < passes; j++) run();
    times.push_back((cpu_seconds(CLOCK_THREAD_CPUTIME_ID) - start) / passes / static_cast<double>(n));
  }
  return median(times);
}

template <class S>
void in_cache() {
  constexpr size_t n = 1024;  // 16 KB at most
  using floatX = typename S::Theta;
  alignas(64) static floatX grad[n], theta[n];
  fill(theta, n, 0.02, 1);
  fill(grad, n, 1e-3, 2);
  [&]<class... T>(std::tuple<T...>*) {
    static std::tuple<std::array<T, n>...> states;
    std::apply(
        [&](auto&... state) {
          if constexpr (S::second_moment == 2)
            for (size_t i = 0; i < n; i++) {
              float w = to_float(theta[i]), beside = 0;
              S::set(w, w, beside);
              store_grid(std::get<0>(states)[i], beside);
            }
          const double off =
              seconds_per_element(n, [&] { adamw_block_cpu<S, false>(scalars, 0, grad, theta, n, state.data()...); });
          const double on = seconds_per_element(n, [&] {
            benchmark::DoNotOptimize(adamw_block_cpu<S, true>(scalars, 0, grad, theta, n, state.data()...));
          });

          const double scalar = seconds_per_element(n, [&] {
            for (size_t i = 0; i < n; i++) {
              adamw_element<S>(scalars, random_bits_of(scalars, i), grad[i], theta[i], state[i]...);
              asm volatile("");  // keeps the compiler from vectorising the loop
            }
          });
          printf("%-14s %12.2f %12.2f %12.2f %11.1fx\n", S::name, off * 1e9, on * 1e9, scalar * 1e9, scalar / off);
        },
        states);
  }(static_cast<typename S::States*>(nullptr));
}

}  // namespace

int main(int argc, char** argv) {
  const size_t n = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : size_t{1} << 24;
  const int rounds = argc > 2 ? std::atoi(argv[2]) : 9;
  if (n == 0 || rounds < 1) {
    fprintf(stderr, "usage: bench_adamw [elements] [rounds]\n");
    return 2;
  }
  in_memory(n, rounds);
  printf("\none thread, arrays in its L1 cache, ns an element of CPU time\n");
  printf("%-14s %12s %12s %12s %12s\n", "precision", "quality off", "quality on", "scalar", "speed-up");
  []<class... S>(std::tuple<S...>*) { (in_cache<S>(), ...); }(static_cast<Strategies*>(nullptr));
}
