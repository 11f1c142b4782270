# Every target makes what it needs; a machine with Python 3.11 or newer and make is enough.
PYTHON ?= python3
VENV := .venv
OLDEST := .venv-oldest
BENCH := .venv-bench
BIN := $(VENV)/bin
PIP_FLAGS := --quiet --disable-pip-version-check --constraint constraints.txt

# Tests run side by side, each with one thread: threads that wait for each other on a busy machine make
# small models many times slower. Tests of threads set their number themselves.
PYTEST := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest --numprocesses 2 --dist loadscope

.PHONY: demo test test-oldest bench lint clean

demo: $(VENV)/.installed
	$(BIN)/python examples/sentiment.py demo_output

test: $(VENV)/.installed
	$(PYTEST)

# the oldest scikit-learn of pyproject.toml, in a folder that goes before the environment's own
test-oldest: $(VENV)/.installed $(OLDEST)/.installed
	PYTHONPATH=$(OLDEST) $(PYTEST) tests/test_sklearn_contract.py tests/test_documents.py

# a look at speed beside other libraries, in a few minutes; figures come from the long forms
bench: $(BENCH)/.installed
	$(BENCH)/bin/python benchmarks/bench_throughput.py --quick
	$(BENCH)/bin/python benchmarks/bench_latency.py --quick
	$(BENCH)/bin/python benchmarks/bench_layers.py --quick
	$(BENCH)/bin/python benchmarks/bench_scale.py --quick
	$(BENCH)/bin/python benchmarks/bench_cold_start.py --quick

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) $(OLDEST) $(BENCH) demo_output build dist

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

$(BENCH)/.installed: pyproject.toml constraints.txt benchmarks/requirements.txt
	@echo "Installing into $(BENCH) (a few minutes)"
	$(PYTHON) -m venv $(BENCH)
	$(BENCH)/bin/python -m pip install $(PIP_FLAGS) torch
	$(BENCH)/bin/python -m pip install $(PIP_FLAGS) --no-deps --requirement benchmarks/requirements.txt
	$(BENCH)/bin/python -m pip install $(PIP_FLAGS) --editable .
	@touch $@
