# One command per wish:
#
#   make demo     set up .venv, build, and search real text with a late-interaction model
#   make test     everything this machine can check: build, lint, types, C++ and Python tests
#   make bench    timings against the peers that are installed
#   make wheel    wheels in dist/: for the CUDA toolkit at hand and for CPU (WHEELS=cpu: that one alone)
#   make docs     the README's tables and plots, from bench/results
#   make build | lint | types | ctest | pytest | format | test-wheel | clean
#
# Everything that is built or fetched lies in .venv; `make build` adds late_interaction/*.so, `make wheel` dist/.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
CMAKE_BUILD := $(VENV)/build/cmake
SOURCES := $(shell find csrc late_interaction -name '*.py' -o -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh') \
	setup.py pyproject.toml VERSION
CXX_FILES = $$(find csrc tests/cpp bench -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')
PIP_INSTALL := $(PY) -m pip install --disable-pip-version-check --no-warn-script-location

export PYTHONPYCACHEPREFIX := $(CURDIR)/$(VENV)/cache/python
export MYPY_CACHE_DIR := $(VENV)/cache/mypy
export RUFF_CACHE_DIR := $(VENV)/cache/ruff
export HYPOTHESIS_STORAGE_DIRECTORY := $(CURDIR)/$(VENV)/cache/hypothesis
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)

.DELETE_ON_ERROR:
.PHONY: demo test bench wheel docs build lint types ctest pytest format test-wheel mutants clean

# ---- environments: a stamp for each requirements file ----

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "late_interaction needs Python 3.10 or newer; name one with make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.%-requirements: requirements/%.txt requirements/build.txt | $(PY)
	$(PIP_INSTALL) -r $<
	@touch $@

# Several releases of one package, side by side. Without them their tests are skipped, and say so.
$(VENV)/.compat-releases: requirements/compat.txt | $(PY)
	@rm -rf $(VENV)/compat
	set -- $$(grep -v '^#' $<); for release; do \
	  $(PIP_INSTALL) --quiet --no-deps --no-compile --target $(VENV)/compat/$$release $$release || exit 0; \
	done; touch $@

# What changes the source for make mutants, beside the environment whose PyTorch the tests use.
$(VENV)/.mutation-tools: requirements/mutants.txt | $(VENV)/.dev-requirements
	$(PIP_INSTALL) --quiet --upgrade --target $(VENV)/mutants/site -r $<
	@touch $@

# ---- what a user runs ----

# The demo runs what a user would: the package as installed, not the checkout.
$(VENV)/.installed: $(SOURCES) | $(VENV)/.build-requirements
	$(PIP_INSTALL) --verbose --no-build-isolation --no-deps --force-reinstall .
	@touch $@

demo: $(VENV)/.installed $(VENV)/.demo-requirements
	$(PY) tools/run_installed.py demo

# ---- what a developer runs ----

build: | $(VENV)/.build-requirements
	$(PY) setup.py --quiet build_ext --inplace

# pytest last: its summary says what was skipped and why.
test: lint types build
	$(MAKE) --no-print-directory ctest
	$(MAKE) --no-print-directory pytest

lint: | $(VENV)/.dev-requirements
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(VENV)/bin/clang-format --dry-run --Werror $(CXX_FILES)

types: | $(VENV)/.dev-requirements
	$(PY) -m mypy

ctest: | $(VENV)/.dev-requirements
	$(VENV)/bin/cmake -S . -B $(CMAKE_BUILD) -G Ninja -DLATE_INTERACTION_PYTHON=ON \
	  -DPython_EXECUTABLE=$(CURDIR)/$(PY) -Dpybind11_DIR=$$($(PY) -m pybind11 --cmakedir) \
	  -DCMAKE_PREFIX_PATH=$$($(PY) -c 'import torch; print(torch.utils.cmake_prefix_path)')
	$(VENV)/bin/cmake --build $(CMAKE_BUILD)
	$(VENV)/bin/ctest --test-dir $(CMAKE_BUILD) --output-on-failure

pytest: build $(VENV)/.compat-releases | $(VENV)/.dev-requirements $(VENV)/.demo-requirements
	$(PY) -m pytest -n 2

bench: build | $(VENV)/.bench-requirements
	$(PY) -m bench

docs: | $(VENV)/.dev-requirements
	$(PY) -m bench.report

format: | $(VENV)/.dev-requirements
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	$(VENV)/bin/clang-format -i $(CXX_FILES)

wheel: | $(VENV)/.wheel-requirements
	$(PY) tools/make_wheels.py $(WHEELS)

test-wheel: wheel | $(VENV)/.dev-requirements
	$(PY) tests/packaging/matrix.py dist/*.whl

# MODULE=late_interaction/topk.py: that one alone, in minutes. Without it all of them, and then the constants of
# csrc/cpu: a night. A run that was stopped goes on where it was.
mutants: build $(VENV)/.mutation-tools
	$(PY) -u tools/mutate_python.py $(MODULE)
	$(if $(MODULE),,$(PY) -u tools/mutate_constants.py)

clean:
	rm -rf $(VENV)/build $(VENV)/cache $(VENV)/.installed build dist late_interaction/*.so
