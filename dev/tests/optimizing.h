// For tests of the optimizer: every strategy as a typed test, and what the training loop does in several calls in one.
#pragma once
#include <gtest/gtest.h>

#include <string>
#include <tuple>
#include <vector>

#include "kernels/global_norm.cuh"
#include "mcf/adamw.cuh"

// TYPED_TEST_SUITE(Suite, StrategyTypes, StrategyNames): each test once a strategy and mode.
template <class T>
struct AsTypes;
template <class... S>
struct AsTypes<std::tuple<S...>> {
  using type = testing::Types<S...>;
};
using StrategyTypes = AsTypes<AllStrategies>::type;
struct StrategyNames {
  template <class S>
  static std::string GetName(int) {
    std::string name = label<S>();
    for (char& c : name) c = c == ':' || c == '-' ? '_' : c;
    return name;
  }
};

template <class S>
std::unique_ptr<Optimizer<typename S::Theta>> make_optimizer(const typename S::Theta* params, const BlockList& blocks,
                                                             const Part& part, Device& device) {
  return std::make_unique<AdamW<S>>(params, blocks, part, device);
}

template <class floatX>
double norm_of(const floatX* grads, const std::vector<Block>& blocks, Device& device) {
  const BlockList list(blocks, device);
  double norm = 0;
  global_norm(
      &norm, grads, list, Part(0), [](double*) {}, device);
  return norm;
}

// One update; its quality sums where asked for. k.clip does not count: it comes from the norm.
template <class floatX>
QualitySums update(Optimizer<floatX>& optimizer, floatX* theta, const floatX* grads, const AdamWScalars& k,
                   double grad_clip, double norm, bool with_quality, Device& device) {
  optimizer.update(theta, grads, k, grad_clip, &norm, with_quality, device);
  return with_quality ? total(optimizer.quality(device)) : QualitySums();
}
