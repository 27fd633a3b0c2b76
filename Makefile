# make demo [ARGS="--model PATH_OR_HUB_ID"]   make test   make sanitize   make clean
# Each needs Python 3.11, g++ 12 and the package index; the second time they start at once.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
JOBS := $(shell nproc)
NATIVE_SOURCES := $(shell find csrc -type f) CMakeLists.txt setup.py

.PHONY: demo test sanitize clean

demo: $(VENV)/demo.stamp
	$(BIN)/python examples/pace_llm_basic.py $(ARGS)

test: $(VENV)/test.stamp
	$(BIN)/python -m pytest -n $(JOBS) $(ARGS)

# The C++ tests under AddressSanitizer and UndefinedBehaviorSanitizer, and again under ThreadSanitizer.
sanitize: $(VENV)/test.stamp
	PATH="$(abspath $(BIN)):$$PATH" tests/csrc/sanitize.sh $(ARGS)

clean:
	rm -rf build build-* $(VENV) *.egg-info pace/_C*.so .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/pyvenv.cfg:
	$(PYTHON) -m venv $(VENV)

# Dependencies again only when their list changes, the extension only when its sources do.
$(VENV)/demo.stamp: $(VENV)/pyvenv.cfg pyproject.toml constraints.txt $(NATIVE_SOURCES)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable .
	touch $@

$(VENV)/test.stamp: $(VENV)/pyvenv.cfg pyproject.toml constraints.txt $(NATIVE_SOURCES)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable .[test]
	touch $(VENV)/demo.stamp $@
