# Everything a person or a CI job runs. The environment builds itself on first use and again
# whenever its description changes; nothing outside .venv is touched.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.stamp
# As many processes as cores, each with its share of them; each may hold the default model. Of a
# test that hangs it is printed where it stands.
PYTEST := $(BIN)/python -m pytest --numprocesses auto --maxprocesses 8 --dist worksteal \
	-o faulthandler_timeout=600

.DEFAULT_GOAL := help
.PHONY: help demo results test test-all check fuzz exact serve-test asan env triton clean

help:
	@echo "make demo      plain against drafted decoding with the default pair"
	@echo "make test      check + the quick tests"
	@echo "make test-all  check + every test that this machine can run, then fuzz, exact and serve-test"
	@echo "make check     lint, format, types, imports"
	@echo "make fuzz      random models and requests: the bits of lone plain decoding (10 minutes)"
	@echo "make exact     drafted output equals plain output, bit for bit (slow)"
	@echo "make serve-test  the server with the real pair: clients, identical texts, load (slow)"
	@echo "make asan      the kernels' tests under AddressSanitizer (needs a compiler that has it)"
	@echo "make results   the plots and tables of README and docs, from docs/results and benchmarks"
	@echo "make clean     remove build products and tool caches, keep .venv and the models"

results: env
	$(BIN)/blockdraft bench report docs/results --into README.md --into docs/benchmarks.md
	$(BIN)/blockdraft bench report benchmarks --into docs/benchmarks.md $(foreach page,default-pair-speed rivals concurrency throughput,--into docs/experiments/$(page).md)

demo: env
	$(BIN)/blockdraft bench demo

test: check
	$(PYTEST) -m "not slow and not gpu"

test-all: check triton
	$(PYTEST) --ignore tests/exact --ignore tests/serve --ignore tests/fuzz
	$(MAKE) fuzz exact serve-test

# Ten minutes on two cores; BLOCKDRAFT_FUZZ_SEED and BLOCKDRAFT_FUZZ_SECONDS (of each of its four
# tests) are printed, and may be set. One test at a time goes to a process: they are long.
fuzz: env
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 8 --dist load tests/fuzz

exact: env
	$(PYTEST) tests/exact

serve-test: env
	$(BIN)/python -m pytest tests/serve

# Compiled first without the sanitizer in front, which would slow the compiler down. It must be there
# before Python's own memory; Python itself leaks on purpose.
asan: export BLOCKDRAFT_KERNEL_FLAGS := -O1 -fsanitize=address -fno-omit-frame-pointer
asan: env
	$(BIN)/python -c "from blockdraft.kernels.cpu.build import build; print(build())"
	LD_PRELOAD="$$($${CXX:-c++} -print-file-name=libasan.so)" ASAN_OPTIONS=detect_leaks=0 \
	$(BIN)/python -m pytest -p no:faulthandler tests/unit/kernels/test_kernels.py \
	  tests/unit/kernels/test_products.py tests/unit/kernels/test_int8.py \
	  tests/unit/kernels/test_groups.py \
	  tests/unit/kernels/test_int8_pages.py \
	  tests/unit/kernels/test_recurrence.py tests/parity/test_recurrent_kernels.py \
	  tests/unit/models/test_head_sizes.py tests/unit/models/test_fused.py \
	  tests/unit/models/test_draft_kernels.py tests/unit/kernels/test_backends.py \
	  tests/unit/models/test_packed.py tests/unit/models/test_direct.py \
	  tests/unit/speculate/test_ngram_search.py tests/unit/speculate/test_hydra.py

check: env
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

env: $(STAMP)

# For tests in Triton's interpreter. A torch for CUDA brings its own Triton and pins it, so the version
# is not among the constraints; elsewhere it is one package that asks for no other.
triton: env
	test "$$(uname -sm)" != "Linux x86_64" || $(BIN)/python -c "import triton" 2>/dev/null || \
	  $(BIN)/python -m pip install --quiet --no-deps 'triton==3.9.0'

# The constraints pin torch, so no step can pull another build than the tested one.
$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || { $(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else \
	  "Python 3.11 or newer is needed; name one: make demo PYTHON=python3.12")' && $(PYTHON) -m venv .venv; }
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find src tests tools -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -rf src/*.egg-info $(STAMP)
