# Every target sets up what it needs. The stamp file makes a second run quick.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEV_STAMP := $(VENV)/.installed-dev
PEERS_STAMP := $(VENV)/.installed-peers
# TorchRec asks for FBGEMM's CUDA wheel of 465 MB: it comes without its dependencies, and they by name.
PEERS := fbgemm-gpu-cpu torchrec
PEERS_NEED := tensordict torchmetrics tqdm pyre-extensions
INPUTS := pyproject.toml constraints.txt

.PHONY: quickstart test test-slow newcomer test-statistical check format peers browser docs site paper pictures clean help

help: ## Show what can be made
	@grep -E '^[a-z-]+:.*##' Makefile | sed 's/:.*## /\t/' | expand -t 14

quickstart: $(STAMP) ## Train the default model on a synthetic log, in under 2 minutes
	$(BIN)/rowstead train

test: $(DEV_STAMP) check ## Lint, types, layers and the quick tests
	$(BIN)/python -m pytest -n 2 -m "not slow and not statistical"

test-slow: $(DEV_STAMP) browser ## The tests that take longer: faults, quality, whole commands
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "slow and not statistical" --durations 12

newcomer: ## In a fresh environment with the wheel: CSV to recipe, model, predictions and report
	rm -rf build/newcomer && mkdir -p build/newcomer/work
	$(PYTHON) -m venv build/newcomer/venv
	build/newcomer/venv/bin/pip wheel --quiet --no-deps --wheel-dir build/newcomer .
	build/newcomer/venv/bin/pip install --quiet -c constraints.txt build/newcomer/*.whl pandas
	cd build/newcomer/work && ../venv/bin/python ../../../tests/newcomer.py

test-statistical: $(DEV_STAMP) ## Claims about random runs, each by a fixed protocol (a quarter of an hour); not part of the gate
	$(BIN)/python -m pytest -m statistical --durations 5

check: $(DEV_STAMP) ## Lint, format, types, import layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(DEV_STAMP) ## Put the code in shape
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

peers: $(PEERS_STAMP) ## Install what the benchmarks compare with on a CPU: FBGEMM and TorchRec
	@$(BIN)/pip freeze | grep -iE "^(torch|fbgemm|tensordict|tqdm|pyre)"

browser: ## Install what the browser tests need, or say what is missing
	@if command -v chromium >/dev/null && command -v chromedriver >/dev/null; then exit 0; fi; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  apt-get install -y -qq chromium chromium-driver >/dev/null || { apt-get update -qq && apt-get install -y -qq chromium chromium-driver >/dev/null; }; \
	fi; \
	if ! command -v chromium >/dev/null || ! command -v chromedriver >/dev/null; then \
	  echo "the browser tests need Chromium and its driver: sudo apt-get install chromium chromium-driver" >&2; exit 1; \
	fi

paper: $(STAMP) ## Measure the study's sweeps in their quick size, predict its machines, write docs/paper.html (a quarter of an hour)
	$(BIN)/python -m benchmarks.paper_html

pictures: $(DEV_STAMP) browser ## Take the pictures of docs/pictures anew: README, walkthrough, ui, report, paper (some minutes)
	$(BIN)/python -m docs.pictures.walkthrough

docs: $(DEV_STAMP) ## Write the generated pages of docs/ anew
	$(BIN)/python -m docs.generate

site: $(DEV_STAMP) ## Build the documentation as a site in build/site, and check its links
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

clean: ## Remove the environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build src/*.egg-info
	find src -name '*.nb[ic]' -delete

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(STAMP): $(INPUTS) | $(VENV)/bin/python
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(DEV_STAMP): $(STAMP)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

$(PEERS_STAMP): $(STAMP)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt $(PEERS_NEED)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps $(PEERS)
	touch $@
