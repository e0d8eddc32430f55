// Every layer's entry point on a GPU against the CPU, on the same inputs: gpu_test [--small]. Needs no test library.
//
// Prints a line for each case, and exits with 1 if one failed, with 3 if there is no GPU. Each case runs twice on the
// GPU, which must give the same bits. --small: one size a kernel, for compute-sanitizer, which slows kernels down a
// hundredfold. The emulated GPU (dev/tests/simt) runs this file too.
//
// Tolerances stand beside the cases: what another order of additions, fused multiply-adds and the GPU's own exponential
// can amount to. A bf16 result may also land on the neighbouring value, where the two straddle a rounding boundary.
#include <cstdio>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "kernels/attention.cuh"
#include "kernels/encoder.cuh"
#include "kernels/fused_classifier.cuh"
#include "kernels/gelu.cuh"
#include "kernels/global_norm.cuh"
#include "kernels/layernorm.cuh"
#include "kernels/matmul.cuh"
#include "mcf/adamw.cuh"

namespace {

struct Tolerance {
  double relative = 0, absolute = 0;  // both 0: equal bits
};

// One run of a case on one device: its arrays there, and what to read back.
class Side {
 public:
  struct Output {
    std::string name;
    std::vector<double> values;  // exact for every element type
    Tolerance tolerance;
    bool in_bf16;
  };

  explicit Side(Device& d) : device(d) {}
  Device& device;

  template <class X>
  X* in(const std::vector<X>& values) {
    memory_.emplace_back(device, Memory::workspace, values.size() * sizeof(X));
    X* p = reinterpret_cast<X*>(memory_.back().data());
    device.upload(p, values.data(), values.size());
    return p;
  }
  // An array that the layer adds to.
  template <class X>
  X* in_out(const char* name, const std::vector<X>& values, Tolerance tolerance) {
    X* p = in(values);
    read_back(name, p, values.size(), tolerance);
    return p;
  }
  // An array that the layer fills: NaN before, so that an element left out shows.
  template <class X>
  X* out(const char* name, size_t n, Tolerance tolerance) {
    std::vector<X> nan(n);
    memset(static_cast<void*>(nan.data()), 0xff, n * sizeof(X));
    return in_out(name, nan, tolerance);
  }
  template <class X>
  void read_back(const char* name, const X* p, size_t n, Tolerance tolerance) {
    reads_.push_back([=, this] {
      std::vector<X> values(n);
      device.download(values.data(), p, n);
      Output o{name, std::vector<double>(n), tolerance, std::is_same_v<X, bf16>};
      for (size_t i = 0; i < n; i++)
        if constexpr (std::is_same_v<X, double>)
          o.values[i] = values[i];
        else
          o.values[i] = static_cast<double>(to_float(values[i]));
      return o;
    });
  }
  std::vector<Output> outputs() const {
    std::vector<Output> all;
    for (const auto& read : reads_) all.push_back(read());
    return all;
  }

 private:
  std::vector<Buffer<char>> memory_;
  std::vector<std::function<Output()>> reads_;
};

class Suite {
 public:
  Suite(Device& cpu, Device& gpu) : cpu_(cpu), gpu_(gpu) {}

  // run(Side&) on both devices.
  template <class Run>
  void check(const std::string& name, Run&& run) {
    cases_++;
    try {
      const auto on = [&](Device& device) {
        Side side(device);
        run(side);
        return side.outputs();
      };
      const auto want = on(cpu_), got = on(gpu_), again = on(gpu_);
      std::string wrong;
      double worst = 0;  // in units of the tolerance
      for (size_t o = 0; o < want.size(); o++) {
        size_t count = 0, first = 0, unequal = 0;
        for (size_t i = 0; i < want[o].values.size(); i++) {
          const double w = want[o].values[i], g = got[o].values[i], r = again[o].values[i];
          unequal += memcmp(&g, &r, sizeof g) != 0;
          if (memcmp(&g, &w, sizeof g) == 0 || g == w) continue;
          const Tolerance t = want[o].tolerance;
          const bool exact = t.relative == 0 && t.absolute == 0;
          const double step = want[o].in_bf16 && !exact ? 0x1p-7 : 0;
          const double allowed = (t.relative + step) * std::fabs(w) + t.absolute;
          const double error = std::fabs(g - w);
          if (error <= allowed)
            worst = std::max(worst, error / allowed);
          else if (!count++)
            first = i;
        }
        if (count)
          wrong += strf("  %s[%zu] is %.9g, the CPU's is %.9g; %zu of %zu differ\n", want[o].name.c_str(), first,
                        got[o].values[first], want[o].values[first], count, want[o].values.size());
        if (unequal) wrong += strf("  %s: %zu elements change from run to run\n", want[o].name.c_str(), unequal);
      }
      report(name, wrong, worst);
    } catch (const std::exception& e) {
      report(name, strf("  %s\n", e.what()), 0);
    }
  }
  void report(const std::string& name, const std::string& wrong, double worst) {
    failed_ += !wrong.empty();
    printf("%-6s %-64s %s\n%s", wrong.empty() ? "ok" : "FAILED", name.c_str(),
           worst > 0 ? strf("%3.0f %% of the tolerance", 100 * worst).c_str() : "", wrong.c_str());
    fflush(stdout);
  }
  int finish() const {
    printf("%d cases, %d failed\n", cases_, failed_);
    return failed_ ? 1 : 0;
  }

 private:
  Device &cpu_, &gpu_;
  int cases_ = 0, failed_ = 0;
};

template <class X>
std::vector<X> normal(size_t n, unsigned seed, float deviation = 1.0f) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> distribution(0, deviation);
  std::vector<X> x(n);
  for (X& v : x) store(v, distribution(generator));
  return x;
}
std::vector<int> ids(size_t n, int limit, unsigned seed) {
  std::mt19937 generator(seed);
  std::vector<int> x(n);
  for (int& v : x) v = static_cast<int>(generator() % static_cast<unsigned>(limit));
  return x;
}
size_t product(std::initializer_list<int> sizes) {
  size_t n = 1;
  for (const int s : sizes) n *= static_cast<size_t>(s);
  return n;
}
template <class X>
const char* type_name() { return std::is_same_v<X, bf16> ? "bf16" : "fp32"; }

template <class X>
void encoder(Suite& suite, int B, int T, int C, int V) {
  const size_t BT = product({B, T});
  suite.check(strf("encoder %s B=%d T=%d C=%d", type_name<X>(), B, T, C), [&](Side& s) {
    const auto tokens = ids(BT, V, 1);
    const auto n = BT * static_cast<size_t>(C);
    X* out = s.out<X>("out", n, {});  // one addition
    encoder_forward(out, s.in(tokens), s.in(normal<X>(product({V, C}), 2)), s.in(normal<X>(product({T, C}), 3)), B, T,
                    C, s.device);
    // A token's positions are summed in runs of 64: up to BT additions of terms of size up to 4 in another order.
    float* dwte = s.in_out("dwte", normal<float>(product({V, C}), 4), {0, 1e-6 * static_cast<double>(BT)});
    X* dwpe = s.in_out("dwpe", normal<X>(product({T, C}), 5), {});  // over B in order
    encoder_backward(dwte, dwpe, s.in(normal<X>(n, 6)), tokens.data(), B, T, C, V, s.device);
    X* dwte_stored = s.in_out("dwte, stored", normal<X>(product({V, C}), 7), {});
    add_embedding_gradient(dwte_stored, s.in(normal<float>(product({V, C}), 8)), product({V, C}), s.device);
  });
}

template <class X>
void layernorm(Suite& suite, int rows, int C) {
  const size_t n = product({rows, C}), R = static_cast<size_t>(rows), channels = static_cast<size_t>(C);
  suite.check(strf("layernorm %s rows=%d C=%d", type_name<X>(), rows, C), [&](Side& s) {
    // Sums of C terms of size 1 to 2 in two orders, over C. rstd of one channel is 316, so its results are larger.
    const double size = C == 1 ? 300 : 1;
    const Tolerance out{1e-5, 2e-5}, mean{0, 1e-5}, rstd{1e-5, 0};
    const auto weight = normal<X>(channels, 2), bias = normal<X>(channels, 3), x = normal<X>(n, 1), y = normal<X>(n, 4);
    layernorm_forward(s.out<X>("out", n, out), s.out<float>("mean", R, mean), s.out<float>("rstd", R, rstd), s.in(x),
                      s.in(weight), s.in(bias), 1, rows, C, s.device);
    X* residual = s.out<X>("residual", n, {});
    residual_layernorm_forward(residual, s.out<X>("out of the sum", n, out), s.out<float>("its mean", R, mean),
                               s.out<float>("its rstd", R, rstd), s.in(x), s.in(y), s.in(weight), s.in(bias), 1, rows,
                               C, s.device);
    // Backward gets the CPU's statistics on both sides.
    std::vector<float> mu(R), rs(R);
    std::vector<X> ignored(n);
    layernorm_forward_cpu(ignored.data(), mu.data(), rs.data(), x.data(), weight.data(), bias.data(), 1, rows, C);
    X* dinp = s.in_out("dinp", normal<X>(n, 5), {1e-5, size * 2e-5});
    X* dweight = s.in_out("dweight", normal<X>(channels, 6), {0, size * rows * 2e-6});
    X* dbias = s.in_out("dbias", normal<X>(channels, 7), {0, rows * 2e-6});
    layernorm_backward(dinp, dweight, dbias, s.in(y), s.in(x), s.in(weight), s.in(mu), s.in(rs), 1, rows, C, s.device);
  });
}

template <class X>
void matmul_layer(Suite& suite, int rows, int C, int OC) {
  suite.check(strf("matmul %s rows=%d C=%d OC=%d", type_name<X>(), rows, C, OC), [&](Side& s) {
    // A sum of K products of size about 1, off by K roundings of a running sum of size sqrt(K) at worst; tensor cores
    // cut the terms that they align with the largest, at 2^-24 of it or above.
    const auto sum = [](int K) { return Tolerance{1e-5, 2e-7 * K * std::sqrt(K) / 8 + 1e-5}; };
    const size_t O = static_cast<size_t>(OC);
    const auto inp = normal<X>(product({rows, C}), 1), weight = normal<X>(product({OC, C}), 2);
    const auto dout = normal<X>(product({rows, OC}), 3);
    matmul_forward(s.out<X>("out", product({rows, OC}), sum(C)), s.in(inp), s.in(weight), s.in(normal<X>(O, 4)), 1,
                   rows, C, OC, s.device);
    const X* no_bias = nullptr;
    matmul_forward(s.out<X>("out without bias", product({rows, OC}), sum(C)), s.in(inp), s.in(weight), no_bias, 1, rows,
                   C, OC, s.device);
    matmul_backward(s.out<X>("dinp", product({rows, C}), sum(OC)),
                    s.in_out("dweight", normal<X>(product({OC, C}), 5), sum(rows)),
                    s.in_out("dbias", normal<X>(O, 6), sum(rows)), s.in(dout), s.in(inp), s.in(weight), 1, rows, C, OC,
                    s.device);
    X* no_dbias = nullptr;  // as for the tied embedding, whose gradient is summed in fp32
    matmul_backward(s.out<X>("dinp again", product({rows, C}), sum(OC)),
                    s.in_out("dweight in fp32", normal<float>(product({OC, C}), 7), sum(rows)), no_dbias, s.in(dout),
                    s.in(inp), s.in(weight), 1, rows, C, OC, s.device);
  });
}

template <class X>
void attention(Suite& suite, int B, int T, int NH, int d) {
  const int C = NH * d;
  const size_t n = product({B, T, C}), stats = product({B, NH, T});
  suite.check(strf("attention %s B=%d T=%d NH=%d d=%d", type_name<X>(), B, T, NH, d), [&](Side& s) {
    // fp32: scores of size up to 6 are off by 1e-6 and P relatively by as much; gradients add up terms of size up to
    // 20. bf16: kernels on tensor cores round P and dS to bf16 where they enter a product, the CPU keeps fp32. Each is
    // off by 2^-9 at most, and these errors are averaged over values of size up to 4 (sqrt(d) times that in dQ and dK,
    // whose scale takes it away again).
    const bool rounded = std::is_same_v<X, bf16>;
    const Tolerance out{1e-5, rounded ? 0x1p-7 : 2e-5}, gradient{1e-4, rounded ? 0x1p-5 : 2e-4};
    const auto qkv = normal<X>(3 * n, 1), dout = normal<X>(n, 2);
    attention_forward(s.out<X>("out", n, out), s.out<float>("lse", stats, {0, 2e-5}), s.in(qkv), B, T, C, NH, s.device);
    // Backward gets what the CPU's forward makes on both sides.
    std::vector<X> o(n);
    std::vector<float> lse(stats);
    Device cpu(s.device.threads());
    attention_forward(o.data(), lse.data(), qkv.data(), B, T, C, NH, cpu);
    attention_backward(s.out<X>("dqkv", 3 * n, gradient), s.in(dout), s.in(o), s.in(lse), s.in(qkv), B, T, C, NH,
                       s.device);
  });
}

template <class X>
void gelu(Suite& suite, size_t n) {
  suite.check(strf("gelu %s n=%zu", type_name<X>(), n), [&](Side& s) {
    // The exponential is off by 4e-6 at most; the slope is a sum of terms of size up to 1 that cancel near -0.75.
    const auto inp = normal<X>(n, 1, 3.0f);
    gelu_forward(s.out<X>("out", n, {4e-6, 1e-30}), s.in(inp), n, s.device);
    gelu_backward(s.in_out("d", normal<X>(n, 2), {4e-6, 4e-6}), s.in(inp), n, s.device);
  });
}

template <class X>
void classifier(Suite& suite, int rows, int V, int Vp) {
  suite.check(strf("classifier %s rows=%d V=%d Vp=%d", type_name<X>(), rows, V, Vp), [&](Side& s) {
    // A sum of V exponentials, each relatively off by 1e-6, and as many additions in another order.
    const size_t R = static_cast<size_t>(rows), n = product({rows, Vp});
    float* losses = s.out<float>("losses", R, {1e-5, 1e-5});
    fused_classifier(losses, s.in_out("dlogits", normal<X>(n, 1, 2.0f), {2e-5, 1e-8}), s.in(ids(R, V, 2)), 0.25f, rows,
                     V, Vp, true, s.device);
    add_losses(s.in_out("sum of losses", std::vector<double>(1, 3.0), {1e-5, 1e-5}), losses, rows, s.device);
  });
}

// Tensors with every tail of a 16-byte access.
std::vector<Block> blocks_of(size_t large, size_t* n) {
  std::vector<Block> blocks;
  *n = 0;
  bool decay = true;
  for (const size_t size : {large, size_t{1}, size_t{2}, size_t{3}, size_t{8}, size_t{77}, size_t{2055}}) {
    append_blocks(blocks, *n, size, decay);
    *n += (size + tensor_alignment - 1) / tensor_alignment * tensor_alignment;
    decay = !decay;
  }
  return blocks;
}

template <class X>
void norm(Suite& suite, size_t large) {
  suite.check(strf("global norm %s, %zu elements", type_name<X>(), large), [&](Side& s) {
    size_t n = 0;
    const BlockList blocks(blocks_of(large, &n), s.device);
    double* result = s.out<double>("norm", 1, {1e-13, 0});  // double sums in another order
    global_norm(result, s.in(normal<X>(n, 1)), blocks, Part(n), [](double*) {}, s.device);
    s.device.synchronize();
  });
}

// Equal bits of weights and states after three steps, the second clipped and the last with a new beta2.
template <class S>
void optimizer(Suite& suite, size_t large, bool with_quality) {
  using X = typename S::Theta;
  suite.check(strf("adamw %s, %zu elements, quality %s: equal bits", label<S>().c_str(), large, with_quality ? "on" : "off"),
              [&](Side& s) {
    size_t n = 0;
    const BlockList blocks(blocks_of(large, &n), s.device);
    X* theta = s.in_out("theta", normal<X>(n, 1, .02f), {});
    const auto adamw = std::make_unique<AdamW<S>>(theta, blocks, Part(n), s.device);
    for (int t = 1; t <= 3; t++) {
      auto grads = normal<X>(n, static_cast<unsigned>(10 + t), 1e-3f);
      for (size_t i = 0; i < n; i++) {  // many magnitudes, and 0
        if (i % 5 == 0) store(grads[i], 0.0f);
        if (i % 7 == 0) store(grads[i], to_float(grads[i]) * 1e-6f);
        if (i % 11 == 0) store(grads[i], to_float(grads[i]) * 1e5f);
      }
      const double* norm = s.in(std::vector<double>(1, t == 2 ? 2.5 : .5));
      adamw->update(theta, s.in(grads), adamw_scalars(1e-3, .9, t == 3 ? .999 : .95, 1e-8, .1, 1, 0, t), 1, norm,
                    with_quality, s.device);
      if (!with_quality) continue;
      const QualitySums q = total(adamw->quality(s.device));
      // Sums of n doubles in another order. ue is bounded by uu and ee.
      s.read_back("uu, ee", s.in(std::vector<double>{q.uu, q.ee, q.ee_hi}), 3, {1e-11, 0});
      s.read_back("ue", s.in(std::vector<double>{q.ue, q.ue_hi}), 2, {1e-11, 1e-11 * std::sqrt(q.uu * q.ee)});
      s.read_back("counts", s.in(std::vector<double>{double(q.intended), double(q.lost), double(q.lost_hi),
                                                     double(q.fed), double(q.stale_v)}), 5, {});
    }
    // The states die with the optimizer, so they are copied.
    for (const auto& state : adamw->states()) {
      std::vector<int8_t> bytes(n * state.element_bytes);
      s.device.download(bytes.data(), static_cast<const int8_t*>(state.data), bytes.size());
      s.read_back(state.name, s.in(bytes), bytes.size(), {});
    }
    s.device.synchronize();
  });
}

template <class X>
void layers(Suite& suite, bool small) {
  if (small) {
    encoder<X>(suite, 2, 70, 33, 3), encoder<X>(suite, 2, 7, 48, 30);
    layernorm<X>(suite, 5, 48), layernorm<X>(suite, 5, 33);
    matmul_layer<X>(suite, 9, 48, 40);
    gelu<X>(suite, 2055);
    classifier<X>(suite, 3, 257, 384);
    norm<X>(suite, block_elements + 1);
    for (const int d : {32, 64, 80, 96, 128, 48}) attention<X>(suite, 1, 67, 1, d);
    return;
  }
  for (const int C : {1, 7, 33, 48, 384, 768}) encoder<X>(suite, 3, 67, C, 5), encoder<X>(suite, 3, 67, C, 300);
  for (const int C : {1, 33, 48, 384, 768, 1600, 1601, 2056, 4097}) layernorm<X>(suite, 13, C);
  layernorm<X>(suite, 1, 48), layernorm<X>(suite, 2053, 384);
  for (const int C : {1, 33, 48, 264}) matmul_layer<X>(suite, 131, C, 72), matmul_layer<X>(suite, 40, C, 35);
  matmul_layer<X>(suite, 257, 384, 1152);
  for (const size_t n : {1, 7, 8, 9, 2047, 2055, 1000003}) gelu<X>(suite, n);
  classifier<X>(suite, 5, 1, 128), classifier<X>(suite, 5, 257, 384), classifier<X>(suite, 5, 1001, 1001);
  classifier<X>(suite, 33, 50257, 50304);
  norm<X>(suite, 1), norm<X>(suite, 3 * block_elements + 1), norm<X>(suite, 5000001);
  for (const int d : {32, 64, 80, 96, 128, 48})
    for (const int T : {1, 17, 64, 65, 131, 300}) attention<X>(suite, 2, T, 2, d);
  attention<X>(suite, 1, 33, 3, 1), attention<X>(suite, 1, 70, 1, 200);
}

template <class... S>
void optimizers(Suite& suite, bool small, std::tuple<S...>*) {
  for (const size_t n : {block_elements + 1, small ? size_t{9} : 40 * block_elements + 7})
    for (const bool with_quality : {false, true}) (optimizer<S>(suite, n, with_quality), ...);
}

}  // namespace

int main(int argc, char** argv) {
  const bool small = argc == 2 && std::string(argv[1]) == "--small";
  if (argc > 2 || (argc == 2 && !small)) {
    fprintf(stderr, "usage: gpu_test [--small]\n");
    return 2;
  }
  try {
    std::string why_not;
    if (!Device::gpus(why_not)) {
      fprintf(stderr, "gpu_test: %s\n", why_not.c_str());
      return 3;
    }
    Device cpu, gpu(DeviceKind::cuda, 0, 0);
    printf("gpu_test on %s\n", gpu.properties().name);
    Suite suite(cpu, gpu);
    optimizers(suite, small, static_cast<AllStrategies*>(nullptr));
    layers<float>(suite, small);
    layers<bf16>(suite, small);
    return suite.finish();
  } catch (const std::exception& e) {
    fprintf(stderr, "gpu_test: %s\n", e.what());
    return 1;
  }
}
