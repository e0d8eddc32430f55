#!/bin/sh
# The optimizer's arithmetic as nvcc writes it: every fp32 operation of mcf/ is one IEEE operation. In its PTX each add,
# sub, mul, div and sqrt of floats says .rn (without, ptxas may fuse it with its neighbour), none is fused, none flushes
# subnormals (.ftz) or is approximate, and none is done in bf16. Needs nvcc, no GPU. The sums of quality are double and
# may be fused: they are not compared bit for bit.
#
#   ptx_check.sh [further nvcc options, such as --use_fast_math, which must make it fail]
#
# Exit status: 0 as it should be, 1 it is not, 2 no nvcc or it fails.
cd "$(dirname "$0")/../.." || exit 2
nvcc=${NVCC:-$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)}
"$nvcc" --version > /dev/null 2>&1 || { echo "ptx_check.sh: nvcc not found; set NVCC"; exit 2; }
ptx=$(mktemp) || exit 2
trap 'rm -f "$ptx"' EXIT

bad=0
for arch in 80 90 100 120; do
  "$nvcc" --list-gpu-arch | grep -qx "compute_$arch" || continue
  "$nvcc" -std=c++20 -O3 --expt-relaxed-constexpr --diag-suppress=1675 -Xcompiler=-fopenmp,-ffp-contract=off -I. \
    -ptx -arch="compute_$arch" "$@" dev/tests/nvcc/mcf.cu -o "$ptx" || exit 2
  found=$(grep -E '^\s+(@%p[0-9]+ )?(add|sub|mul|mad|div|sqrt|rcp|fma)[.a-z0-9]*\.f32(x2)?\b|\.ftz|\.approx|(add|sub|mul|fma)[.a-z0-9]*\.bf16' "$ptx" |
          grep -vE '(add|sub|mul|div|sqrt)\.rn\.f32(x2)?\b' | sed 's/\s\s*/ /g' | sort | uniq -c | sort -rn)
  count=$(grep -cE '(add|sub|mul|div|sqrt)\.rn\.f32(x2)?\b' "$ptx")
  kernels=$(grep -c '^\.visible \.entry' "$ptx")
  echo "sm_$arch: $kernels kernels, $count fp32 operations with .rn, others: $(printf '%s' "$found" | grep -c .)"
  [ -z "$found" ] && [ "$count" -gt 0 ] || { printf '%s\n' "$found" | head -n 20; bad=1; }
done
exit $bad
