# What developers and CI type; `make help` lists it. More arguments go through ARGS:
#     make test ARGS="-k tree -x"

PYTHON  ?= python3
VENV    ?= .venv
BIN     := $(VENV)/bin
SMALL   := $(VENV)/.installed-demo,serve
TEST    := $(VENV)/.installed-test
DEV     := $(VENV)/.installed-dev
PIP     := $(BIN)/python -m pip --disable-pip-version-check
BENCHES ?= multiturn shared-prefix tree stall transfer overlap
WORKERS ?= 3
ARGS    ?=
DOCS_TOOLS := "mkdocs-material>=9.6,<10" "mkdocs>=1.6,<2"  # the extra `docs`

.DEFAULT_GOAL := help
.PHONY: help setup dev docs engines demo test lab-test coverage mutants house check lint types layers wheel soak gpu bench conformance engines-e2e clients-e2e judge release release-check clean

help:  ## this list
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 15

setup: $(SMALL)  ## make .venv and install the package, editable, with what the demo and the server need (Python 3.11)

dev: $(DEV)  ## the same, and what the tests and the checks need

# Torch goes first: once a build of the pinned version is there, nothing that follows replaces it.
$(VENV)/.installed-torch: constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed: make PYTHON=python3.11")'
	@echo "installing torch into $(VENV), this takes a minute or more"
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --constraint constraints.txt torch
	@touch $@

# What stands behind the hyphen are extras of pyproject.toml.
$(VENV)/.installed-%: $(VENV)/.installed-torch pyproject.toml src/asynchicache_lab/pyproject.toml
	@echo "installing .[$*] into $(VENV)"
	$(PIP) install --quiet --constraint constraints.txt --editable '.[$*]' --editable src/asynchicache_lab
	@touch $@

engines:  ## install servers that tests of storage engines run (apt as root, pip, npm); they skip without
	scripts/install_engines.sh

demo: $(SMALL)  ## a hybrid model served with and without the cache, and a report
	$(BIN)/asynchicache demo $(ARGS)

# Hundreds of processes import the library: it is compiled once, whatever the environment says.
test lab-test soak: export PYTHONDONTWRITEBYTECODE =

# Three processes, for two cores: while a test of one waits for a server, the others compute. Not more, whatever the
# machine, for tests read clocks. WORKERS=0 runs them in one, for a debugger.
test: $(TEST)  ## the tests of the library, without those marked soak or gpu
	$(BIN)/python -m pytest --ignore tests/lab --numprocesses $(WORKERS) --dist worksteal $(ARGS)

lab-test: $(TEST)  ## the tests of the laboratory: benches, chaos, soak and demo
	$(BIN)/python -m pytest tests/lab --numprocesses $(WORKERS) --dist worksteal $(ARGS)

# What decides is pure, so the tests of its own packages are to reach all of it. COVERAGE_FILE keeps it apart from other runs.
coverage: $(TEST)  ## lines and branches of the code that decides: 98 of 100 at least
	mkdir -p build
	COVERAGE_FILE=build/.coverage $(BIN)/python -m pytest tests/tree tests/hashing tests/planner tests/controller \
	    tests/storage/test_hits.py tests/transfer/test_plan.py -q --cov asynchicache --cov-branch --cov-report= $(ARGS)
	COVERAGE_FILE=build/.coverage $(BIN)/python -m coverage report --fail-under 98 --show-missing --skip-covered --include \
	    '*/tree/*,*/hashing.py,*/storage/hits.py,*/transfer/plan.py,*/planner/*'

# The tests run in a process of their own for each mutant, one after another: 100 take about 15 minutes.
mutants: $(TEST)  ## plant small mistakes that the tests are to find; ARGS="--count 20 --seed 7 --package tree"
	$(BIN)/python scripts/mutants.py $(ARGS)

house: $(TEST)  ## size and shape of the source, counted; ARGS="--details" or "--root OTHER_CHECKOUT"
	$(BIN)/python scripts/house.py $(ARGS)

check: lint types layers wheel  ## lint, format, types, import layers, and what the wheel holds

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(DEV)
	$(BIN)/mypy -p asynchicache -p asynchicache_lab
	$(BIN)/mypy tests/typing/api.py
	$(BIN)/pyright --pythonpath $(BIN)/python

layers: $(DEV)
	$(BIN)/lint-imports --no-logo --no-cache

# Two packages are links in the source tree; a checkout that lost them would build a wheel without them.
wheel: $(DEV)
	rm -rf build
	$(PIP) wheel --quiet --no-deps --no-build-isolation --wheel-dir build/wheel .
	$(BIN)/python -m zipfile --list build/wheel/*.whl > build/wheel/contents
	! grep asynchicache_lab build/wheel/contents || { echo "the wheel holds the laboratory"; exit 1; }
	for file in kernels/__init__.py backends/__init__.py py.typed; do \
	    grep --quiet "^asynchicache/$$file " build/wheel/contents || { echo "the wheel lacks $$file"; exit 1; }; \
	done

soak: $(TEST)  ## the long tests, with fresh random seeds
	HYPOTHESIS_PROFILE=soak $(BIN)/python -m pytest -m soak --timeout 3600 -o faulthandler_timeout=3900 $(ARGS)

# No setup: a GPU machine has its own torch and triton, unless `make dev` ran there. requirements-gpu.txt is all else.
gpu: GPU_PYTHON = $(firstword $(wildcard $(BIN)/python) $(PYTHON))
gpu:  ## an NVIDIA GPU tested and measured, and a report; ARGS="--part one" (two, three), or --dry on a CPU
	PYTHONPATH=src:$${PYTHONPATH} $(GPU_PYTHON) scripts/gpu_needs.py
	PYTHONPATH=src:$${PYTHONPATH} $(GPU_PYTHON) -m asynchicache_lab.gpu $(ARGS)

# Wheels and what they import, 4 GB in all, go to .conformance once. Like `make setup` it takes PIP_EXTRA_INDEX_URL.
conformance:  ## our adapters inside vLLM's and SGLang's own classes, on a CPU; ARGS="vllm" picks one
	$(PYTHON) scripts/conformance.py $(ARGS)

# Environments and tiny models, 2.5 GB an engine, go to .engines once. Torch's CPU builds: PIP_EXTRA_INDEX_URL, as above.
engines-e2e:  ## our adapters in whole engines that serve tiny models, on a CPU; ARGS="vllm" picks one
	$(PYTHON) scripts/engines_e2e.py $(ARGS)

# The clients' packages, 1.5 GB, go to .clients once, and the environments of engines-e2e are needed.
clients-e2e:  ## openai, lm-eval, guidellm and the benchmarks of vLLM, SGLang and LMCache, unchanged, against `serve`; ARGS="-k openai"
	$(PYTHON) scripts/clients_e2e.py $(ARGS)

# A few minutes a cache. With a cache's name it judges that one, with --case NAME one case.
judge: $(TEST)  ## caches of vLLM, SGLang, LMCache and ours through the same faults, on a CPU; ARGS="vllm-fs --case kill"
	$(BIN)/python scripts/judge.py $(ARGS)

# An environment of its own: the site's tools and the library's pins are nobody's business together.
docs: build/docs-env/.installed  ## the documentation as a site with search, in build/site; fails on a broken link
	build/docs-env/bin/python -m mkdocs build --strict --quiet $(ARGS)
	@echo "the site is in build/site. Search works over HTTP only; to read it here, type"
	@echo "    $(PYTHON) -m http.server --bind 127.0.0.1 --directory build/site 8000"
	@echo "and open http://127.0.0.1:8000/overview.html"

build/docs-env/.installed: pyproject.toml
	$(PYTHON) -m venv build/docs-env
	build/docs-env/bin/python -m pip --disable-pip-version-check install --quiet $(DOCS_TOOLS)
	@touch $@

# Takes minutes: a clean environment for each Python, with torch. Like `make setup` it takes PIP_EXTRA_INDEX_URL.
release: ARGS := --to build/release $(ARGS)
release: release-check  ## the same, and what is published: files, hashes, a lock and a bill of materials, in build/release

release-check:  ## build sdist and wheel, and install and use them in clean environments of Python 3.11 to 3.14
	$(PYTHON) scripts/release_check.py $(ARGS)

bench: $(TEST)  ## the benchmarks; BENCHES="tree stall" picks some
	for name in $(BENCHES); do $(BIN)/asynchicache bench $$name $(ARGS) || exit; done

clean:  ## remove what was made here, but for .venv
	rm -rf build dist demo-report gpu-report src/*.egg-info .coverage* .hypothesis
	rm -rf .mypy_cache .pytest_cache .ruff_cache
	find src kernels backends tests -name __pycache__ -type d -prune -exec rm -rf {} +
