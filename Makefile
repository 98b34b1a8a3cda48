# The commands of the project. `make train` and `make test` work from an empty checkout.
PYTHON ?=
PRESET ?= release
RANKS ?= 4
CONFIG ?= configs/small.toml
ARGS ?=
export OMP_NUM_THREADS ?= 1

.PHONY: help setup build train test test-gpu sanitize bench-comm bench-cpu bench-gpu bench-scale schedule format clean
help:
	@echo 'make train       train a small Llama on real text over $(RANKS) ranks   (TEXT=path, RANKS=n, ARGS="--train.steps 100")'
	@echo 'make test        build and run every test'
	@echo 'make sanitize    the unit and thread-rank tests under ASan+UBSan and TSan'
	@echo 'make bench-comm  gather and reduce over 4 processes, beside gloo'
	@echo 'make bench-cpu   the small Llama over 4 processes, beside FSDP2'
	@echo 'make test-gpu    the tests that need GPUs, on the GPUs of this machine'
	@echo 'make bench-gpu   the large Llama over 2 GPUs, beside FSDP2 and the compute floor'
	@echo 'make bench-scale  the same on 2, 4 and 8 GPUs, as far as there are so many'
	@echo 'make schedule    draws docs/schedule/*.svg from what the lanes are given now'
	@echo 'make build       PRESET=release|dev|asan|tsan        make format   clang-format in place'
	@echo 'PYTHON=path      an interpreter that already has torch 2.11'

setup:
	@PYTHON='$(PYTHON)' tools/setup.sh

build: setup
	@tools/build.sh $(PRESET)

train: setup
	@tools/build.sh $(PRESET) fsdpp-cli
	@tools/train.sh $(PRESET) $(RANKS) $(CONFIG) '$(TEXT)' $(ARGS)

test: setup
	@tools/build.sh $(PRESET)
	@.venv/bin/python tools/test.py --preset $(PRESET) $(ARGS)

sanitize: setup
	@.venv/bin/python tools/sanitize.py

bench-comm: setup
	@tools/build.sh $(PRESET) bench_comm
	@.venv/bin/python benchmarks/bench_comm.py --preset $(PRESET) $(ARGS)

bench-cpu: setup
	@tools/build.sh $(PRESET) fsdpp-cli
	@.venv/bin/python benchmarks/bench_cpu.py --preset $(PRESET) $(ARGS)

test-gpu: setup
	@tools/build.sh $(PRESET)
	@.venv/bin/python tools/test_gpu.py --preset $(PRESET) $(ARGS)

bench-gpu: setup
	@tools/build.sh $(PRESET) bench_gpu
	@.venv/bin/python benchmarks/bench_gpu.py --preset $(PRESET) $(ARGS)

bench-scale: setup
	@tools/build.sh $(PRESET) bench_gpu
	@.venv/bin/python benchmarks/bench_scale.py --preset $(PRESET) $(ARGS)

schedule: setup
	@tools/build.sh $(PRESET) schedule_trace
	@rm -rf build/schedule
	@build/$(PRESET)/tests/dist/schedule_trace build/schedule
	@.venv/bin/python tools/draw_schedule.py build/schedule docs/schedule

format: setup
	@. build/tools.env && git ls-files -co --exclude-standard '*.h' '*.cpp' '*.cu' | xargs $$CLANG_FORMAT -i

clean:
	rm -rf build
