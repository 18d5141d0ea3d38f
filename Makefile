# Needs Python 3.11 or newer and make; everything else goes into .venv.
PYTHON ?= python3
VENV := .venv
PIP := $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
DEFINITION := pyproject.toml constraints.txt

.PHONY: search test check format clean

search: $(VENV)/.search ## make the environment and find the best tree for the bundled default
	$(VENV)/bin/treeopt search --budget 64

test: $(VENV)/.dev ## make the environment and run every check
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	OMP_NUM_THREADS=1 $(VENV)/bin/pytest -n 2 --dist loadgroup

format: $(VENV)/.dev ## put the code into the house's form
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean: ## remove the environment
	rm -rf $(VENV)

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit("treeopt needs Python 3.11 or newer" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.search: $(VENV)/bin/python $(DEFINITION)
	$(PIP) -e .
	touch $@

$(VENV)/.dev: $(VENV)/bin/python $(DEFINITION)
	$(PIP) -e '.[dev]'
	touch $@ $(VENV)/.search
