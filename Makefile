# Every command that users and CI run. `make demo` and `make test` set up what they need from a bare clone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt
# On all cores, while pip uses one. Some packages bring files of other Python versions, which do not compile.
COMPILE := $(BIN)/python -m compileall -qq -j 0 $(VENV)/lib src || true
export PRISM_OUTPUT ?= runs

.PHONY: setup demo test lint typecheck unit test-slow test-gpu bench bench-gpu docs docs-check dist clean

setup: $(VENV)/ready

$(VENV)/base: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "PRISM needs Python 3.10 or newer (PYTHON=… make)")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) "pip>=25.1"
	$(PIP) --editable ".[lm,rec]"
	$(COMPILE)
	touch $@

$(VENV)/ready: $(VENV)/base
	$(PIP) --group dev
	$(COMPILE)
	touch $@

demo: $(VENV)/base
	$(BIN)/prism demo --output $(PRISM_OUTPUT)/demo

# Types are checked while the tests run: mypy uses one core, and the tests leave parts of two.
test: lint
	$(MAKE) --jobs=2 typecheck unit

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

typecheck: $(VENV)/ready
	$(BIN)/mypy

unit: $(VENV)/ready
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-slow: $(VENV)/ready
	$(BIN)/python -m pytest -m slow

# The tests that need a GPU: kernels, CUDA graphs and synchronisation; `make test` never uses one. Takes minutes, most of them
# for flash-linear-attention, which autotunes its kernels first.
test-gpu: $(VENV)/ready
	PRISM_TEST_GPU=1 $(BIN)/python -m pytest -m "not slow" tests/engine/kernels tests/engine/test_pieces.py \
		tests/engine/networks/test_serial_mlp.py tests/models/test_graphs.py tests/train/test_synchronisation.py \
		tests/train/test_step.py

bench: $(VENV)/ready
	$(BIN)/python benchmarks/cpu.py

# Half an hour on an H200. The comparison needs `pip install flash-linear-attention`.
NETWORKS := prism-2 ttt_mlp-serial ttt_linear ttt_mlp titans
bench-gpu: $(VENV)/ready
	$(BIN)/python benchmarks/gpu.py --peers
	$(BIN)/python benchmarks/throughput.py
	$(BIN)/python benchmarks/throughput.py --models $(NETWORKS) --contexts 2048 --tokens 32768 --graph --decode \
		--output benchmarks/results/throughput-networks.json
	$(BIN)/python benchmarks/tables.py

# The documentation site, in build/site. Only the set-up needs a network: neither the build nor the pages load anything.
docs: $(VENV)/base
	$(PIP) --group docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --clean
	$(BIN)/python docs/tools/check_site.py build/site

# Figures in README and docs that differ from the results in experiments/results and docs/figures.json.
docs-check: $(VENV)/ready
	$(BIN)/python docs/tools/claims.py --check

# A wheel and an sdist, each installed into an empty environment, where the README's first example must run.
dist: $(VENV)/base
	$(PIP) hatchling
	rm -rf dist
	$(BIN)/python -m hatchling build
	$(BIN)/python scripts/check_dist.py dist

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
