# make train   trains the demo GPT over two pipeline ranks on the CPU
# make test    runs lint, types and tests
# make docs    builds the documentation site in build/site, and fails on a warning
# make gpu     what one GPU tells, in so many seconds, with the python that it is given:
#              make gpu PYTHON=python3 SECONDS=440
# make fuzz    runs generated programs beside one device, for so many seconds: make fuzz SECONDS=600
# The first three make the environment that they need, and again when pyproject.toml changes.

PYTHON ?= python3
SECONDS ?= 440
# Installed first and pinned, so that a machine which has this version's CPU wheel takes that one: the
# newest on PyPI brings gigabytes of CUDA. What stands here goes to pip: `make TORCH=torch train`.
TORCH ?= torch==2.13.0

BIN := .venv/bin
# Without bytecode every rank compiles torch and lightning anew at its start.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train test fuzz docs gpu
# Training and tests, one thread a rank: on two cores they would wait for each other's threads.
train: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/pipeoffload-train trainer=cpu

test: .venv/installed-test
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses 4 --dist worksteal --durations 10

fuzz: .venv/installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.generated fuzz $(SECONDS)

docs: .venv/installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

gpu:
	$(PYTHON) -u -m examples.benchmarks.gpu_check --seconds $(SECONDS)

.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install $(TORCH)
	$(BIN)/pip install --editable ".[hydra]"
	touch $@

.venv/installed-docs: .venv/installed
	$(BIN)/pip install --editable ".[docs]"
	touch $@

.venv/installed-test: .venv/installed
	$(BIN)/pip install --editable ".[test]"
	touch $@
