# Gossamer. `make help` lists what there is. Every target makes .venv itself when it has to.

PYTHON      ?= python3
VENV        := .venv
BIN         := $(VENV)/bin
STAMP       := $(VENV)/.installed
PEERS       := $(VENV)/peers
CONSTRAINTS ?= -c constraints.txt
PIP_ARGS    ?=
ARGS        ?=
SEEDS       ?= 20
INPUTS      ?= 100000
WORKERS     ?= auto
PACKAGES    := gossamer.protocol gossamer.node gossamer.models gossamer.bootstrap

# A swarm starts many processes and the tests some hundred: none has to compile what another one did.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help venv swarm chaos test test-slow lint fmt type sim fuzz bench size clean distclean
.DELETE_ON_ERROR:

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' Makefile

swarm: $(STAMP) ## train with a local swarm of 4 processes; ARGS="--nodes 6" for others
	@$(BIN)/gossamer swarm $(ARGS)

chaos: $(STAMP) ## a local swarm in a storm of faults; ARGS="--nodes 6 --rounds 60" for another
	@$(BIN)/python -m tests.tools.chaos $(ARGS)

test: $(STAMP) ## the tests, without the slow ones; ARGS="-k merge" for some, WORKERS=0 in one process
	@$(BIN)/python -m pytest -q -n $(WORKERS) --maxprocesses 8 --dist worksteal $(ARGS)

test-slow: $(STAMP) ## the slow tests: real processes, faults, whole runs
	@$(BIN)/python -m pytest -q -m slow $(ARGS)

lint: $(STAMP) ## ruff: rules and format
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet . || { echo "format: run 'make fmt'" >&2; exit 1; }

fmt: $(STAMP) ## put the format right, and what ruff can fix safely
	@$(BIN)/ruff check --quiet --fix-only .
	@$(BIN)/ruff format --quiet .

type: $(STAMP) .build/gossamer ## mypy, strict
	@MYPYPATH=.build $(BIN)/mypy $(addprefix -p ,$(PACKAGES)) $(ARGS)

sim: $(STAMP) ## the deterministic simulation; SEEDS=200 for more
	@$(BIN)/python -m tests.sim --seeds $(SEEDS) $(ARGS)

fuzz: $(STAMP) ## hostile bytes for everything that reads any; INPUTS=1000000 for more
	@$(BIN)/python -m tests.fuzz --inputs $(INPUTS) $(ARGS)

bench: $(STAMP) ## the benchmarks
	@$(BIN)/python -m benchmarks $(ARGS)

peers: $(STAMP) $(PEERS)/.installed ## Gossamer beside hivemind, torchft and DDP themselves, in under an hour
	@$(BIN)/python -m benchmarks peers $(ARGS)

size: ## lines and modules a package, words a document
	@$(PYTHON) -m tests.tools.size

venv: $(STAMP) ## make .venv only; PIP_ARGS goes to pip
	@:

# pip speaks only when it fails.
$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/pip || $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "Gossamer needs Python 3.11 or newer; '$(PYTHON)' is not. Try: make PYTHON=python3.12" >&2; exit 1; }
	@echo "installing into $(VENV) (the first time this fetches PyTorch: some minutes)"
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install $(CONSTRAINTS) $(PIP_ARGS) -e '.[dev]' >$(VENV)/install.log 2>&1 || { \
	  cat $(VENV)/install.log >&2; echo "the installation failed, see above" >&2; exit 1; }
	@touch $@

# An environment of its own for the others of `make peers`: no part of the project needs it.
$(PEERS)/.installed: benchmarks/peers/requirements.txt
	@echo "installing hivemind and torchft into $(PEERS)"
	@$(PYTHON) -m venv $(PEERS)
	@$(PEERS)/bin/python -m pip install $(PIP_ARGS) -r $< >$(PEERS)/install.log 2>&1 || { \
	  cat $(PEERS)/install.log >&2; echo "the installation failed, see above" >&2; exit 1; }
	@touch $@

# The packages under their installed names, for mypy, which does not follow an editable install.
.build/gossamer:
	@mkdir -p .build && ln -sfn .. $@

clean: ## remove what builds and tests leave behind; .venv stays
	@rm -rf .build build dist gossamer.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	@find . -name $(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## clean, and .venv too
	@rm -rf $(VENV)
