# make train   trains the demo GPT over two pipeline ranks on the CPU
# make test    runs lint, types and tests
# make slow    runs the tests that are left out of make test, some 95 minutes on two cores; make slow PART=3
#              runs one of eight parts, 0 to 7, and with MINUTES=25 skips what has not begun by then
# make wheel   builds a wheel in dist/, with the python that it is given, for machines without this clone
# make docs    builds the documentation site in build/site, and fails on a warning
# make gpu     what one GPU tells, in so many seconds, with the python that it is given:
#              make gpu PYTHON=python3 SECONDS=440
# make fuzz    runs generated programs beside one device, for so many seconds: make fuzz SECONDS=600
# All but gpu and wheel make the environment that they need, and again when pyproject.toml changes.
# What TORCH says goes to pip, and has an environment of its own: make test TORCH=torch==2.14.1
# tests that torch in .venv-torch-2.14.1.

PYTHON ?= python3
SECONDS ?= 440
WHEELS ?= dist
# Installed first and pinned, so that a machine which has this version's CPU wheel takes that one: the
# newest on PyPI brings gigabytes of CUDA.
DEFAULT := torch==2.13.0
TORCH ?= $(DEFAULT)

NAME := $(shell printf '%s' '$(TORCH)' | tr -cs 'A-Za-z0-9.+' '-')
VENV := .venv$(if $(filter-out $(DEFAULT),$(TORCH)),-$(NAME))
BIN := $(VENV)/bin
PRINT_TORCH = @$(BIN)/python -c 'import torch; print("torch", torch.__version__, flush=True)'
# Without bytecode every rank compiles torch and lightning anew at its start.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train test slow fuzz docs gpu wheel
# Training and tests, one thread a rank: on two cores they would wait for each other's threads.
train: $(VENV)/installed
	$(PRINT_TORCH)
	OMP_NUM_THREADS=1 $(BIN)/pipeoffload-train trainer=cpu

test: $(VENV)/installed-test
	$(PRINT_TORCH)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses 4 --dist worksteal --durations 10

slow: $(VENV)/installed-test
	$(PRINT_TORCH)
	OMP_NUM_THREADS=1 $(BIN)/pytest -m 'slow and not faults' --numprocesses 4 --dist worksteal -rs --durations 10 \
		$(if $(PART),--part $(PART)) $(if $(MINUTES),--minutes $(MINUTES))

fuzz: $(VENV)/installed-test
	$(PRINT_TORCH)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.generated fuzz $(SECONDS)

docs: $(VENV)/installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

wheel:
	$(PYTHON) -m pip wheel --no-deps --wheel-dir '$(WHEELS)' .

gpu:
	$(PYTHON) -u -m examples.benchmarks.gpu_check --seconds $(SECONDS)

# TORCH is named each time: what pyproject.toml excludes is an error, not another version.
$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install '$(TORCH)'
	$(BIN)/pip install --editable ".[hydra]" '$(TORCH)'
	touch $@

$(VENV)/installed-docs: $(VENV)/installed
	$(BIN)/pip install --editable ".[docs]" '$(TORCH)'
	touch $@

$(VENV)/installed-test: $(VENV)/installed
	$(BIN)/pip install --editable ".[test]" '$(TORCH)'
	touch $@
