# fastsync's chores. `make` lists them; all work in .venv, which `make setup` creates.

PYTHON ?= python3
VENV ?= .venv
TORCH ?= $(shell sed -n 's/^torch==//p' requirements-dev.txt)
PIP_ARGS ?=
GPU_TORCH ?= 2.11.0
ARCHS ?= 90
ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-torch-$(TORCH)
COMPILER := $(or $(filter-out default,$(if $(filter-out default,$(origin CXX)),$(CXX))),c++)
WITH_NINJA := PATH="$(abspath $(BIN)):$$PATH"
IN_CHECKOUT := $(WITH_NINJA) PYTHONPATH=. $(BIN)/python
AT_ONCE := -n 3 --dist loadfile --no-loadscope-reorder
# Each process would compile the tests again where no bytecode is kept.
TESTS := PYTHONDONTWRITEBYTECODE= $(IN_CHECKOUT) -m pytest
PYTHON_CODE := $(wildcard fastsync bench examples tests setup.py)
CPP_CODE = $(shell find csrc -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')

.DEFAULT_GOAL := help
.PHONY: help setup extension install demo test test-all torch-suite fsdp-suite bench bench-all bench-links bench-overlap \
  docs gpu gpu-prebuilt bench-kernels bench-buckets bench-scale lint format clean check-python check-compiler

help: ## list the targets
	@echo "make <target>, with ARGS='...' for the program it runs:"
	@sed -n 's/^\([a-z][a-z-]*\):[^#]*## /\1\t/p' $(firstword $(MAKEFILE_LIST)) | expand -t 10 | sed 's/^/  /'
	@echo
	@echo "PYTHON=$(PYTHON) (3.10 or newer)  TORCH=$(TORCH)  VENV=$(VENV)"

setup: $(STAMP) extension ## create .venv with pinned dependencies and compile (TORCH=, PYTHON=, PIP_ARGS=)
	@echo "$(VENV) and the extension are ready: try make demo"

$(STAMP): requirements-dev.txt | check-python check-compiler
	@echo "installing torch $(TORCH) and the tools into $(VENV): a large download, about a minute on a fast network"
	$(PYTHON) -m venv $(VENV)
	grep -v '^torch==' requirements-dev.txt > $(VENV)/requirements.txt
	$(BIN)/python -m pip install --disable-pip-version-check -q $(PIP_ARGS) "torch==$(TORCH)" -r $(VENV)/requirements.txt
	@rm -f $(VENV)/.setup-torch-*
	@touch $@

extension: $(STAMP)
	@$(IN_CHECKOUT) -c 'from fastsync._build import extension; extension.load()'

check-python:
	@command -v $(PYTHON) >/dev/null || { \
	  echo "error: no '$(PYTHON)' here; install Python 3.10 or newer, or name one: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "error: fastsync needs Python 3.10 or newer, $(PYTHON) is $$($(PYTHON) -V 2>&1); name another: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "error: $(PYTHON) lacks the venv module (Debian, Ubuntu: apt install python3-venv)"; exit 1; }

check-compiler:
	@command -v $(firstword $(COMPILER)) >/dev/null || { \
	  echo "error: no C++ compiler '$(firstword $(COMPILER))'; install one (Debian, Ubuntu: apt install g++; Fedora: dnf install gcc-c++; macOS: xcode-select --install) or set CXX"; exit 1; }

install: $(STAMP) ## build the package and install it into .venv
	$(WITH_NINJA) $(BIN)/python -m pip install --disable-pip-version-check --no-build-isolation .

demo: $(STAMP) ## train a small GPT on two ranks, next to torch's DDP (ARGS=--quick)
	@$(IN_CHECKOUT) examples/demo.py $(ARGS)

test: extension ## run the tests of every feature
	@echo "running the tests of every feature, three files at once; make test-all runs all cases"
	$(TESTS) $(AT_ONCE) $(ARGS)

test-all: extension ## run all cases too (ARGS='-m slow': what make test leaves out)
	@echo "running all tests, three files at once"
	$(TESTS) -m '' $(AT_ONCE) $(ARGS)

torch-suite: $(STAMP) ## run torch's own DDP tests against FastDDP (ARGS='--only join')
	$(IN_CHECKOUT) -m tests.conformance.torch_suite $(ARGS)

fsdp-suite: $(STAMP) ## run torch's own FSDP2 tests against fully_shard (UPSTREAM=folder with its test_fully_shard_*.py)
	$(if $(UPSTREAM),,$(error UPSTREAM=folder is missing: where torch's test/distributed/_composable/fsdp/test_fully_shard_*.py are))
	$(IN_CHECKOUT) -m tests.conformance.fsdp_suite $(UPSTREAM) $(ARGS)

bench: $(STAMP) ## step times of all variants, into out/step.json
	$(IN_CHECKOUT) -m bench step --json out/step.json $(ARGS)

bench-all: $(STAMP) ## all benchmarks, into bench/results and the documents (ARGS='--only step')
	$(IN_CHECKOUT) -m bench all $(ARGS)

bench-links: $(STAMP) ## steps over shaped links, into out/links.json (needs root)
	$(IN_CHECKOUT) -m bench links --ranks 2,4 --json out/links.json $(ARGS)

bench-overlap: $(STAMP) ## exposed communication against the least, into out/overlap.json (needs root)
	$(IN_CHECKOUT) -m bench overlap --json out/overlap.json $(ARGS)

bench-kernels bench-buckets bench-scale: bench-%: $(STAMP)
	$(IN_CHECKOUT) -m bench $* --json out/$*.json $(ARGS)

gpu: $(STAMP) ## everything that needs a GPU, see docs/gpu.md (ARGS=--list)
	$(IN_CHECKOUT) -m bench gpu_all $(ARGS)

gpu-prebuilt: ## compile for a GPU machine, here (PYTHON=python3.12 GPU_TORCH=2.11.0 ARCHS=90)
	$(PYTHON) -m venv .venv-gpu
	.venv-gpu/bin/python -m pip install --disable-pip-version-check -q $(PIP_ARGS) \
	  "torch===$(GPU_TORCH)" $$(grep -oE '^(ninja|pybind11|setuptools)==[^;]*' requirements-dev.txt) numpy
	rm -f out/prebuilt/lock  # of a call that was stopped
	PATH="$(abspath .venv-gpu/bin):$$PATH" .venv-gpu/bin/python fastsync/_build/recipe.py --beside \
	  --out out/prebuilt --archs "$(ARCHS)" --cuda 1
	@echo "carry fastsync/_C.so and fastsync/_prebuilt.json; where they do not fit, the first import compiles"

docs: $(STAMP) ## build the documentation as HTML, into out/site, and check its links
	$(BIN)/sphinx-build -q -W --keep-going -c docs $(ARGS) . out/site
	@echo "open out/site/index.html"

lint: $(STAMP) ## check style, types and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(filter-out tests setup.py,$(PYTHON_CODE))
	@$(BIN)/clang-format --dry-run -Werror $(CPP_CODE)

format: $(STAMP) ## rewrite the code in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP_CODE)

clean: ## remove what was built and measured; keeps .venv
	rm -rf build dist out *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +
