# Each target does its own set-up: a virtual environment in .venv with the tested versions.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint clean

demo: $(VENV)/ready
	$(BIN)/python examples/demo.py

test: $(VENV)/ready
	$(BIN)/python -m pytest -q

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt -e '.[torch,demo,test]'
	touch $@

clean:
	rm -rf $(VENV)
