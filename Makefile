# Each target does its own set-up: a virtual environment in .venv with the tested versions. The GPU
# targets run in the Python given, which has torch and JAX for CUDA: make test-gpu PYTHON=python
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
IPEX_VENV := .venv-ipex
DOCS_VENV := .venv-docs

.PHONY: demo docs test test-deep lint test-ipex test-gpu bench-cpu bench-gpu clean

demo: $(VENV)/ready
	$(BIN)/python examples/demo.py

test: $(VENV)/ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal

# Hours: 20 000 examples a backend, 50 000 hostile calls, mutants, ten minutes of threads.
test-deep: $(VENV)/ready
	OMP_NUM_THREADS=1 HYPOTHESIS_PROFILE=deep \
		$(BIN)/python -m pytest -q -rP -n 2 --dist worksteal -m deep tests

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

# Into .site. Warnings, and links that lead nowhere, are errors.
docs: $(DOCS_VENV)/ready
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict

test-ipex: $(IPEX_VENV)/ready
	OMP_NUM_THREADS=1 $(IPEX_VENV)/bin/python -m pytest -q -n 2 --dist worksteal \
		--ignore pagedattn_torch/transformers

test-gpu:
	XLA_PYTHON_CLIENT_PREALLOCATE=false $(PYTHON) -m pytest -q -n 14 --dist worksteal -p no:benchmark tests

bench-cpu: $(VENV)/ready $(IPEX_VENV)/ready
	PYTHONPATH=examples $(BIN)/python -m benchmarks.cpu -o docs/results

bench-gpu:
	PYTHONPATH=examples:. XLA_PYTHON_CLIENT_PREALLOCATE=false $(PYTHON) -m benchmarks.gpu -o docs/results

# xformers' own requirements would replace torch; on a CPU only its masks are used.
$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt -e '.[torch,demo,test]'
	$(BIN)/pip install -q -c constraints.txt --no-deps xformers
	touch $@

# 7 GB: the only torch 2.8 in the package index is the one for CUDA.
$(IPEX_VENV)/ready: pyproject.toml constraints-ipex.txt
	$(PYTHON) -m venv $(IPEX_VENV)
	$(IPEX_VENV)/bin/pip install -q -c constraints-ipex.txt -e '.[ipex]' hypothesis pytest pytest-xdist
	touch $@

# The pages are made from the sources as text: nothing of the library is imported.
$(DOCS_VENV)/ready: constraints-docs.txt
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/pip install -q -r constraints-docs.txt
	touch $@

clean:
	rm -rf $(VENV) $(IPEX_VENV) $(DOCS_VENV) .site
