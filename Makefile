# Every target makes what it needs; a machine with Python 3.11 or newer and make is enough.
PYTHON ?= python3
VENV := .venv
OLDEST := .venv-oldest
BIN := $(VENV)/bin
PIP_FLAGS := --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test test-oldest lint clean

demo: $(VENV)/.installed
	$(BIN)/python examples/sentiment.py demo_output

test: $(VENV)/.installed
	$(BIN)/python -m pytest

# the oldest scikit-learn of pyproject.toml, in a folder that goes before the environment's own
test-oldest: $(VENV)/.installed $(OLDEST)/.installed
	PYTHONPATH=$(OLDEST) $(BIN)/python -m pytest tests/test_sklearn_contract.py tests/test_documents.py

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) $(OLDEST) demo_output build dist

$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "Installing into $(VENV) (about a minute)"
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'Python 3.11 or newer is needed; set PYTHON=')"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(PIP_FLAGS) torch
	$(BIN)/python -m pip install $(PIP_FLAGS) --editable ".[demo,plot,test,lint]"
	@touch $@

$(OLDEST)/.installed: $(VENV)/.installed constraints-oldest.txt
	$(BIN)/python -m pip install $(PIP_FLAGS) --no-deps --target $(OLDEST) --requirement constraints-oldest.txt
	@touch $@
