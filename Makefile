# One command per wish:
#
#   make demo     set up .venv, build for the GPUs of this machine (or the CPU alone), and search real text with a
#                 late-interaction model
#   make test     builds as make demo does, and runs the tests that take no longer than ten minutes on two cores
#   make ci       what CI runs: make test, then what it leaves out, in half an hour: lint, types, the web site, the C++
#                 tests, CUDA code for 8.0 and 9.0a where nvcc is (no GPU needed), and the tests of all of these
#   make nightly  make ci with more and other random examples, then make crash, asan, recipes and sentinel
#   make bench    timings against the peers that are installed (python -m bench --help: all that can be measured)
#   make wheel    dist/: wheels for every GPU, with the CUDA toolkit at hand, and for CPU, and the source
#                 distribution (WHEELS=cpu: that one alone)
#   make hub      build/torch-stable-abi*: the layout of Hugging Face's kernel hub, with the libraries that make build
#                 builds (LATE_INTERACTION_NAMESPACE=name: with operators torch.ops.name.*)
#   make docs     the README's tables and plots, from bench/results
#   make site     the documentation as a web site, in .venv/build/site; a warning of its builder is an error
#   make browse   opens that site in Chromium (installs it as root on Debian), and writes pictures of its pages
#   make asan     the CPU tests on a library built with the address and undefined-behaviour sanitizers
#   make crash    kills a process that changes a corpus a thousand times, and reads one for ten minutes while it changes
#   make sentinel   which functions of the newest Sentence Transformers, PyLate, colpali-engine, Transformers, mteb and
#                 vLLM compute a MaxSim, and which patch reaches each; the patches' tests on these releases
#                 (downloads 360 MB)
#   make st-tests   Sentence Transformers' own tests with its patch (downloads 60 MB, and clones its repository)
#   make recipes   trains with the trainers of Sentence Transformers, PyLate and colpali-engine (downloads 160 MB)
#   make fast-plaid   the tests that build and search an index with fast-plaid (downloads 4.7 GB)
#   make lancedb  the tests with LanceDB, Arrow, Qdrant and Faiss, in an environment with them (downloads 150 MB)
#   make ray      the tests on a local Ray cluster, in an environment with Ray Data (downloads 130 MB)
#   make aarch64  cross-builds the CPU library for aarch64; its C++ tests under qemu-user (downloads 150 MB)
#   make aarch64-wheel   dist/: a wheel for aarch64, built on this machine
#   make aarch64-tests   its CPU tests from Python under qemu-user, with PyTorch's own wheel (an hour)
#   make compile_commands   compile_commands.json, for clangd and other editors; builds nothing; without nvcc no CUDA units
#   make build | requirements | cuda | checks | lint | types | ctest | format | test-wheel | clean
#
# Everything that is built or fetched lies in .venv; `make build` adds late_interaction/*.so, `make wheel` dist/.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
CMAKE_BUILD := $(VENV)/build/cmake
ASAN_BUILD := $(VENV)/build/asan
COMMANDS := $(VENV)/build/commands
FAST_PLAID := $(VENV)/env/fast-plaid
PYLATE := $(VENV)/pylate
LANCEDB := $(VENV)/env/lancedb
RAY := $(VENV)/env/ray
AARCH64 := $(VENV)/env/aarch64
AARCH64_BUILD := $(VENV)/build/aarch64
ST_TESTS := $(VENV)/env/sentence-transformers
SITE := $(VENV)/site
SITE_BUILD := $(VENV)/build/site
TORCH_CMAKE = $$($(PY) -c 'import torch; print(torch.utils.cmake_prefix_path)')
SOURCES := $(shell find csrc late_interaction -name '*.py' -o -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh') \
	setup.py pyproject.toml VERSION
CXX_FILES = $$(find csrc tests/cpp bench examples -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')
# Modules are compiled to bytecode when they are first imported: most never are.
PIP_INSTALL := $(PY) -m pip install --disable-pip-version-check --no-warn-script-location --no-compile
# Some tests wait, so there are three processes on two cores; threads that wait for others leave them the cores.
PYTEST := OMP_WAIT_POLICY=passive $(PY) -m pytest -n 3 --dist worksteal

# Container images often turn bytecode off, and each of the many processes of the tests would compile PyTorch's modules
# again: 3.7 s of CPU time an import, not 1.4. It lies in .venv alone.
unexport PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX := $(CURDIR)/$(VENV)/cache/python
export MYPY_CACHE_DIR := $(VENV)/cache/mypy
export RUFF_CACHE_DIR := $(VENV)/cache/ruff
export HYPOTHESIS_STORAGE_DIRECTORY := $(CURDIR)/$(VENV)/cache/hypothesis
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)

.DELETE_ON_ERROR:
.PHONY: demo test ci nightly build requirements cuda checks bench wheel hub docs site browse lint ruff clang-format actionlint includes types ctest \
  asan crash sentinel fast-plaid st-tests recipes lancedb ray aarch64 aarch64-wheel aarch64-tests format compile_commands test-wheel clean

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
	  $(PIP_INSTALL) --quiet --no-deps --target $(VENV)/compat/$$release $$release || exit 0; \
	done; touch $@

# fast-plaid's compiled part runs under one release of PyTorch, which is not ours: an environment of its own.
$(FAST_PLAID)/.installed: requirements/fast-plaid.txt | $(PY)
	@rm -rf $(FAST_PLAID)
	$(PY) -m venv $(FAST_PLAID)
	$(FAST_PLAID)/bin/python -m pip install --disable-pip-version-check --no-compile -r $<
	@touch $@

# What renders docs/ wants other releases of some packages than the demo: an environment of its own.
$(SITE)/.installed: requirements/site.txt | $(PY)
	@rm -rf $(SITE)
	$(PY) -m venv $(SITE)
	$(SITE)/bin/python -m pip install --disable-pip-version-check --no-compile -r $<
	@touch $@

# PyLate pins releases that the demo's exclude. PyTorch is that of .venv: the .pth file puts it behind what is here.
$(PYLATE)/.installed: requirements/pylate.txt $(VENV)/.dev-requirements | $(VENV)/.demo-requirements
	@rm -rf $(PYLATE)
	$(PY) -m venv $(PYLATE)
	$(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	  > $$($(PYLATE)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch.pth
	$(PYLATE)/bin/python -m pip install --disable-pip-version-check --no-compile -r $<
	$(PYLATE)/bin/python -m pip install --disable-pip-version-check --no-compile --no-deps pylate==1.6.0
	@touch $@

# What its tests want beside the demo's packages. The .pth file puts those of .venv behind what is here.
$(ST_TESTS)/.installed: requirements/st-tests.txt $(VENV)/.dev-requirements $(VENV)/.demo-requirements
	@rm -rf $(ST_TESTS)
	$(PY) -m venv $(ST_TESTS)
	$(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	  > $$($(ST_TESTS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/venv.pth
	$(ST_TESTS)/bin/python -m pip install --disable-pip-version-check --no-compile -r $<
	@touch $@

# Databases that tests open in their own process, and Ray, whose workers are processes of their own. The .pth file
# puts the packages of .venv behind what is here.
$(LANCEDB)/.installed $(RAY)/.installed: $(VENV)/env/%/.installed: requirements/%.txt $(VENV)/.dev-requirements
	@rm -rf $(@D)
	$(PY) -m venv $(@D)
	$(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	  > $$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/venv.pth
	$(@D)/bin/python -m pip install --disable-pip-version-check --no-compile --quiet -r $<
	@touch $@

# make ci wants them. Where no registry is reachable their tests are skipped, and say so.
$(VENV)/.engines: requirements/lancedb.txt requirements/ray.txt requirements/st-tests.txt $(VENV)/.dev-requirements
	-$(MAKE) --no-print-directory $(LANCEDB)/.installed $(RAY)/.installed $(ST_TESTS)/.installed
	@touch $@

# Packages for aarch64, among them PyTorch: to link against, and to run under qemu-user.
$(AARCH64)/.installed: requirements/aarch64.txt | $(PY)
	@rm -rf $(AARCH64)
	$(PIP_INSTALL) --quiet --only-binary=:all: --python-version 3.11 --platform manylinux_2_28_aarch64 \
	  --platform manylinux_2_27_aarch64 --platform manylinux_2_17_aarch64 --platform manylinux2014_aarch64 \
	  --target $(AARCH64) -r $<
	@touch $@

# The interpreter that has them.
$(AARCH64)/.python: tools/aarch64_python.py $(AARCH64)/.installed
	$(PY) $< $(AARCH64)
	@touch $@

$(SITE)/.browse: requirements/browse.txt $(SITE)/.installed
	$(SITE)/bin/python -m pip install --disable-pip-version-check --no-compile -r $<
	@touch $@

# ---- what a user runs ----

# The demo runs what a user would: the package as installed, not the checkout.
$(VENV)/.installed: $(SOURCES) | $(VENV)/.build-requirements
	$(PIP_INSTALL) --verbose --no-build-isolation --no-deps --force-reinstall .
	@touch $@

demo: $(VENV)/.installed $(VENV)/.demo-requirements
	$(PY) tools/run_installed.py demo

# ---- what a developer runs ----

# For the GPUs of this machine, if it has nvcc. Without MAKEFLAGS, in which ninja finds the job server of make test,
# which is not open to it.
build: | $(VENV)/.build-requirements
	MAKEFLAGS= $(PY) setup.py --quiet build_ext --inplace

# The build begins as soon as its own requirements are there, and what the tests want is fetched meanwhile. pytest
# last: its summary says what was skipped and why.
test: | $(VENV)/.build-requirements
	$(MAKE) --no-print-directory -j 2 build requirements
	$(PYTEST) --stage test

# Both requirements are installed into one environment, so one after the other.
requirements:
	$(MAKE) --no-print-directory $(VENV)/.dev-requirements
	$(MAKE) --no-print-directory $(VENV)/.demo-requirements

# tests/selection.py says which tests the stages have. CUDA takes most of the time. The checks beside it wait for
# downloads, or have work for one core.
ci: test
	$(MAKE) --no-print-directory -j 2 cuda checks
	$(PYTEST) --stage ci

# In place of the library for the GPUs here. Without nvcc, the CPU library alone.
cuda: export LATE_INTERACTION_CUDA_ARCHS ?= 8.0;9.0a
cuda: build

checks: lint types site ctest $(VENV)/.compat-releases $(VENV)/.engines

nightly: export LATE_INTERACTION_NIGHTLY := 1
nightly: ci
	$(MAKE) --no-print-directory crash asan recipes sentinel

# Each part is a hook of .pre-commit-config.yaml, by the same name.
lint: ruff clang-format actionlint includes

ruff: | $(VENV)/.dev-requirements
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

clang-format: | $(VENV)/.dev-requirements
	$(VENV)/bin/clang-format --dry-run --Werror $(CXX_FILES)

actionlint: | $(VENV)/.dev-requirements
	if [ -x $(VENV)/bin/actionlint ]; then $(VENV)/bin/actionlint .github/workflows/*.yml; \
	else echo "skipped: actionlint is not installed: workflows are not checked"; fi

includes: | $(VENV)/.dev-requirements
	$(PY) -m pytest --quiet --noconftest tests/build/test_includes.py

types: | $(VENV)/.dev-requirements
	$(PY) -m mypy

ctest: | $(VENV)/.dev-requirements
	$(VENV)/bin/cmake -S . -B $(CMAKE_BUILD) -G Ninja -DLATE_INTERACTION_PYTHON=ON \
	  -DPython_EXECUTABLE=$(CURDIR)/$(PY) -Dpybind11_DIR=$$($(PY) -m pybind11 --cmakedir) \
	  -DCMAKE_PREFIX_PATH=$(TORCH_CMAKE)
	MAKEFLAGS= $(VENV)/bin/cmake --build $(CMAKE_BUILD)
	$(VENV)/bin/ctest --test-dir $(CMAKE_BUILD) --output-on-failure

# The library goes to a folder of its own and takes the place of the other one in these processes alone. It has
# emulated tile registers, so that the kernels of AMX are tested on CPUs without it.
asan: | $(VENV)/.dev-requirements $(VENV)/.demo-requirements
	$(VENV)/bin/cmake -S . -B $(ASAN_BUILD) -G Ninja -DLATE_INTERACTION_TESTS=OFF -DCMAKE_CXX_FLAGS_RELEASE=-O1 \
	  -DCMAKE_CXX_FLAGS="-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -g1 \
    -I$(CURDIR)/tests/cpp '-DLATE_INTERACTION_TILES=<emulated_tiles.h>'" \
	  -DCMAKE_PREFIX_PATH=$(TORCH_CMAKE)
	$(VENV)/bin/cmake --build $(ASAN_BUILD) --target late_interaction
	$(PY) tests/sanitized.py $(ASAN_BUILD)/liblate_interaction.so -n 2

crash: | $(VENV)/.dev-requirements
	$(PY) -m tests.corpus_crash kill $(or $(KILLS),1000)
	$(PY) -m tests.corpus_crash read $(or $(READ_SECONDS),600)

# Beside the releases of requirements/compat.txt, where tests look for them from then on.
sentinel: build requirements $(VENV)/.compat-releases
	$(PY) -m tools.maxsim_sentinel $(VENV)/compat
	$(PYTEST) tests/integrations

fast-plaid: build $(FAST_PLAID)/.installed
	$(FAST_PLAID)/bin/python -m pytest tests/search/test_fast_plaid.py

# CHECKOUT: a clone of its repository that is there already.
st-tests: build $(ST_TESTS)/.installed
	$(ST_TESTS)/bin/python tools/st_own_tests.py $(CHECKOUT)

recipes: build $(ST_TESTS)/.installed $(PYLATE)/.installed $(VENV)/.compat-releases
	$(PY) -m pytest tests/docs/test_example_programs.py -k train_

lancedb: build $(LANCEDB)/.installed
	$(LANCEDB)/bin/python -m pytest tests/search/test_lancedb.py tests/search/test_corpus_arrow.py tests/search/test_corpus_living.py tests/search/test_muvera.py

ray: build $(RAY)/.installed
	$(RAY)/bin/python -m pytest tests/search/test_ray.py

# Not run: ops, which loads PyTorch, whose libraries want a zlib that the cross compiler does not bring.
aarch64: $(AARCH64)/.installed | $(VENV)/.dev-requirements
	cmake -G Ninja -S . -B $(AARCH64_BUILD) -DCMAKE_TOOLCHAIN_FILE=cmake/aarch64.cmake \
	  -DCMAKE_PREFIX_PATH=$(CURDIR)/$(AARCH64)/torch/share/cmake
	cmake --build $(AARCH64_BUILD)
	ctest --test-dir $(AARCH64_BUILD) --output-on-failure -E '^(ops|install|consumer)$$'

# WHEELS=aarch64-cu130: for the CUDA toolkit at hand.
aarch64-wheel: WHEELS ?= aarch64-cpu
aarch64-wheel: $(AARCH64)/.python | $(VENV)/.wheel-requirements
	$(PY) tools/make_wheels.py $(WHEELS)

# TESTS="tests/maxsim/test_forward.py -k masks -n 2": these alone.
aarch64-tests: aarch64-wheel
	$(PY) tests/emulated.py $(AARCH64)/root/usr/bin/python dist/late_interaction-*+cpu-*_aarch64.whl $(TESTS)

bench: build | $(VENV)/.bench-requirements
	$(PY) -m bench run

docs: | $(VENV)/.bench-requirements
	$(PY) -m bench report

site: $(SITE)/.installed
	NO_MKDOCS_2_WARNING=1 $(SITE)/bin/mkdocs build --quiet --strict --site-dir $(SITE_BUILD)

browse: site $(SITE)/.browse
	command -v chromium || command -v google-chrome || apt-get install --yes --no-install-recommends chromium
	$(SITE)/bin/python tools/site/browse.py $(SITE_BUILD) $(VENV)/build/site-pictures

format: | $(VENV)/.dev-requirements
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	$(VENV)/bin/clang-format -i $(CXX_FILES)

compile_commands: | $(VENV)/.dev-requirements
	$(VENV)/bin/cmake -S . -B $(COMMANDS) -G Ninja -DCMAKE_EXPORT_COMPILE_COMMANDS=ON -DLATE_INTERACTION_PYTHON=ON \
	  -DLATE_INTERACTION_CUDA=$$(command -v nvcc >/dev/null && echo ON || echo OFF) -DLATE_INTERACTION_CUDA_ARCHITECTURES=90a \
	  -DPython_EXECUTABLE=$(CURDIR)/$(PY) -Dpybind11_DIR=$$($(PY) -m pybind11 --cmakedir) \
	  -DCMAKE_PREFIX_PATH=$(TORCH_CMAKE)
	ln -sf $(COMMANDS)/compile_commands.json .

wheel: | $(VENV)/.wheel-requirements
	$(PY) tools/make_wheels.py $(WHEELS)

# In a folder of its own: the libraries in place keep their namespace.
hub: | $(VENV)/.build-requirements
	rm -rf $(VENV)/build/hub build/torch-stable-abi*
	$(PY) setup.py --quiet build_ext --build-lib $(VENV)/build/hub
	$(PY) tools/make_hub.py --libraries $(VENV)/build/hub/late_interaction

test-wheel: wheel | $(VENV)/.dev-requirements
	$(PY) tests/packaging/matrix.py dist/*.whl dist/*.tar.gz

clean:
	rm -rf $(VENV)/build $(VENV)/cache $(VENV)/.installed build dist late_interaction/*.so
