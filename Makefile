PYTHON ?= python3
JOBS ?= 2

BIN := .venv/bin
READY := .venv/.ready
TORCH := $(shell grep '^torch==' constraints.txt)

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint format clean

help:  ## List what can be done
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# torch goes in alone and first: on its own, pip takes the build that the machine is set up for.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[test,hf]"
	touch $@

setup: $(READY)  ## Make .venv with everything the other targets need

demo: $(READY)  ## Split the example transformer in two, verify it, run it on two processes
	$(BIN)/pipegraph split examples/transformer.py --points layers.4 -o build/transformer --overwrite
	$(BIN)/pipegraph verify build/transformer examples/transformer.py
	$(BIN)/pipegraph run build/transformer --nproc 2 --schedule 1f1b --microbatches 4 --steps 3

test: $(READY)  ## Run the tests (JOBS=2 at a time)
	$(BIN)/python -m pytest -n $(JOBS)

lint: $(READY)  ## Check style, types and the floors of imports
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY)  ## Put the source in order
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:  ## Remove what the targets above made, .venv too
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
