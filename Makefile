# make demo, test, test-oldest, lint, format, stack-up, stack-down. Each makes what it runs in first.
#
# On a machine without a GPU, the CPU build of torch saves gigabytes of download:
#   make demo TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu

PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX_URL ?=
ARGS ?=
PYTEST_ARGS ?=

# What was imported once is imported several times faster: torch is compiled as it is used.
export PYTHONDONTWRITEBYTECODE :=

BIN := $(VENV)/bin
# Where the oldest torch that pyproject.toml promises is tried.
OLDEST_VENV := .venv-oldest
OLDEST_TORCH := $(shell sed -n 's/.*"torch>=\([0-9.]*\)".*/\1/p' pyproject.toml)
# Compiling all of torch takes longer than importing the part that is used.
PIP_OPTIONS := --quiet --no-compile --disable-pip-version-check
PIP := $(BIN)/python -m pip install $(PIP_OPTIONS) -c constraints.txt
OLDEST_PIP := $(OLDEST_VENV)/bin/python -m pip install $(PIP_OPTIONS) -c $(OLDEST_VENV)/constraints.txt
COMPOSE = $(shell docker compose version >/dev/null 2>&1 && echo docker compose || echo docker-compose)

.PHONY: demo test test-oldest lint format stack-up stack-down clean
.DELETE_ON_ERROR:

demo: $(VENV)/.demo
	$(BIN)/sdcwatch demo $(ARGS)

# Two at a time, because many tests wait for a server; the demo alone, because it fills the machine.
test: $(VENV)/.dev
	$(BIN)/python -m pytest --durations 15 --numprocesses 2 --no-loadscope-reorder --ignore tests/e2e $(PYTEST_ARGS)
	$(BIN)/python -m pytest --durations 15 tests/e2e $(PYTEST_ARGS)

# By hand, when what sdcwatch relies on in torch changes.
test-oldest: $(OLDEST_VENV)/.dev
	$(OLDEST_VENV)/bin/python -m pytest tests/core tests/checks tests/guard $(PYTEST_ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/sdcwatch monitor build --check

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

stack-up:
	$(COMPOSE) up --build --detach

# compose interpolates the whole file for `down` too, which needs no password
stack-down:
	GRAFANA_ADMIN_PASSWORD=$${GRAFANA_ADMIN_PASSWORD:-unused} $(COMPOSE) down

clean:
	rm -rf $(VENV) $(OLDEST_VENV)

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.torch: constraints.txt | $(VENV)/bin/python
	$(PIP) $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL)) torch
	touch $@

$(VENV)/.demo: pyproject.toml constraints.txt $(VENV)/.torch
	$(PIP) --editable '.[demo]'
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt $(VENV)/.demo
	$(PIP) --editable '.[test,lint]'
	touch $@

$(OLDEST_VENV)/.dev: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(OLDEST_VENV)
	grep -v '^torch==' constraints.txt > $(OLDEST_VENV)/constraints.txt
	$(OLDEST_PIP) $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL)) 'torch==$(OLDEST_TORCH).*'
	$(OLDEST_PIP) --editable '.[test]'
	touch $@
