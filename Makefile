# `make demo` and `make test` are each the first and only command needed on a fresh clone.
PYTHON ?= python3
# 2.13.0 is the version the CPU checks run on. On a machine with its own torch wheel: make TORCH='torch==2.11.0' ...
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test check rewritten unit gpu night clean

demo: $(STAMP)
	$(BIN)/dflash demo

test: $(STAMP)
	$(MAKE) --jobs 2 check rewritten
	$(MAKE) unit

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Keep pytest's rewritten asserts, also where the environment forbids bytecode: without them every worker rewrites all
# tests for itself, 28 s instead of 14 each.
unit rewritten: export PYTHONDONTWRITEBYTECODE :=

rewritten: $(STAMP)
	$(BIN)/python -m pytest --collect-only -qq > /dev/null

# One thread each: two busy OpenMP pools on two cores are slower than one. Three workers, since many tests wait for
# processes of their own; a fourth only makes them wait for each other.
unit: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist worksteal

# On a machine with CUDA; the first compile of a fresh machine can take minutes.
gpu: $(STAMP)
	$(BIN)/python -m pytest -m gpu --durations 0

# A training under tmux is killed with all that lives, then asked what happened; some minutes on two cores.
night: $(STAMP)
	$(BIN)/python examples/founding_night.py

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python >= 3.11 is needed, $(PYTHON) is " + sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet '$(TORCH)'
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache build *.egg-info
