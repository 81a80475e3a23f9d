# `make demo` and `make test` need nothing but Python 3.11+ and make: they set up .venv themselves.
PYTHON ?= python3
VENV := .venv
ENGINES := .venv-connect
CLIENTS := .venv-clients
BIN := $(VENV)/bin
# --no-compile: Python compiles what it imports; compiling all of torch first takes half a minute.
PIP := $(BIN)/pip install -q --no-compile --disable-pip-version-check -c constraints.txt
# All of C by a pattern: a helper that is left out would stay as an older checkout built it.
BUILD := pyproject.toml constraints.txt setup.py $(wildcard src/stratakv/*/*.[ch] src/stratakv/*/*/*.[ch])
export TOKENIZERS_PARALLELISM := false
export HF_HUB_OFFLINE := 1
# What is imported is compiled once and kept in .venv; otherwise every start takes seconds more.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo serve test gpu test-connect test-clients test-long mutants check docs format clean
.DEFAULT_GOAL := help

$(VENV)/demo.stamp: $(BUILD)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) is older than 3.11; name another: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e '.[demo]'
	touch $@

$(VENV)/test.stamp: $(VENV)/demo.stamp
	$(PIP) -e '.[test,servers,routers]'
	touch $@

$(VENV)/check.stamp: $(VENV)/test.stamp
	$(PIP) -e '.[check]'
	touch $@

$(VENV)/mutants.stamp: $(VENV)/test.stamp
	$(PIP) -e '.[mutants]'
	touch $@

# vLLM and SGLang pin other releases of transformers than ours: they have an environment of their own,
# in which no package chooses what it depends on.
$(ENGINES)/stamp: tests/connect/requirements.txt
	$(PYTHON) -m venv $(ENGINES)
	$(ENGINES)/bin/pip install -q --no-compile --no-deps --disable-pip-version-check -r $<
	touch $@

$(ENGINES)/newest.stamp: $(ENGINES)/stamp tests/connect/newest.txt
	rm -rf $(ENGINES)/newest
	$(ENGINES)/bin/pip install -q --no-compile --no-deps --disable-pip-version-check \
	  --target $(ENGINES)/newest -r tests/connect/newest.txt
	touch $@

# Clients bring servers, web frameworks and tokenizers of their own. An older pip takes minutes to choose releases.
$(CLIENTS)/stamp: tests/clients/requirements.txt
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/pip install -q --disable-pip-version-check -U 'pip>=25'
	$(CLIENTS)/bin/pip install -q --no-compile --disable-pip-version-check -r $<
	touch $@

demo: $(VENV)/demo.stamp ## set up and run the main job: a chat served over device, host and storage
	$(BIN)/python -m demo.run

serve: $(VENV)/demo.stamp ## keep a server running on the demo model
	$(BIN)/stratakv serve models/demo --port 8000

# By file: xdist would hand out hundreds of tests at a time, and one core wait for the other's last.
# A file's servers, ranks and models are then also made once. In order: the files at the end are short.
# Three workers for two cores: now and then one of them waits for a store or a process. A test that
# hangs is given up after minutes: ten of them say enough. Meta tests are a part of `make check`.
test: $(VENV)/test.stamp ## set up and pass the tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --maxfail=10 \
	  -rs --durations=20 -m "not long and not connect and not clients and not gpu" --ignore tests/meta

# One engine at a time takes both cores; each starts several times.
test-connect: $(VENV)/test.stamp $(ENGINES)/newest.stamp ## the tiers in the released engines; needs 5 GB of disk
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -p no:xdist -rs --durations=20 -m connect tests/connect

test-clients: $(VENV)/test.stamp $(CLIENTS)/stamp ## released clients against a server; needs 7 GB of disk where torch comes with CUDA, else 2
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -p no:xdist -rs --durations=20 -m "clients and not long" tests/clients

test-long: $(VENV)/test.stamp $(CLIENTS)/stamp ## the long campaigns
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -rs --durations=20 -m long

# At most nine minutes a call; what is done is skipped by the next one.
gpu: $(VENV)/test.stamp ## on a machine with a GPU: its tests, then its benches; figures in bench/results
	TRITON_INTERPRET=0 $(BIN)/python -m scripts.gpu

mutants: $(VENV)/mutants.stamp ## small bugs that some test must see: make mutants PACKAGES="tree policy"
	OMP_NUM_THREADS=1 nice $(BIN)/python -m scripts.mutants $(PACKAGES)

check: $(VENV)/check.stamp ## lint, format, types, floors, meta tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m pytest tests/meta -p no:xdist

docs: $(VENV)/check.stamp ## the documents as a site, in out/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

format: $(VENV)/check.stamp ## rewrite the code in the house style
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## remove what make made
	rm -rf $(VENV) $(ENGINES) $(CLIENTS) build out src/stratakv.egg-info src/stratakv/*/_*.so src/stratakv/*/*/_*.so

help: ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/'
