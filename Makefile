# Verbs of epcy. `make help` lists them.
#
# PYTHON  the python that `build`, `wheel` and the GPU verbs use, and of which `.venv` is made (default python3)
# RANKS   the rank counts of `make test` (default "1 2 3 4 8")
# ARGS    more arguments for pytest, the demo or the bench
# EPCY_CUDA, NVSHMEM_HOME  see tools/build_backend.py; EPCY_CUDA_ARCH, MAX_JOBS  see setup.py

PYTHON ?= python3
RANKS ?= 1 2 3 4 8
NP ?= 2
STEPS ?= 200
ARGS ?=

# Relative paths only, so that a folder with a space in its name needs no quoting.
VENV := .venv
PY := $(VENV)/bin/python
MPIEXEC := $(VENV)/bin/mpiexec
PYTEST := -m pytest

SOURCES := $(shell find epcy include src -name '*.pyx' -o -name '*.pxd' -o -name '*.[ch]' -path '*src/*' -o -name '*.h' \
             -o -name '*.cu' -o -name '*.cuh' 2>/dev/null)

# Many ranks share few cores: a BLAS that starts a thread a core in each of them is slower, never faster.
export OPENBLAS_NUM_THREADS ?= 1
export OMP_NUM_THREADS ?= 1
export MKL_NUM_THREADS ?= 1
# Open MPI alone reads these (4.x and 5.x): as root, and with more ranks than cores. Others ignore them.
export OMPI_ALLOW_RUN_AS_ROOT ?= 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM ?= 1
export OMPI_MCA_rmaps_base_oversubscribe ?= 1
export PRTE_MCA_rmaps_default_mapping_policy ?= :oversubscribe
export OMPI_MCA_osc ?= ^ucx

.DEFAULT_GOAL := help

help: ## print this list
	@sed -n 's/^\([a-zA-Z][a-zA-Z%_-]*\):[^#]*## \(.*\)/  make \1|\2/p' Makefile | \
	  while IFS='|' read -r verb what; do printf '%-18s %s\n' "$$verb" "$$what"; done

# ---- with the python given, nothing downloaded -------------------------------------------------------------

build: ## build in place with PYTHON; downloads nothing
	@"$(PYTHON)" -c 'import setuptools, Cython' || \
	  { echo 'make build: $(PYTHON) needs setuptools>=77 and cython>=3.1 (make test makes a .venv that has them)' >&2; exit 1; }
	"$(PYTHON)" setup.py -q build_ext --inplace

wheel: $(VENV)/.deps ## an sdist, and a wheel made from it, in dist/
	$(PY) -m pip install -q build
	$(PY) -m build -q

test-gpu: build ## the GPU tests on NP ranks with PYTHON and the mpiexec on PATH
	EPCY_TEST_BACKENDS=$${EPCY_TEST_BACKENDS:-host,nvshmem} mpiexec -n $(NP) "$(PYTHON)" $(PYTEST) $(wildcard tests/gpu) tests/mpi $(ARGS)

bench-gpu: build ## the bench on NP ranks with PYTHON, nvshmem backend
	mpiexec -n $(NP) "$(PYTHON)" -m mpi4py -m epcy.bench dispatch combine roundtrip --backend nvshmem --baseline $(ARGS)

# ---- with .venv, made here on the first call ---------------------------------------------------------------

demo: $(VENV)/.built ## train a mixture-of-experts language model on 4 ranks (sets up .venv first)
	$(MPIEXEC) -n 4 $(PY) -m mpi4py examples/moe_lm.py --steps $(STEPS) $(ARGS)

test: test-unit $(RANKS:%=test-%) ## every test: unit tests once, the MPI tests on 1, 2, 3, 4 and 8 ranks (sets up .venv first)

test-unit: $(VENV)/.built ## the tests of one process, the build and a third-party .pyx among them
	$(PY) $(PYTEST) tests/unit tests/cython $(ARGS)

test-%: $(VENV)/.built ## the MPI and property tests on % ranks: make test-3
	@case '$*' in *[!0-9]*) echo "make: no verb test-$*" >&2; exit 2;; esac
	$(MPIEXEC) -n $* $(PY) $(PYTEST) tests/mpi tests/property $(ARGS)

bench: $(VENV)/.built ## dispatch, combine and the roundtrip against MPI.Alltoallv on NP ranks
	$(MPIEXEC) -n $(NP) $(PY) -m mpi4py -m epcy.bench dispatch combine roundtrip --baseline $(ARGS)

docs: $(VENV)/.built ## write docs/api.md and docs/options.md anew
	$(PY) docs/generate.py

lint: $(VENV)/.lint ## ruff, cython-lint, clang-format, and gcc's warnings on the C sources
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) tools/lint_sources.py

format: $(VENV)/.lint ## let ruff and clang-format rewrite the sources
	$(PY) -m ruff format .
	$(PY) tools/lint_sources.py --fix

type: $(VENV)/.lint $(VENV)/.built ## mypy --strict, and the stubs against the built modules
	$(PY) -m mypy --strict -p epcy
	$(PY) -m mypy.stubtest --ignore-missing-stub --allowlist tools/stubtest.txt --ignore-unused-allowlist \
	  $(subst /,.,$(basename $(shell grep -rL 'distutils: libraries = epcy_cuda' epcy --include='*.pyx')))

clean: ## remove what was built; .venv stays, and is brought up to date by the next verb that needs it
	rm -f $(VENV)/.built $(VENV)/.deps
	rm -rf build dist *.egg-info epcy/_build.json .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find epcy examples tests tools -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
	find epcy -name '*.so' -exec rm -f {} +

distclean: clean ## clean, and .venv too
	rm -rf $(VENV)

# .venv is made anew when PYTHON is another one, or when the folder was moved (its paths are absolute).
$(VENV)/.python: FORCE
	@base="$$("$(PYTHON)" -c 'import sys; print(getattr(sys, "_base_executable", sys.executable))')" && \
	want="$$("$$base" -c 'import os, sys; print(sys.version, sys.base_prefix, os.getcwd())')" && \
	if [ "$$(cat $@ 2>/dev/null)" != "$$want" ]; then \
	  echo "making $(VENV) of $$base" && rm -rf $(VENV) && "$$base" -m venv $(VENV) && printf '%s\n' "$$want" > $@; \
	fi

# Build requirements first, and no isolation: what pip compiles is what later calls of make find up to date.
$(VENV)/.deps: $(VENV)/.python setup.cfg pyproject.toml
	$(PY) -m pip install -q --disable-pip-version-check 'setuptools>=77' 'cython>=3.1'
	$(PY) -m pip install -q --disable-pip-version-check --no-build-isolation -e '.[mpi,test,demo]'
	@touch $@

$(VENV)/.built: $(VENV)/.deps setup.py tools/build_backend.py $(SOURCES)
	$(PY) setup.py -q build_ext --inplace
	@touch $@

$(VENV)/.lint: $(VENV)/.deps
	$(PY) -m pip install -q --disable-pip-version-check -e '.[lint]' --no-build-isolation
	@touch $@

FORCE:
.PHONY: help build wheel test-gpu bench-gpu demo test test-unit bench docs lint format type clean distclean FORCE
