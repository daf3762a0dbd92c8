# `make demo` and `make test` set up everything they need; only Python 3.11 or newer and make have to be there.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CORE := $(VENV)/.core
DEV := $(VENV)/.dev

.PHONY: demo test check lint types bench soak clean

demo: $(CORE)
	$(BIN)/latfit demo --out reports/demo

test: $(DEV)
	$(BIN)/python -m pytest -q -n auto

check: lint types bench

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(DEV)
	$(BIN)/mypy

# A smoke run: each benchmark once, small. Full figures: `python -m benchmarks.NAME`.
bench: $(DEV)
	$(BIN)/python -m benchmarks --smoke

# What takes longer than a test run may: accuracy on measured traces (LATFIT_DATA), coverage, speed, scale. See docs.
soak: $(DEV)
	$(BIN)/python -m benchmarks.accuracy
	$(BIN)/python -m benchmarks

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "latfit needs Python 3.11 or newer: make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	touch $@

$(CORE): $(VENV)/.made pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	touch $@

$(DEV): $(VENV)/.made pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $(CORE) $@

clean:
	rm -rf $(VENV) build src/*.egg-info
