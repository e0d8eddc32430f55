// Softmax, cross-entropy and their gradient in one pass over a row of logits.
#pragma once
#include <cmath>

#include "kernels/device.h"
#include "kernels/vector_math.h"
#include "mcf/bf16.h"

// losses (rows) = -log softmax(logits)[target], nats. Where write_dlogits: logits (rows,Vp) become
// (softmax - onehot(target)) * dloss, and 0 in the padding V..Vp-1; else they stay. targets (rows), each in [0, V).
template <class floatX>
void fused_classifier(float* losses, floatX* logits, const int* targets, float dloss, int rows, int V, int Vp,
                      bool write_dlogits, Device& device) {
  Scope scope("fused_classifier", device);
#pragma omp parallel for
  for (int r = 0; r < rows; r++) {
    floatX* x = logits + static_cast<size_t>(r) * Vp;
    float max = to_float(x[0]), sum = 0;
#pragma omp simd reduction(max : max)
    for (int v = 0; v < V; v++) max = to_float(x[v]) > max ? to_float(x[v]) : max;
#pragma omp simd reduction(+ : sum)
    for (int v = 0; v < V; v++) sum += exp_poly(to_float(x[v]) - max);
    const int target = targets[r];
    const float logit = to_float(x[target]);
    losses[r] = std::log(sum) + max - logit;
    if (!write_dlogits) continue;
    const float scale = dloss / sum, target_p = exp_poly(logit - max) / sum;
#pragma omp simd
    for (int v = 0; v < V; v++) store(x[v], exp_poly(to_float(x[v]) - max) * scale);
    store(x[target], (target_p - 1.0f) * dloss);
    for (int v = V; v < Vp; v++) store(x[v], 0.0f);
  }
}
