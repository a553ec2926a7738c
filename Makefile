# `make demo` and `make test` need a Python of 3.10 or later with venv, and nothing else.

PYTHON ?= python3
VENV ?= .venv
# processes that run tests, a group of files each; tests of ranks start some more
WORKERS ?= 2
BIN := $(VENV)/bin
# errors only: mirrors make pip warn of their addresses
PIP_INSTALL = $(BIN)/python -m pip install -qq --disable-pip-version-check
# make test-gpu: the interpreter, seconds for all tests, where results and logs go, wheels of what the interpreter lacks
GPU_PYTHON ?= $(BIN)/python
GPU_SECONDS ?= 1800
GPU_RESULTS ?= build/gpu
WHEELS ?= build/wheels
PURE_PYTHON := 'omegaconf==2.3.*' hydra-core 'antlr4-python3-runtime==4.9.*' lightning lightning-utilities torchmetrics \
  pytest pytest-timeout pytest-xdist execnet iniconfig pluggy
INSTALLED := $(VENV)/installed
LINTERS := $(VENV)/linters
WRITERS := $(VENV)/writers

export OMP_NUM_THREADS := 1
# processes that tests start find compiled what others have imported
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-slow projects test-gpu wheels lint docs clean

demo: $(INSTALLED) ## Train a small GPT that does not fit as data parallel training; then compare memory and time.
	$(BIN)/python -m benchmarks.demo

test: $(INSTALLED) ## Run every test that needs no accelerator, but for the slow ones.
	$(BIN)/python -m pytest -m "not gpu and not slow" -n $(WORKERS) --dist loadgroup --durations=25 $(ARGS)

test-slow: $(INSTALLED) ## Run the slow tests: planning and fits of long models, more random steps.
	$(BIN)/python -m pytest -m "slow and not gpu" -n $(WORKERS) --timeout 900 $(ARGS)

projects: ## Train other projects by their own entry points, each in an environment of its own (NAME=darts: that one).
	cd tests && $(PYTHON) -m third_party.environments $(NAME)

test-gpu: export PYTEST_ADDOPTS := $(ARGS)
# GPU_PYTHON=python3 names an interpreter that has torch with CUDA: no virtual environment is made, nothing downloaded
test-gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(INSTALLED)) ## Run the tests that need a GPU, then the fits of the others on ranks that share it.
	timeout -s INT -k 30 $$(($(GPU_SECONDS) + 60)) \
	  $(GPU_PYTHON) -m benchmarks.gpu_once all laws graphs rest \
	  --budget $(GPU_SECONDS) --wheels $(WHEELS) --out $(GPU_RESULTS)

wheels: ## Fill $(WHEELS) with the pure Python that an interpreter for `make test-gpu` may lack; needs a network.
	$(PYTHON) -m pip wheel --quiet --no-deps --wheel-dir $(WHEELS) $(PURE_PYTHON)

lint: $(LINTERS) ## Check format, style and types.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: $(WRITERS) ## Draw the pictures of the site, build it into build/site, and check its links.
	$(BIN)/python -m benchmarks.site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "The site is in build/site: open build/site/index.html, or run python -m http.server -d build/site."

clean: ## Remove the virtual environment and caches.
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) --upgrade pip
	$(PIP_INSTALL) -c constraints.txt -e '.[test]'
	touch $@

$(WRITERS): $(INSTALLED)
	$(PIP_INSTALL) -c constraints.txt -e '.[docs]'
	touch $@

$(LINTERS): $(INSTALLED)
	$(PIP_INSTALL) -c constraints.txt -e '.[test,lint]'
	touch $@
