# Short commands. They call CMake; `make help` lists them.
#
#   CUDA=0                  the CPU program, in a build folder of its own (build-cpu). By default `make` builds for both
#                           devices where nvcc is found; tests and quickstart only where there is a GPU as well
#   JOBS=n                  compile and test with n processes (default: one a core)
#   QUICKSTART_STEPS=n      make quickstart trains n steps (default: about two minutes on 2 cores)
#   COMPARE_STEPS=n         make compare trains each run for n steps (default: all in about six minutes on 2 cores)
#   FUZZ_SECONDS=n          make check-fuzz runs each fuzzer for n seconds (default: 30)
#   FLAGS="-DWITH_ONEDNN=OFF ..."  further options for CMake

CUDA ?= auto
GPU := $(shell nvidia-smi -L 2> /dev/null)
ifneq ($(filter quickstart compare test tests check check-mutations check-report check-faults check-transformers bench,$(MAKECMDGOALS)),)
ifeq ($(GPU),)
CUDA := 0
endif
endif
JOBS ?= $(shell nproc)
QUICKSTART_STEPS ?=
COMPARE_STEPS ?= 200
COMPARED := fp32_master,fp32,fp32_optim,bf16,bf16_sr,bf16_int8,bf16_kahan,bf16_rem16,collage_light,collage_plus
FUZZ_SECONDS ?= 30
FLAGS ?=
BUILD := $(if $(filter 0,$(CUDA)),build-cpu,build)
WITH_CUDA := $(if $(filter 0,$(CUDA)),OFF,AUTO)
ASAN := build-asan
TSAN := build-tsan
COMMA := ,

# Packages that scripts/setup.sh --prefix=.deps unpacked.
ifneq ($(wildcard .deps/usr),)
DEPS := $(CURDIR)/.deps
export PATH := $(PATH):$(DEPS)/usr/bin
export LD_LIBRARY_PATH := $(LD_LIBRARY_PATH):$(wildcard $(DEPS)/usr/lib/*-linux-gnu*)
endif

# $(call CONFIGURE,folder,options): prints the one line that says what will be built, or all of a failure.
define CONFIGURE
	@mkdir -p $(1)
	@cmake -S . -B $(1) $(if $(DEPS),-DDEPS=$(DEPS)) $(2) $(FLAGS) > $(1)/configure.log 2>&1 || \
	  { cat $(1)/configure.log; exit 1; }
	@grep '^-- train_gpt' $(1)/configure.log
endef

# CMake's own make takes its number of processes from --parallel alone, and prints as one that was not called by make.
COMPILE = env -u MAKEFLAGS -u MAKELEVEL cmake --build

# Tests run side by side: threads that wait must not keep the core. Only the sum and what failed is shown.
define RUN_TESTS
	@echo "running the tests of $(1)$(if $(2), ($(2))); all output goes to $(1)/tests.log"
	@OMP_WAIT_POLICY=passive ctest --test-dir $(1) --parallel $(JOBS) --output-on-failure --no-tests=error \
	  $(or $(2),-LE 'races|mutation|faults') > $(1)/tests.log 2>&1 || \
	  { grep -vE ' Passed +[0-9.]+ sec$$|^ +Start +[0-9]+:' $(1)/tests.log | tail -n 200; exit 1; }
	@grep -E 'tests passed|Total Test time' $(1)/tests.log
endef

.PHONY: all setup configure tests test check check-sanitizers check-races check-mutations check-nvcc check-oracle \
        check-report check-faults check-fuzz check-transformers bench quickstart compare clean help
.NOTPARALLEL:
.DEFAULT_GOAL := all

all: configure
	@$(COMPILE) $(BUILD) --parallel $(JOBS) --target train_gpt
	@ln -sf $(BUILD)/train_gpt train_gpt

configure:
	$(call CONFIGURE,$(BUILD),-DWITH_BENCH=OFF -DWITH_CUDA=$(WITH_CUDA))

setup:
	@scripts/setup.sh $(if $(DEPS),--prefix=.deps)

tests: setup configure
	@$(COMPILE) $(BUILD) --parallel $(JOBS)
	@ln -sf $(BUILD)/train_gpt train_gpt

test: tests
	$(call RUN_TESTS,$(BUILD))

# The tests under sanitizers; races between CUDA threads (ThreadSanitizer); their barriers dropped one by one; what nvcc
# makes of the kernels; the golden files made anew.
check: setup check-sanitizers check-races check-mutations check-nvcc check-oracle check-report check-faults check-fuzz \
       check-transformers

check-sanitizers:
	$(call CONFIGURE,$(ASAN),-DSANITIZE=address$(COMMA)undefined -DCMAKE_BUILD_TYPE=RelWithDebInfo -DCMAKE_CXX_FLAGS_RELWITHDEBINFO="-O1 -g1" -DWITH_CUDA=OFF)
	@$(COMPILE) $(ASAN) --parallel $(JOBS)
	$(call RUN_TESTS,$(ASAN),-LE 'races|mutation|faults|scripts')

check-races:
	$(call CONFIGURE,$(TSAN),-DWITH_TSAN=ON -DWITH_CUDA=OFF)
	@$(COMPILE) $(TSAN) --parallel $(JOBS) --target simt_race_tests kernel_race_tests
	$(call RUN_TESTS,$(TSAN),-L races)

check-mutations: configure
	@$(COMPILE) $(BUILD) --parallel $(JOBS) --target simt_tests kernel_tests
	$(call RUN_TESTS,$(BUILD),-L mutation)

# Runs that are killed, starved of disk and told to stop, and go on; FAULTS_KILLS=200 is the long version.
check-faults: configure
	@$(COMPILE) $(BUILD) --parallel $(JOBS) --target train_gpt fault_shim
	$(call RUN_TESTS,$(BUILD),-L faults)

# Each reader of files that may hold anything, for FUZZ_SECONDS.
check-fuzz:
	@scripts/setup.sh --fuzz $(if $(DEPS),--prefix=.deps)
	@dev/tests/fuzz_check.sh $(FUZZ_SECONDS)

# Models go to transformers and come back, bit for bit; the library is installed into the build folder.
check-transformers: configure
	@scripts/setup.sh --oracle $(if $(DEPS),--prefix=.deps)
	@$(COMPILE) $(BUILD) --parallel $(JOBS) --target train_gpt logits
	@dev/tests/transformers_check.sh $(BUILD)

# Without nvcc the kernels go unchecked: an error where that would go unnoticed (CI), a line elsewhere.
check-nvcc:
	@if command -v nvcc > /dev/null || [ -x /usr/local/cuda/bin/nvcc ]; then \
	  dev/tests/nvcc_check.sh && dev/tests/ptx_check.sh; \
	elif [ -n "$$CI" ]; then echo "make check: nvcc not found" >&2; exit 1; \
	else echo "nvcc not found: the CUDA kernels are not compiled"; fi

check-oracle:
	@scripts/setup.sh --oracle $(if $(DEPS),--prefix=.deps)
	@dev/tests/oracle/regenerate.sh --check

# Without a browser the pages go unchecked: report_test.py says so, and fails where CI is set.
check-report: all
	@scripts/setup.sh --browser $(if $(DEPS),--prefix=.deps)
	@OMP_WAIT_POLICY=passive python3 dev/tests/report_test.py

bench: setup
	$(call CONFIGURE,$(BUILD),-DWITH_BENCH=ON -DWITH_CUDA=$(WITH_CUDA))
	@$(COMPILE) $(BUILD) --parallel $(JOBS)
	@for BENCH in $(BUILD)/bench_*; do [ ! -x $$BENCH ] || { echo "== $$BENCH"; $$BENCH || exit 1; }; done

quickstart: setup all
	@scripts/quickstart.sh $(QUICKSTART_STEPS)

# Every precision with three seeds, so that a difference comes with an interval. At beta2 = 0.999 the second moment
# needs more digits than bf16 has. Passive: on a machine that does other things as well, threads that spin while they
# wait made a run take 71 s in place of 22.
compare: setup all
	@python3 scripts/prepare_data.py kjv
	@OMP_WAIT_POLICY=passive scripts/compare.py --precisions=$(COMPARED) --seeds=1,2,3 --out=runs/compare -- \
	  --layers=4 --channels=128 --heads=4 --seq-len=64 --batch-size=8 --steps=$(COMPARE_STEPS) --lr=1e-3 \
	  --warmup-steps=10 --beta2=0.999 --val-every=25 --val-sequences=64 --edq-every=2 --shadow=1024

clean:
	rm -rf build build-cpu build-fuzz $(ASAN) $(TSAN) train_gpt

help:
	@echo "make              build ./train_gpt"
	@echo "make quickstart   install packages, build, prepare English text, train a small GPT for two minutes"
	@echo "make compare      the same with every precision and three seeds, six minutes: a table and a report"
	@echo "make test         install packages, build, run all tests"
	@echo "make check        all tests under sanitizers, races between CUDA threads, each of their barriers dropped"
	@echo "                  in turn, nvcc's view of the kernels, golden files, the report in a browser; parts:"
	@echo "                  check-sanitizers, -races, -mutations, -nvcc, -oracle, -report, -faults, -fuzz,"
	@echo "                  -transformers"
	@echo "make bench        benchmarks"
	@echo "make setup        install packages only; without root: scripts/setup.sh --prefix=.deps"
	@echo "make clean        remove what was built; data/ and runs/ stay"
	@echo "Variables: CUDA=0, JOBS=n, QUICKSTART_STEPS=n, COMPARE_STEPS=n, FUZZ_SECONDS=n, FLAGS=... (see the top of the Makefile)"
