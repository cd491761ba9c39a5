# Two commands for everybody: `make demo` and `make test`. The rest is for people who change the code.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
DEMO_DIR := .cache/coresample-demo
LOCKS ?=
PYTEST_ARGS ?=
JOBS ?=
SOAK_ARGS ?= --minutes 45
VERSIONS ?= 0.16.0 0.20.0 0.26.0 0.28.0 0.30.0 0.32.0
COMPAT_ARGS ?=
FAULTS ?= full
FAMILY ?=
RESUME ?=
# Whole files to each of JOBS processes, since a file's tests share engines and servers.
# An engine has threads for every CPU: two of them at once are slower than one after the other.
ALONE := engine or e2e or system or slow
PARALLEL := $(if $(JOBS),-n $(JOBS) --dist loadfile --no-loadscope-reorder)

.PHONY: help demo test unit check format bench compat faults soak lock lock-check audit env env-demo clean

help:
	@echo "make demo        environment, small real model, real chats -> a published, verified dataset"
	@echo "make test        the whole test suite (JOBS=2: files without an engine two at a time; also for unit and faults)"
	@echo "make unit        the quick tests only"
	@echo "make check       formatting, lint, types, import rules"
	@echo "make format      mend formatting and what the linter can mend"
	@echo "make bench       the benchmarks"
	@echo "make compat      the compatibility suite on VERSIONS='$(VERSIONS)' (COMPAT_ARGS=--check changes no file)"
	@echo "make faults      the fault suite (FAULTS=short: a few minutes; FAMILY='kills s3': some of it; RESUME=1: go on)"
	@echo "make soak        45 minutes of extraction under random faults (SOAK_ARGS='--minutes 3')"
	@echo "make lock        remake requirements/*.lock (LOCKS='cpu cuda' for some; LOCKS=--upgrade for newest versions)"
	@echo "make lock-check  do the locks fit their inputs, and does the CUDA environment still resolve?"
	@echo "make audit       known vulnerabilities of the locked versions"
	@echo "make clean       remove the environment and every cache"

# Both do nothing within seconds when the environment is what the locks say.
env-demo:
	@$(PYTHON) scripts/bootstrap.py --venv $(VENV) cpu demo

env:
	@$(PYTHON) scripts/bootstrap.py --venv $(VENV) cpu demo dev

demo: env-demo
	@$(BIN)/python examples/demo/prepare.py --dir $(DEMO_DIR)
	@$(BIN)/coresample run examples/demo/job.yaml
	@$(BIN)/coresample verify $(DEMO_DIR)/dataset

test: env
	@$(BIN)/python examples/demo/prepare.py --dir $(DEMO_DIR)
ifeq ($(JOBS),)
	@$(BIN)/python -m pytest $(PYTEST_ARGS)
else
	@$(BIN)/python -m pytest $(PARALLEL) -m "not ($(ALONE))" $(PYTEST_ARGS) || failed=1; \
	$(BIN)/python -m pytest -m "$(ALONE)" $(PYTEST_ARGS) || failed=1; exit $${failed:-0}
endif

unit: env
	@$(BIN)/python -m pytest tests/unit -m "not engine and not system and not slow and not e2e" $(PARALLEL) $(PYTEST_ARGS)

# All four are run, so that one look shows everything.
check: env
	@failed=""; \
	for tool in "ruff format --check --quiet ." "ruff check --output-format concise ." "mypy" "lint-imports"; do \
	  echo "--- $$tool"; $(BIN)/$$tool || failed="$$failed $${tool%% *}"; \
	done; \
	if [ -n "$$failed" ]; then echo "check failed:$$failed (make format mends much of it)" >&2; exit 1; fi

format: env
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench: env
	@$(BIN)/python examples/demo/prepare.py --dir $(DEMO_DIR)
	@$(BIN)/python -m benchmarks $(BENCH_ARGS)

# An environment per vLLM release under .cache/compat, then docs/compatibility.md from what was measured.
compat: env
	@$(BIN)/python scripts/compat.py $(COMPAT_ARGS) $(VERSIONS)

# Counts go to benchmarks/results/faults.json, and from there to docs/reliability.md; the short form keeps its own.
faults: env
	@FAULTS=$(FAULTS) FAULTS_RESUME=$(RESUME) $(BIN)/python -m pytest -q $(PARALLEL) \
	  $(if $(FAMILY),$(foreach name,$(FAMILY),$(or $(wildcard tests/faults/test_$(name).py tests/faults/$(name)),tests/faults/$(name))),tests/faults) $(PYTEST_ARGS)
	@if [ "$(FAULTS)" = full ]; then $(BIN)/python scripts/reliability.py; fi

soak: env
	@$(BIN)/python -m tests.faults.soak $(SOAK_ARGS)
	@$(BIN)/python scripts/reliability.py

lock: env
	@$(BIN)/python scripts/lock.py $(LOCKS)

# The CPU side is proved by every installation (scripts/check_env.py); the CUDA side and the server's image are resolved
# here without downloading their wheels, with every pin held: pip must find exactly the lock.
lock-check: env
	@$(BIN)/python scripts/lock.py --check --offline cpu dev demo
	@$(BIN)/python scripts/lock.py --check cuda server

# Pins only: a lock is complete, so nothing has to be resolved.
audit: env
	@$(BIN)/pip-audit --no-deps --disable-pip -r requirements/cpu.lock -r requirements/dev.lock -r requirements/server.lock

clean:
	rm -rf $(VENV) .cache build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis .coverage htmlcov
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
