PYTHON ?= python3
# Tests wait for processes that they start, and so leave two cores idle with two at a time.
JOBS ?= 3

# The tested version of torch is in .venv. Another one has an environment of its own: make test TORCH=2.15.0
TESTED := $(shell sed -n 's/^torch==//p' constraints.txt)
TORCH ?= $(TESTED)
VENV := $(if $(filter $(TESTED),$(TORCH)),.venv,.venv-torch-$(TORCH))
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip install --quiet

.DEFAULT_GOAL := help
.PHONY: help setup demo train train-killed test test-all lint format docs pictures survey clean

help:  ## List what can be done
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# torch goes in alone and first: on its own, pip takes the build that the machine is set up for.
$(INSTALLED): pyproject.toml constraints.txt
	@echo "Installing torch $(TORCH) and pipegraph in $(VENV): a minute if pip has them, several minutes if it loads them."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt > $(VENV)/constraints.txt
	$(PIP) "torch==$(TORCH)"
	$(PIP) --constraint $(VENV)/constraints.txt --editable .
	touch $@

$(READY): $(INSTALLED)
	$(PIP) --constraint $(VENV)/constraints.txt --editable ".[test,hf]"
	touch $@

$(VENV)/.docs-ready: $(READY)
	$(PIP) --constraint $(VENV)/constraints.txt --editable ".[docs]"
	touch $@

setup: $(READY)  ## Make .venv with everything the other targets need

demo: $(INSTALLED)  ## Split the example transformer in two, verify it, run it on two processes
	@echo; echo "1 of 3: split examples/transformer.py in two stages, where a step takes the least time"
	$(BIN)/pipegraph split examples/transformer.py --stages 2 --microbatches 4 -o build/transformer --overwrite
	@echo; echo "2 of 3: compare the stages with the model"
	$(BIN)/pipegraph verify build/transformer examples/transformer.py
	@echo; echo "3 of 3: train them in two processes, which compile their kernels first"
	$(BIN)/pipegraph run build/transformer --nproc 2 --schedule 1f1b --microbatches 4 --steps 3
	@echo; echo "The stages are build/transformer/stage_0.py and stage_1.py. A model of your own: docs/guide.md"

RUN_TEXT = $(BIN)/pipegraph run $(1) --model examples/text/model.py --microbatches 4 --steps $(STEPS) \
	--checkpoint $(2) --checkpoint-every 50
SPLIT_TEXT = $(BIN)/pipegraph split examples/text/model.py --overwrite
STEPS ?= 400

train: $(READY)  ## Train a small GPT on the source of Python's library, in two processes (minutes)
	$(SPLIT_TEXT) --points layers.2 -o build/text/two
	$(call RUN_TEXT,build/text/two,build/text/run)

# With eager kernels, whose numbers are the same for any cut and any number of processes.
train-killed: $(READY)  ## The same, killed in the middle, gone on in four stages; its curve over that of one process
	rm -rf build/text/alone build/text/killed
	$(SPLIT_TEXT) --points layers.2 -o build/text/two
	$(SPLIT_TEXT) --points layers.1,layers.2,layers.3 -o build/text/four
	$(call RUN_TEXT,build/text/two,build/text/killed) --kernels eager & run=$$!; \
	while kill -0 $$run && ! test -d build/text/killed/step-00000150; do sleep 1; done; sleep 3; kill -KILL $$run
	$(call RUN_TEXT,build/text/four,build/text/killed) --kernels eager --schedule zb-v
	OMP_NUM_THREADS=1 $(call RUN_TEXT,build/text/two,build/text/alone) --kernels eager --nproc 1
	$(BIN)/python examples/text/curve.py build/text/alone build/text/killed -o build/text/curve.svg

test: $(READY)  ## Run the tests but the slow ones (JOBS=3 at a time, TORCH=2.15.0 with that torch)
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not slow"

test-all: $(READY)  ## Run all tests, the fuzzers with 10,000 inputs each
	PIPEGRAPH_FUZZ=10000 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

lint: $(READY)  ## Check style, types and the layers of imports
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY)  ## Put the source in order
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: $(VENV)/.docs-ready  ## Build the pages of docs/ into build/docs; a warning is an error
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going --nitpicky docs build/docs

pictures: $(READY)  ## Draw the package and the report of docs/images anew (minutes, Chromium)
	$(BIN)/python -m benchmarks.pictures

# In an environment of its own: transformers imports torchvision where it is there, and beside a torch for the CPU that
# fails unless torchvision's operators are declared first.
survey:  ## Split some 80 public models and compare their stages with them (an hour)
	test -x .venv-survey/bin/python || $(PYTHON) -m venv .venv-survey
	.venv-survey/bin/python -m pip install --quiet "torch==$(TESTED)"
	.venv-survey/bin/python -m pip install --quiet --constraint constraints.txt --editable ".[hf,survey]"
	.venv-survey/bin/python -m benchmarks.survey

clean:  ## Remove what the targets above made, environments too
	rm -rf .venv .venv-torch-* .venv-survey build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
