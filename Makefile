# `make demo` and `make test` need nothing but Python 3.11+ and make: they set up .venv themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export TOKENIZERS_PARALLELISM := false
export HF_HUB_OFFLINE := 1

.PHONY: demo serve test test-long check format bench clean
.DEFAULT_GOAL := help

$(VENV)/demo.stamp: pyproject.toml constraints.txt setup.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[demo]'
	touch $@

$(VENV)/dev.stamp: $(VENV)/demo.stamp
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: $(VENV)/demo.stamp ## set up and run the main job: a chat served over device and host
	$(BIN)/python -m demo.run

serve: $(VENV)/demo.stamp ## keep a server running on the demo model
	$(BIN)/stratakv serve models/demo --port 8000

test: $(VENV)/dev.stamp ## set up and pass the tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m 'not long'

test-long: $(VENV)/dev.stamp ## the long campaigns
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m long

check: $(VENV)/dev.stamp ## lint, format, types, floors, meta tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m pytest tests/meta -p no:xdist

format: $(VENV)/dev.stamp ## rewrite the code in the house style
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## remove what make made
	rm -rf $(VENV) build out

help: ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'
