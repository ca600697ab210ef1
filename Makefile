# Each target does its own set-up: a virtual environment in .venv with the tested versions. The GPU
# targets run in the Python given, which has torch and JAX for CUDA: make test-gpu PYTHON=python
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
IPEX_VENV := .venv-ipex
DOCS_VENV := .venv-docs
DEMO_VENV := .venv-demo
SERVE_VENV := .venv-serve
OLDEST_VENV := .venv-oldest
NEWEST_VENV := .venv-newest
HOPPER_VENV := .venv-hopper
SMOKE_VENV := .venv-smoke
CPU_VENV := .venv-cpu
ARM_VENV := .venv-arm
# Modules become bytecode when they are imported, which most of torch's never are.
INSTALL := install -q --no-compile
# What test-deep runs.
DEEP ?= tests/deep
# Tests that need JAX alone.
WITHOUT_TORCH := tests/pool tests/core/test_batch.py tests/core/test_cache.py tests/core/test_jit.py \
	tests/core/test_state.py tests/core/test_across.py tests/backends/test_properties.py \
	$(wildcard tests/backends/test_mosaic*.py)
# Tests of the core, and of the CPU's kernel, that need JAX and Numba alone.
ON_CPU := $(filter-out tests/backends/test_mosaic%,$(WITHOUT_TORCH)) $(addprefix tests/backends/test_, \
	bad_values.py bias.py cascade.py cpu_threads.py grad.py grids.py numba.py quantised.py sinks.py)
ON_ARM := tests/core/test_documents.py $(addprefix tests/backends/test_, \
	bias.py cpu_threads.py grad.py numba.py quantised.py sinks.py) tests/core/test_command.py
# Tests of torch's side, for its older version; those of `xla` need no torch.
WITH_TORCH := tests/layers tests/interop $(addprefix tests/core/test_, absent_memory.py foreign_arrays.py) \
	pagedattn_torch interop $(filter-out %cudnn.py %numba.py %numba_scales.py %cpu_prompts.py %triton.py, \
	$(filter-out tests/backends/test_mosaic%,$(wildcard tests/backends/test_*.py)))
# What needs transformers, numba and rich, which the environment of test-ipex does not have.
NOT_THERE := pagedattn/backends/numba pagedattn/_kernels/cpu pagedattn/report/colour.py \
	pagedattn_torch/backends/numba.py pagedattn_torch/transformers
# Compiling is two thirds of the tests' time: what one run compiled, in any environment, later ones
# load.
PROGRAMS ?= $(CURDIR)/.jax_cache
KEPT := JAX_COMPILATION_CACHE_DIR=$(PROGRAMS) JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0
# Without optimisation XLA takes a fifth of the time. What may depend on it runs with it, and only so:
# the tests marked `optimised`, in these files.
OPTIMISED := tests/core/test_cache.py tests/core/test_jit.py tests/core/test_quantise.py \
	tests/backends/test_grids.py tests/pool/test_accepting.py tests/selection/test_summaries.py
PYTEST := -m pytest -q -n 2 --dist worksteal
SHORT := not deep and not lint and not targets and not optimised
UNOPTIMISED := $(PYTEST) -m "$(SHORT)"
PLAIN := --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true
PLAINLY := XLA_FLAGS="$(PLAIN) --xla_cpu_use_fusion_emitters=false \
	--xla_cpu_parallel_codegen_split_count=1"
# Another version either breaks at the first examples or computes what the tested one does.
FEW := HYPOTHESIS_PROFILE=few
# In processes that tests start too; in their own, pytest makes all warnings errors.
NOT_DEPRECATED := \
	PYTHONWARNINGS=error::DeprecationWarning,error::PendingDeprecationWarning,error::FutureWarning
# Tracing and compiling are most of what is interpreted.
INTERPRETED = XLA_FLAGS="$(PLAIN)" OMP_NUM_THREADS=1 $(NEWEST_VENV)/bin/python $(PYTEST)
MOSAIC_DEEP := tests/deep/test_mosaic_long.py
# For a processor of servers: what this one has says nothing about an emulated one.
EMULATED := JAX_COMPILATION_CACHE_DIR=$(CURDIR)/$(ARM_VENV)/jax \
	JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0 NUMBA_CACHE_DIR=$(CURDIR)/$(ARM_VENV)/numba \
	NUMBA_CPU_NAME=neoverse-v1 NUMBA_CPU_FEATURES= $(PLAINLY) OMP_NUM_THREADS=1 $(ARM_VENV)/bin/python

.PHONY: demo serve docs test test-deep test-interpreted test-oldest test-newest test-hopper \
	test-targets test-cpu test-arm smoke lint test-ipex test-gpu bench-cpu bench-gpu clean

# JAX without torch, so it shows the backends of JAX alone.
demo: $(DEMO_VENV)/ready
	$(DEMO_VENV)/bin/python examples/demo.py

# JAX without torch or matplotlib. MODEL=DIR serves another checkpoint, PORT=8001 elsewhere.
serve: $(SERVE_VENV)/ready
	$(SERVE_VENV)/bin/pagedattn-serve $(MODEL) --port $(or $(PORT),8000)

# What JAX makes of the GPU's kernels shows in test-newest and test-oldest, and for XLA in test-hopper.
test: $(VENV)/ready
	$(KEPT) $(PLAINLY) OMP_NUM_THREADS=1 $(BIN)/python $(PYTEST) -m "$(SHORT) and not lowers"
	$(KEPT) OMP_NUM_THREADS=1 $(BIN)/python $(PYTEST) -m optimised $(OPTIMISED)

# More than an hour: 20 000 examples a backend, 50 000 hostile calls, mutants, ten minutes of threads.
# A part: make test-deep DEEP="tests/deep/test_oracle_long.py -k xla-jit", or fewer: PAGEDATTN_FUZZ=1000
# calls, PAGEDATTN_EXAMPLES=1000 a backend, PAGEDATTN_INTERPRETED=50 a Mosaic kernel, PAGEDATTN_SOAK=60
# seconds. All kernels and bugs that JAX's GPU interpreter sees take the newest JAX.
test-deep: $(VENV)/ready $(NEWEST_VENV)/ready
	$(KEPT) OMP_NUM_THREADS=1 HYPOTHESIS_PROFILE=deep \
		$(BIN)/python $(PYTEST) -rP -m deep $(DEEP)
	$(if $(filter tests/deep $(MOSAIC_DEEP),$(DEEP)),$(INTERPRETED) -rP -m deep $(MOSAIC_DEEP))

# The Mosaic kernels by JAX's GPU interpreter, which detects races: on JAX 0.12 and Python 3.12.
test-interpreted: $(NEWEST_VENV)/ready
	$(INTERPRETED) tests/interpreters

# The oldest versions that pyproject.toml allows.
test-oldest: $(OLDEST_VENV)/ready
	$(FEW) $(KEPT) $(PLAINLY) OMP_NUM_THREADS=1 \
		$(OLDEST_VENV)/bin/python $(UNOPTIMISED) $(sort $(WITHOUT_TORCH) $(ON_CPU))
	$(KEPT) OMP_NUM_THREADS=1 $(OLDEST_VENV)/bin/python -m pytest -q -m optimised \
		$(filter $(OPTIMISED),$(WITHOUT_TORCH))
	JAX_PLATFORMS=cpu OMP_NUM_THREADS=1 $(OLDEST_VENV)/bin/python $(PYTEST) -m "" tests/targets -k H200

# The newest versions that the index has for this Python: make test-newest PYTHON=python3.13. XLA ends
# a process, without a word under pytest, at a flag that it no longer has; these two it has had long.
test-newest: $(NEWEST_VENV)/ready
	$(FEW) $(KEPT) $(NOT_DEPRECATED) XLA_FLAGS="$(PLAIN)" OMP_NUM_THREADS=1 \
		$(NEWEST_VENV)/bin/python $(UNOPTIMISED) $(WITHOUT_TORCH)
	$(KEPT) $(NOT_DEPRECATED) OMP_NUM_THREADS=1 $(NEWEST_VENV)/bin/python -m pytest -q -m optimised \
		$(filter $(OPTIMISED),$(WITHOUT_TORCH))
	JAX_PLATFORMS=cpu OMP_NUM_THREADS=1 $(NEWEST_VENV)/bin/python $(PYTEST) -m "" tests/targets -k H200

# What XLA makes of programs for an H200, for which it needs neither a GPU nor CUDA's libraries: so JAX
# is told not to look for these, and XLA not to choose products by timing them.
test-hopper: $(HOPPER_VENV)/ready
	JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 XLA_FLAGS=--xla_gpu_autotune_level=0 OMP_NUM_THREADS=1 \
		$(HOPPER_VENV)/bin/python $(PYTEST) tests/hopper

# What our Triton kernels take of GPUs from A100 to RTX 5090, and what is refused on which. Of some:
# make test-targets GPUS="B200 or 5090"
test-targets: $(HOPPER_VENV)/ready
	JAX_PLATFORMS=cpu OMP_NUM_THREADS=1 \
		$(HOPPER_VENV)/bin/python $(PYTEST) -m "" tests/targets $(if $(GPUS),-k "$(GPUS)")

# JAX and Numba alone, on whatever processor and system this is.
test-cpu: $(CPU_VENV)/ready
	$(CPU_VENV)/bin/python -m pagedattn
	$(KEPT) $(PLAINLY) OMP_NUM_THREADS=1 $(CPU_VENV)/bin/python $(UNOPTIMISED) $(ON_CPU)
	$(KEPT) OMP_NUM_THREADS=1 $(CPU_VENV)/bin/python -m pytest -q -m optimised $(filter $(OPTIMISED),$(ON_CPU))

# The CPU's kernel on 64-bit ARM, emulated: a quarter of an hour; tests/arm.sh says what it needs.
test-arm: $(ARM_VENV)/ready
	$(EMULATED) -m pytest -q -k "as_json or cpu_threads or numba or README" $(ON_ARM)
	$(EMULATED) -m pagedattn

# Wheel and sdist, each in an empty environment.
smoke:
	rm -rf $(SMOKE_VENV) dist
	$(PYTHON) -m venv $(SMOKE_VENV)/build
	$(SMOKE_VENV)/build/bin/pip $(INSTALL) build
	$(SMOKE_VENV)/build/bin/python -m build -o dist .
	for made in dist/*; do \
		$(PYTHON) -m venv --clear $(SMOKE_VENV)/empty && \
		$(SMOKE_VENV)/empty/bin/pip $(INSTALL) $$made && \
		$(SMOKE_VENV)/empty/bin/python -I tests/smoke.py || exit 1; \
	done

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/python $(PYTEST) -m lint tests/core/test_types.py

# Into .site. Warnings, and links that lead nowhere, are errors.
docs: $(DOCS_VENV)/ready
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict

test-ipex: $(IPEX_VENV)/ready
	$(FEW) $(KEPT) $(PLAINLY) OMP_NUM_THREADS=1 \
		$(IPEX_VENV)/bin/python $(UNOPTIMISED) -k "not xla" $(NOT_THERE:%=--ignore=%) $(WITH_TORCH)

# The path is for the processes that tests start: pytest's own settings reach no further.
test-gpu:
	PYTHONPATH=.:interop XLA_PYTHON_CLIENT_PREALLOCATE=false $(PYTHON) -m pytest -q -n 14 --dist worksteal -p no:benchmark tests

bench-cpu: $(VENV)/ready $(IPEX_VENV)/ready
	PYTHONPATH=examples $(BIN)/python -m benchmarks.cpu -o docs/results
	PYTHONPATH=examples $(BIN)/python -m benchmarks.cpu -o docs/results -k decode -t 1
	PYTHONPATH=examples $(BIN)/python -m benchmarks.cpu_layers -o docs/results
	PYTHONPATH=examples $(BIN)/python -m benchmarks.cpu_threads -o docs/results

bench-gpu:
	PYTHONPATH=examples:examples/serving:.:interop XLA_PYTHON_CLIENT_PREALLOCATE=false $(PYTHON) -m benchmarks.gpu -o docs/results

# xformers' own requirements would replace torch; on a CPU only its masks are used.
$(VENV)/ready: pyproject.toml examples/serving/pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip $(INSTALL) -c constraints.txt -e '.[torch,dev]' -e './examples/serving[demo]'
	$(BIN)/pip $(INSTALL) -c constraints.txt --no-deps xformers
	touch $@

$(DEMO_VENV)/ready: pyproject.toml examples/serving/pyproject.toml constraints.txt
	$(PYTHON) -m venv $(DEMO_VENV)
	$(DEMO_VENV)/bin/pip $(INSTALL) -c constraints.txt -e '.[cpu]' -e './examples/serving[demo]'
	touch $@

$(SERVE_VENV)/ready: pyproject.toml examples/serving/pyproject.toml constraints.txt
	$(PYTHON) -m venv $(SERVE_VENV)
	$(SERVE_VENV)/bin/pip $(INSTALL) -c constraints.txt -e '.[cpu]' -e ./examples/serving
	touch $@

$(OLDEST_VENV)/ready: pyproject.toml constraints-oldest.txt
	$(PYTHON) -m venv $(OLDEST_VENV)
	$(OLDEST_VENV)/bin/pip $(INSTALL) -c constraints-oldest.txt -e '.[cpu,testing]' pytest pytest-xdist triton
	touch $@

$(NEWEST_VENV)/ready: pyproject.toml
	$(PYTHON) -m venv $(NEWEST_VENV)
	$(NEWEST_VENV)/bin/pip $(INSTALL) -U -e '.[testing]' pytest pytest-xdist triton
	touch $@

$(CPU_VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(CPU_VENV)
	$(CPU_VENV)/bin/pip $(INSTALL) -c constraints.txt -e '.[cpu,testing]' pytest pytest-xdist
	touch $@

$(ARM_VENV)/ready: tests/arm.sh constraints.txt
	tests/arm.sh $(ARM_VENV) $(PYTHON)
	touch $@

# 1.7 GB, of which Triton takes 640 MB and JAX's plugin for CUDA 380.
$(HOPPER_VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(HOPPER_VENV)
	$(HOPPER_VENV)/bin/pip $(INSTALL) -c constraints.txt -e '.[testing]' jax-cuda13-plugin pytest \
		pytest-xdist rich safetensors triton
	touch $@

# 7 GB: the only torch 2.8 in the package index is the one for CUDA.
$(IPEX_VENV)/ready: pyproject.toml constraints-ipex.txt
	$(PYTHON) -m venv $(IPEX_VENV)
	$(IPEX_VENV)/bin/pip $(INSTALL) -c constraints-ipex.txt -e '.[ipex]' hypothesis pytest pytest-xdist
	touch $@

# The pages are made from the sources as text: nothing of the library is imported.
$(DOCS_VENV)/ready: constraints-docs.txt
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/pip $(INSTALL) -r constraints-docs.txt
	touch $@

clean:
	rm -rf $(VENV) $(IPEX_VENV) $(DOCS_VENV) $(DEMO_VENV) $(SERVE_VENV) $(OLDEST_VENV) \
		$(NEWEST_VENV) $(HOPPER_VENV) $(SMOKE_VENV) $(CPU_VENV) $(ARM_VENV) .jax_cache .site dist
