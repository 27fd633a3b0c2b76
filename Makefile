# make demo [ARGS="--model PATH_OR_HUB_ID"]   make check   make test   make conformance   make format   make emulate   make sanitize
# make wheel   make clean
# Each needs Python 3.11 and the package index, all but format and clean g++ 12; the second time they start at once.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
JOBS := $(shell nproc)
NATIVE_SOURCES := $(shell find csrc -type f) CMakeLists.txt setup.py

# The quick tier: formatting and layers, the ops on the tables of real CPUs, the engine on the fake model, one
# architecture against transformers, the bundled model end to end. Under 90 seconds on two cores, once the extension is
# built.
QUICK_TESTS := tests/project/test_formatting.py tests/project/test_layering.py tests/project/test_stub.py \
    tests/ops tests/graph tests/llm/engine tests/llm/decoding tests/llm/test_configs.py tests/llm/models/test_oracle.py \
    tests/test_end_to_end.py
QUICK_WORDS := "(not test_oracle or llama) and not stress and not emulated"

.PHONY: demo check test conformance format emulate sanitize wheel clean

demo: $(VENV)/demo.stamp
	$(BIN)/python examples/pace_llm_basic.py $(ARGS)

test: $(VENV)/test.stamp
	$(BIN)/python -m pytest -n $(JOBS) $(ARGS)

check: $(VENV)/test.stamp
	$(BIN)/python -m pytest -n $(JOBS) $(QUICK_TESTS) -k $(QUICK_WORDS) $(ARGS)

# Suites that others wrote, against `pace serve`; they are downloaded into a cache outside the tree. ARGS names some of
# them. It takes a quarter of an hour, and writes the table of docs/serving.md.
conformance: $(VENV)/test.stamp
	$(BIN)/python -m tests.conformance $(ARGS)

# Needs no extension, so that sources which do not compile yet can be formatted.
format: $(VENV)/format.stamp
	$(BIN)/ruff format --quiet .
	$(BIN)/ruff check --fix --quiet .
	find csrc tests/csrc -name '*.cpp' -o -name '*.h' -o -name '*.inl' | xargs $(BIN)/clang-format -i

# All C++ tests of kernels on the least emulated CPU of each table; make test has most of them.
emulate: $(VENV)/test.stamp
	PACE_EMULATE_ALL=1 $(BIN)/python -m pytest -n $(JOBS) tests/test_csrc.py -k least_cpu $(ARGS)

# The C++ tests under AddressSanitizer and UndefinedBehaviorSanitizer, and again under ThreadSanitizer.
sanitize: $(VENV)/test.stamp
	PATH="$(abspath $(BIN)):$$PATH" tests/csrc/sanitize.sh $(ARGS)

# In dist/, for machines with this Python: tests/project/test_wheel.py says what it may need of them.
wheel: $(VENV)/pyvenv.cfg
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir dist .

clean:
	rm -rf build build-* dist $(VENV) *.egg-info pace/_C*.so .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/pyvenv.cfg:
	$(PYTHON) -m venv $(VENV)

# Dependencies again only when their list changes, the extension only when its sources do.
$(VENV)/demo.stamp: $(VENV)/pyvenv.cfg pyproject.toml constraints.txt $(NATIVE_SOURCES)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable .
	touch $@

$(VENV)/format.stamp: $(VENV)/pyvenv.cfg pyproject.toml
	$(BIN)/pip install --quiet $$($(BIN)/python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['format'])")
	touch $@

$(VENV)/test.stamp: $(VENV)/pyvenv.cfg pyproject.toml constraints.txt $(NATIVE_SOURCES)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable .[test]
	touch $(VENV)/demo.stamp $(VENV)/format.stamp $@
