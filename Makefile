# `make demo` and `make test` need a Python of 3.10 or later with venv, and nothing else.

PYTHON ?= python3
VENV ?= .venv
# processes that run tests, a group of files each; tests of ranks start some more
WORKERS ?= 2
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed
LINTERS := $(VENV)/linters
WRITERS := $(VENV)/writers

export OMP_NUM_THREADS := 1
# processes that tests start find compiled what others have imported
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-slow test-gpu lint docs clean

demo: $(INSTALLED) ## Train a small GPT on two ranks; then measure a pipeline and data parallel training beside it.
	$(BIN)/python -m benchmarks.demo

test: $(INSTALLED) ## Run every test that needs no accelerator, but for the slow ones.
	$(BIN)/python -m pytest -m "not gpu and not slow" -n $(WORKERS) --dist loadgroup --durations=25 $(ARGS)

test-slow: $(INSTALLED) ## Run the slow tests: planning and fits of long models, more random steps.
	$(BIN)/python -m pytest -m "slow and not gpu" -n $(WORKERS) --timeout 900 $(ARGS)

test-gpu: $(INSTALLED) ## Run the tests that need a GPU, and the fits of the others on ranks that share the first one.
	LIGHTNING_PIPE_TESTS_ON=cuda $(BIN)/python -m pytest tests/gpu tests/strategy tests/runtime tests/profiler \
	  -m "not slow" -n $(WORKERS) --dist loadgroup $(ARGS)

lint: $(LINTERS) ## Check format, style and types.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: $(WRITERS) ## Draw the pictures of the site, build it into build/site, and check its links.
	$(BIN)/python -m benchmarks.site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean: ## Remove the virtual environment and caches.
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[test]'
	touch $@

$(WRITERS): $(INSTALLED)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	touch $@

$(LINTERS): $(INSTALLED)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[test,lint]'
	touch $@
