#!/bin/sh
# Every kernel named in dev/tests/nvcc compiles for the GPUs that the program is built for, without a warning, and keeps
# its variables in registers; the whole program passes nvcc too. Needs nvcc, no GPU. Prints the registers of each kernel,
# the most over the architectures.
#
# Exit status: 0 as it should be, 1 a warning, an error or a spill, 2 no nvcc.
cd "$(dirname "$0")/../.." || exit 2
nvcc=${NVCC:-$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)}
"$nvcc" --version > /dev/null 2>&1 || { echo "nvcc_check.sh: nvcc not found; set NVCC"; exit 2; }
log=$(mktemp) || exit 2
trap 'rm -f "$log"' EXIT

targets=
for arch in 80 90 100 120; do
  "$nvcc" --list-gpu-arch | grep -qx "compute_$arch" && targets="$targets -gencode arch=compute_$arch,code=sm_$arch"
done
compile() {
  "$nvcc" -std=c++20 -O3 --expt-relaxed-constexpr --diag-suppress=1675 -I. -Werror all-warnings \
    -Xcompiler=-Wall,-Wextra,-Werror,-Wno-restrict,-fopenmp,-ffp-contract=off "$@" -o /dev/null \
    >> "$log" 2>&1 || { grep -v 'ptxas info' "$log"; exit 1; }
}
for file in dev/tests/nvcc/*.cu; do
  # shellcheck disable=SC2086
  compile $targets --threads 0 -Xptxas=-v -c "$file"
done
# As far as PTX: what is left to see is nvcc's front end on the host code, which everything else gives to g++.
compile -gencode arch=compute_80,code=compute_80 -DWITH_CUDA -c train_gpt.cu
awk '
  /Compiling entry function/ { split($0, part, "\047"); name = part[2]; arch = part[4] }
  /bytes spill stores/ && !/0 bytes spill stores, 0 bytes spill loads/ { spills++; print "spills in " name ", " arch ":" $0 }
  /Used [0-9]+ registers/ { for (i = 1; i < NF; i++) if ($i == "Used" && $(i + 1) > most[name]) most[name] = $(i + 1) }
  END {
    for (name in most) { kernels++; print most[name], name | "sort -rn | c++filt | cut -c 1-120" }
    close("sort -rn | c++filt | cut -c 1-120")
    print kernels " kernels, " spills + 0 " with spills"
    exit spills > 0 || kernels == 0
  }' "$log"
