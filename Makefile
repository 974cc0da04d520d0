# `make demo` and `make test` set up what they need in .venv; nothing else has to be installed but Python 3.11, pip and make.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
DEMO ?= build/demo
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test lint types wheel clean

demo: $(VENV)/.core
	rm -rf $(DEMO)
	$(BIN)/trajstore demo $(DEMO)
	$(BIN)/trajstore info $(DEMO)/buffer

test: $(VENV)/.test
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(VENV)/.test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(VENV)/.test
	$(BIN)/mypy

# the wheel, in a clean environment and from outside the checkout
wheel: $(VENV)/.test
	rm -rf build/wheel build/clean && mkdir -p build/wheel
	$(BIN)/pip wheel -q --no-deps --wheel-dir build/wheel .
	$(PYTHON) -m venv build/clean
	build/clean/bin/pip install -q -c .ci/constraints.txt build/wheel/trajstore-*.whl
	cd build/wheel && ../clean/bin/python -c "import trajstore.converters, trajstore.viz" && ../clean/bin/trajstore demo demo
	cd build/wheel && ../clean/bin/trajstore verify demo/buffer && ../clean/bin/python -m trajstore.replay_buffer --load-path demo/pt

$(VENV)/.core: pyproject.toml .ci/constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c .ci/constraints.txt -e .
	touch $@

# RLinf is the tests' oracle; its own requirements are far more than its replay buffer needs
$(VENV)/.test: $(VENV)/.core
	$(BIN)/pip install -q -c .ci/constraints.txt -e '.[test,lint]'
	$(BIN)/pip install -q --no-deps rlinf==0.3.0
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
