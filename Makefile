# `make demo` and `make test` set up everything they need; only Python 3.11 or newer and make have to be there.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CORE := $(VENV)/.core
DEV := $(VENV)/.dev
DEVICES := $(VENV)/.devices
DOCS := $(VENV)/.docs
# The tests need no GPU, so a PyTorch without CUDA will do, which is far smaller: put it where your pip looks first.
TORCH ?= torch==2.13.0

LOWEST := .venv-lowest
TEST := -m pytest -q -n auto
# The tables of options are those of new versions (Typer named values otherwise); old Arrow loads pandas by itself.
NO_PANDAS := tests/unit/trace/test_vllm.py::TestNoCompiler::test_reading_and_cleaning_load_neither_numba_nor_pandas
NEW_ONLY := --deselect tests/docs/test_cli.py::test_tables_are_those_of_the_commands \
	--deselect tests/contracts/test_contracts.py::test_help_is_as_recorded \
	--deselect '$(NO_PANDAS)[table.csv]' --deselect '$(NO_PANDAS)[table.parquet]'
README := 'tests/docs/test_pages.py::test_a_page_works_from_top_to_bottom[README.md]'
ONE_STEP := tests/unit/profiling/test_libraries.py::TestOpenVino::test_computes_the_same_step \
	tests/unit/profiling/test_libraries.py::TestTorch::test_computes_the_same_step \
	tests/unit/live/test_engines.py::test_everybody_gets_the_product_of_its_row_and_the_engine_sees_buckets_only \
	tests/unit/live/test_triton.py::test_everybody_gets_its_row_and_the_model_sees_buckets_only
export OPENBLAS_NUM_THREADS := 1
.PHONY: demo test check nightly lint types bench docs coverage soak evidence clean \
	smoke-lowest smoke-wheel smoke-devices test-lowest test-wheel test-devices

# Fit, plan, report and validation on steps of an RTX 4090; `latfit demo` measures this machine instead.
DEMO := reports/demo
RTX := sample_traces/rtx4090_llama-3.1-8b
demo: $(CORE)
	mkdir -p $(DEMO)
	$(BIN)/latfit fit $(RTX).parquet --out $(DEMO)/gpu.fit.json --hardware $(DEMO)/hardware.json
	$(BIN)/latfit plan --hardware $(DEMO)/hardware.json --rate 4/s --lengths 1000:250:0.5 --ttft 1s --tpot 50ms --kv-blocks 2588
	$(BIN)/latfit report --hardware $(DEMO)/hardware.json --sla 50ms --out $(DEMO)
	$(BIN)/latfit validate $(DEMO)/gpu.fit.json $(RTX)_requests.csv --kv-blocks 2588
	@echo "Open $(DEMO)/report.html in a browser."

# On two cores, with .venv made: five minutes.
test: $(DEV)
	$(BIN)/python $(TEST)

# Three minutes.
check: lint types bench

# Everything, whole: hours. Lowest versions, devices; attacks and evidence in their short form.
nightly: check
	$(BIN)/python $(TEST) --nightly
	$(MAKE) test-lowest test-wheel test-devices docs
	$(BIN)/python -m benchmarks.evidence --quick --out reports/evidence-quick

# The lowest versions of the core's dependencies that are allowed: the package is imported, README's commands print what
# it shows, JSON has the recorded keys. `test-lowest` runs all tests. Warnings of old versions do not matter.
smoke-lowest: $(LOWEST)/.made
	$(LOWEST)/bin/python $(TEST) -W ignore $(NEW_ONLY) tests/contracts $(README)

test-lowest: $(LOWEST)/.made
	$(LOWEST)/bin/python $(TEST) -W ignore $(NEW_ONLY) tests/unit tests/cli tests/contracts tests/docs tests/property

# The wheel, built from the sdist and installed into an environment of its own: one command; `test-wheel` runs README's
# commands and uvx, and resolves latfit with vLLM's pins.
smoke-wheel: $(DEV)
	$(BIN)/python .ci/wheel.py --smoke

test-wheel: $(DEV)
	$(BIN)/python .ci/wheel.py

# The profiler's devices and the router's engines other than NumPy: OpenVINO, PyTorch, Triton;
# one step of each, or all their tests.
smoke-devices: $(DEVICES)
	OMP_NUM_THREADS=1 $(BIN)/python $(TEST) $(ONE_STEP)

test-devices: $(DEVICES)
	OMP_NUM_THREADS=1 $(BIN)/python $(TEST) tests/unit/profiling tests/cli/test_profile.py tests/unit/live/test_engines.py \
		tests/unit/live/test_triton.py

# How much of the code the tests reach; takes about twice as long as they do.
coverage: $(DEV)
	$(BIN)/python $(TEST) --cov=latfit --cov-report=term:skip-covered

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(DEV)
	$(BIN)/mypy

# A smoke run: each benchmark once, small. Full figures: `python -m benchmarks.NAME`.
bench: $(DEV)
	$(BIN)/python -m benchmarks --smoke

# What the figures of the pages rest on, into docs/evidence/ with date, machine and versions: hours. In parts, and small:
# `python -m benchmarks.evidence --only accuracy`, `--quick`. Measured traces: LATFIT_DATA.
evidence: $(DEV)
	$(BIN)/python -m benchmarks.evidence

# The site, into site/: links that lead nowhere are errors, nothing is loaded from elsewhere, pages fit a telephone.
docs: $(DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	$(BIN)/python .ci/site.py site

# What takes longer than a test run may: hours. Attacks, each of which prints the count of every outcome and ends with an
# error where one is a loss (docs/evidence.md#robustness); accuracy on measured traces (LATFIT_DATA), coverage, speed, scale.
soak: $(DEV)
	$(BIN)/python -m benchmarks.soak.writers --n 100
	$(BIN)/python -m benchmarks.soak.mutants --n 20000
	$(BIN)/python -m benchmarks.soak.options 10000
	$(BIN)/python -m benchmarks.soak.exits --n 500
	$(BIN)/python -m benchmarks.soak.kills --n 300
	$(BIN)/python -m benchmarks.soak.interrupts --n 100
	$(BIN)/python -m benchmarks.soak.live --n 1000000
	$(BIN)/python -m benchmarks.soak.front --n 100000
	$(BIN)/python -m benchmarks.accuracy
	$(BIN)/python -m benchmarks

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "latfit needs Python 3.11 or newer: make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	touch $@

$(CORE): $(VENV)/.made pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	$(BIN)/python .ci/compile.py
	touch $@

$(DEV): $(VENV)/.made pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	$(BIN)/python .ci/compile.py --all
	touch $(CORE) $@

$(DEVICES): $(DEV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check '$(TORCH)'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[amx,torch,triton]'
	touch $@

$(DOCS): $(DEV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[docs]'
	touch $@

$(LOWEST)/.made: pyproject.toml
	$(PYTHON) -m venv $(LOWEST)
	$(PYTHON) .ci/lowest.py > $(LOWEST)/lowest.txt
	$(LOWEST)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]' --constraint $(LOWEST)/lowest.txt
	touch $@

clean:
	rm -rf $(VENV) $(LOWEST) build site src/*.egg-info
