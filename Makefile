# `make help` lists the targets. Everything is installed into virtual environments of its own.
VENV ?= .venv
VENV_XLA ?= .venv-xla
VENV_T20 ?= .venv-t20
VENV_TPU ?= .venv-tpu
PYTHON ?= python3

BIN := $(VENV)/bin
BIN_XLA := $(VENV_XLA)/bin
BIN_T20 := $(VENV_T20)/bin
BIN_TPU := $(VENV_TPU)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
PIP_XLA := $(BIN_XLA)/python -m pip --disable-pip-version-check
PIP_T20 := $(BIN_T20)/python -m pip --disable-pip-version-check
PIP_TPU := $(BIN_TPU)/python -m pip --disable-pip-version-check

# Files in the environments that say they are complete; touching setup.py installs again.
STAMP_DEMO := $(VENV)/.installed-demo
STAMP := $(VENV)/.installed
STAMP_XLA := $(VENV_XLA)/.installed
STAMP_T20 := $(VENV_T20)/.installed
STAMP_TPU := $(VENV_TPU)/.installed
STAMP_DOCS := $(VENV)/.installed-docs

TRAIN_DIR := work_dirs/demo

# For tests with real models. A wheel of mmcv with compiled operators is for one release of torch:
# name a file that suits. Without it, tests that need these operators are skipped.
MMCV ?= mmcv-lite==2.1.0
MMCV_XLA ?= mmcv-lite==2.1.0
MMCV_T20 ?= mmcv-lite==2.1.0

# The T20's PyTorch needs Python 3.8: name one that is neither on the path nor in pyenv.
PYTHON_T20 ?= $(shell for python in python3.8 $${PYENV_ROOT:-$$HOME/.pyenv}/versions/3.8*/bin/python; do "$$python" -c "" 2>/dev/null && echo "$$python" && break; done)

# MMEngine's own tests, in an archive beside the checkout or wherever a release of MMEngine lies.
PEERS ?= ../shared/peers/mmengine-tests.tar.gz
# More of PyTorch's own tests: an archive of its sources, or their folder. Some are installed with it.
PEERS_TORCH ?= ../shared/peers/pytorch-tests.tar.gz

# Tests start hundreds of processes, which would compile the package and the tests anew each time.
unexport PYTHONDONTWRITEBYTECODE

# Files of tests that run at a time: most of a test is waiting. Those of `make test` are smaller.
WORKERS ?= 3
test: WORKERS := 4

.DEFAULT_GOAL := help
# Tests that share a file share a process, and what they start.
PYTEST_T20 = -m pytest -n $(WORKERS) --dist loadfile
# As collected: long files are not left for the end. pytest-xdist for Python 3.8 has no such option.
PYTEST = $(PYTEST_T20) --no-loadscope-reorder
# KINDS=--one-of-each: of tests that take long, one case of each kind, see tests/tiers.py.
KINDS ?=
# Graphs of tests are small and many: compiling them is what takes time.
ON_XLA := PJRT_DEVICE=CPU XLA_FLAGS=--xla_backend_optimization_level=0

NUMBERS := docs.numbers.operators --accelerator
ON_CARD := FAKECARD_NAME=zeta FAKECARD_COUNT=1 PYTHONPATH=.:standins/fakecard

# TorchTPU warns of every name in torch.tpu that may change.
ON_TPU := TPU_ON_CPU=1 PYTHONWARNINGS="ignore:<TorchTpu/"

.PHONY: help install install-xla install-t20 install-tpu standins demo dist test test-configs-xla test-numbers test-operators test-onedl test-long test-xla test-t20 test-tpu test-kills test-peers test-pytorch test-cuda coverage lint benchmark-all benchmark-cuda docs docs-links docs-pictures docs-resume docs-sites docs-tables clean

help:  ## Show this list
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/\1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{printf "%-14s %s\n", $$1, $$2}'

install: $(STAMP)  ## Make $(VENV), with torch 2.13

# What the demo needs; the rest comes with the first target that needs it.
$(STAMP_DEMO): setup.py
	@echo "Installing PyTorch 2.13, MMEngine and mmdevplug into $(VENV): about 1 GB and a minute or two on a fast line."
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install --quiet --upgrade pip "setuptools<81" wheel
	@$(PIP) install --quiet torch==2.13.0
	@$(PIP) install --quiet --no-build-isolation -e ".[mmengine,examples]" torch==2.13.0
	@$(BIN)/python .ci/link_configs.py
	@touch $@

$(STAMP): $(STAMP_DEMO)
	$(PIP) install "$(MMCV)"
	$(PIP) install --no-build-isolation -e ".[mmengine,examples,llama,loops,dev]" torch==2.13.0
	$(BIN)/python .ci/link_configs.py
	touch $@

install-xla: $(STAMP_XLA)  ## Make $(VENV_XLA), with torch_xla 2.9

# The three in one command: apart, the newest torchvision would replace torch.
$(STAMP_XLA): setup.py
	$(PYTHON) -m venv $(VENV_XLA)
	$(PIP_XLA) install --upgrade pip "setuptools<81" wheel
	$(PIP_XLA) install torch==2.9.0 torch_xla==2.9.0 torchvision==0.24.0
	$(PIP_XLA) install "$(MMCV_XLA)"
	$(PIP_XLA) install --no-build-isolation -e ".[mmengine,examples,llama,dev,dev-xla]"
	$(BIN_XLA)/python .ci/link_configs.py
	touch $@

install-t20: $(STAMP_T20)  ## Make $(VENV_T20), with torch 1.10 on Python 3.8

# PyTorch 1.10 needs NumPy 1, and its TensorBoard writer protobuf 3.
$(STAMP_T20): setup.py
ifeq ($(PYTHON_T20),)
	@echo "No Python 3.8, which PyTorch 1.10 needs: found no python3.8 on the path and no 3.8 in pyenv."
	@echo "Run: pyenv install 3.8, or name one: make install-t20 PYTHON_T20=/path/to/python3.8"
	@exit 1
endif
	$(PYTHON_T20) -c "import sys; v = sys.version_info[:2]; v == (3, 8) or sys.exit(f'$(PYTHON_T20) is Python {v[0]}.{v[1]}, and PyTorch 1.10 needs 3.8.')"
	$(PYTHON_T20) -m venv $(VENV_T20)
	$(PIP_T20) install --upgrade pip "setuptools<81" wheel
	$(PIP_T20) install torch==1.10.0 "numpy<1.24" "protobuf<4"
	$(PIP_T20) install "$(MMCV_T20)" "numpy<1.24"
	$(PIP_T20) install --no-build-isolation -e ".[mmengine,examples,placement,dev]" transformers==4.36.2 torch==1.10.0 "numpy<1.24" "protobuf<4"
	$(BIN_T20)/python .ci/link_configs.py
	touch $@

install-tpu: $(STAMP_TPU)  ## Make $(VENV_TPU), with torch 2.13 and TorchTPU on the CPU

# XLA's plugin for the CPU asks for JAX, which nothing here uses; our libtpu compiles 100 lines of C.
$(STAMP_TPU): setup.py $(wildcard standins/tpu_on_cpu/*.py standins/tpu_on_cpu/libtpu/*)
	$(PYTHON) -m venv $(VENV_TPU)
	$(PIP_TPU) install --upgrade pip "setuptools<81" wheel
	$(PIP_TPU) install torch==2.13.0
	$(PIP_TPU) install "$(MMCV)"
	$(PIP_TPU) install --no-build-isolation -e ".[mmengine,examples,dev]"
	$(PIP_TPU) install --no-deps lammps-jax-pjrt-cpu==0.11.2
	$(PIP_TPU) install --no-build-isolation --force-reinstall --no-deps standins/tpu_on_cpu
	$(PIP_TPU) install torch_tpu==0.2.0 torch==2.13.0
	$(BIN_TPU)/python .ci/link_configs.py
	touch $@

demo: $(STAMP_DEMO)  ## Train a digits classifier in 2 processes, test it and draw a report
	$(BIN)/mmdevplug train configs/digits/digits_cpu.py --nproc 2 --work-dir $(TRAIN_DIR)
	$(BIN)/python demo/digits_report.py $(TRAIN_DIR)

# The wheel is made from the sdist, which has to be complete for it.
dist: install  ## Build dist/, an sdist and a wheel, and check them
	$(PIP) install --quiet build twine
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/python -m twine check --strict dist/*

coverage: export MMDEVPLUG_COVERAGE := $(CURDIR)/pyproject.toml
coverage: export COVERAGE_FILE := $(CURDIR)/.coverage
coverage: install install-xla  ## Run all tests and count the lines of the package that they run
	$(BIN)/python -m coverage erase
	-$(BIN)/python -m coverage run $(PYTEST) -m "not cuda and not xla and not tpu and not opencl and not t20"
	-$(ON_XLA) $(BIN_XLA)/python -m coverage run $(PYTEST) -m xla
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage report --fail-under=90

lint: install  ## Check style, types, and that the package is Python 3.8
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --no-error-summary
	$(BIN)/vermin -t=3.8- --no-tips mmdevplug tools demo

# Compiled once for each release of PyTorch, into the folder for temporary files.
standins: install  ## Compile the stand-in cards
	PATH="$$(cd $(BIN) && pwd):$$PATH" PYTHONPATH=standins/fakecard:standins/native $(BIN)/python -c "import card, native_card; card.build(); card.build_extension('native_group', native_card.GROUP)"

test: lint standins  ## Run the tests that need neither torch_xla nor a GPU, without those that take long
	$(BIN)/python $(PYTEST) -m "not cuda and not xla and not tpu and not opencl and not t20 and not long"

test-operators: install  ## Install MMCV=path/to/mmcv.whl and run the tests that need its compiled operators
ifneq ($(findstring mmcv-lite,$(MMCV)),)
	@echo "make test-operators needs a wheel of mmcv for torch 2.13 with its compiled operators; $(MMCV) has none."
	@echo "Run: make test-operators MMCV=path/to/mmcv.whl"
	@exit 1
else
	$(PIP) uninstall --yes mmcv mmcv-lite
	$(PIP) install "$(MMCV)"
	$(BIN)/python $(PYTEST) -m "operators and not cuda and not xla and not tpu and not opencl and not t20 and not long"
endif

ONEDL = .onedl

$(ONEDL)/.installed: | install
	$(PIP) install --no-deps --target $(ONEDL) onedl-mmengine==0.10.12
	touch $@

test-onedl: $(ONEDL)/.installed  ## Resume iteration loops on OneDL's MMEngine, whose loops make their iterators late
	PYTHONPATH=$(ONEDL) $(BIN)/python -c "import mmengine, sys; mmengine.__version__ == '0.10.12' or sys.exit(mmengine.__file__)"
	PYTHONPATH=$(ONEDL) $(BIN)/python $(PYTEST) -m "not xla" tests/checkpoint/test_resuming.py -k "by_iter or infinite or iterations"

test-long: install  ## Run the tests on the CPU that take long (KINDS=--one-of-each: one of each kind)
	$(BIN)/python $(PYTEST) $(KINDS) -m "long and not cuda and not xla and not tpu and not opencl and not t20"

test-xla: install-xla  ## Run the tests on torch_xla, on the host's CPU
	$(ON_XLA) $(BIN_XLA)/python $(PYTEST) $(KINDS) -m xla
	$(ON_XLA) CPU_NUM_DEVICES=2 $(BIN_XLA)/python -m pytest tests/conformance --accelerator xla

test-t20: install-t20  ## Run the tests on a stand-in T20, and those on the CPU whose code has a branch for it, on 1.10
	$(BIN_T20)/python $(PYTEST_T20) $(KINDS) -m t20 tests/t20 tests/features
	PYTHONPATH=standins/t20 TOPS_VISIBLE_DEVICES=0,1 $(BIN_T20)/python -m pytest tests/conformance --accelerator gcu
	$(BIN_T20)/python $(PYTEST_T20) --with-branches -m "not cuda and not xla and not tpu and not opencl and not t20 and not long"

test-tpu: install-tpu  ## Run the tests on TorchTPU's released package, over XLA's plugin for the CPU
	$(ON_TPU) $(BIN_TPU)/python -m pytest -n 2 --dist loadfile -m tpu tests/tpu

test-numbers: install standins install-xla install-tpu  ## Compare operators of devices with the CPU's, write docs/*/numbers.md
	PJRT_DEVICE=CPU $(BIN_XLA)/python -m $(NUMBERS) xla --json docs/numbers/xla.json
	PJRT_DEVICE=CPU $(BIN_XLA)/python -m $(NUMBERS) xla --plain --json docs/numbers/xla_plain.json
	PYTHONPATH=.:standins/lazy $(BIN)/python -m $(NUMBERS) lazy --json docs/numbers/lazy.json
	$(ON_TPU) $(BIN_TPU)/python -m $(NUMBERS) tpu --json docs/numbers/tpu.json
	$(ON_CARD) $(BIN)/python -m $(NUMBERS) zeta --card-config standins/fakecard/zeta_config.py --json docs/numbers/zeta.json
	$(BIN)/python docs/numbers_page.py

test-configs-xla: install-xla  ## Compare first steps of released configs on torch_xla with the CPU's, write docs/*/numbers.md
	$(ON_XLA) $(BIN_XLA)/python -m docs.numbers.configs --accelerator xla --json docs/numbers/configs_xla.json
	$(BIN)/python docs/numbers_page.py

test-kills: install  ## Kill jobs 100 times and stop them 50 times (test-long: 18, 9), compare the bits
	MMDEVPLUG_KILLS=100 $(BIN)/python -m pytest tests/checkpoint/test_survival.py -m "not xla and not tpu and not opencl"

test-pytorch: install  ## Run PyTorch's own tests of collectives and of DDP over `staged`, on the CPU and a card
ifeq ($(wildcard $(PEERS_TORCH)),)
	@echo "Only the tests that PyTorch installs: no sources at $(PEERS_TORCH). For more: make test-pytorch PEERS_TORCH=sources-of-pytorch"
endif
	$(BIN)/python tools/peers/run_pytorch.py $(wildcard $(PEERS_TORCH)) --device cpu
	$(BIN)/python tools/peers/run_pytorch.py $(wildcard $(PEERS_TORCH)) --device zeta

test-peers: install install-xla test-pytorch  ## Run PyTorch's own tests and, if $(PEERS) is there, MMEngine's on the CPU, torch_xla and a stand-in
ifeq ($(wildcard $(PEERS)),)
	@echo "Skipped: no tests of MMEngine at $(PEERS). To run them: make test-peers PEERS=sources-of-mmengine.tar.gz"
else
	$(BIN)/python tools/peers/run.py $(PEERS) --device cpu
	$(BIN)/python tools/peers/run.py $(PEERS) --device npu
	$(ON_XLA) $(BIN_XLA)/python tools/peers/run.py $(PEERS) --device xla
endif

test-cuda: install  ## Run the tests that need a GPU
	$(BIN)/python -c "import sys, torch; torch.cuda.is_available() or sys.exit(f'make test-cuda needs a GPU: torch {torch.__version__} sees none.')"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 6 --dist loadfile --no-loadscope-reorder -m cuda

# An iteration of ours and MMEngine's in turns: over nccl, compiled, without a process group. Sized for
# 8 minutes on an H100 by estimate. ResNet-50 needs mmpretrain 1.2 beside, which wants torchvision.
BENCHMARK_CUDA := benchmarks/training_loop.py --device cuda --size 512 --batch 8 --length 10 --blocks 5
benchmark-cuda: install  ## Measure an iteration beside MMEngine's on one GPU
	$(BIN)/python $(BENCHMARK_CUDA) --models retinanet segformer resnet50 --variants fp32 amp --ranks 1
	$(BIN)/python $(BENCHMARK_CUDA) --models segformer --variants compile amp-compile --ranks 1
	$(BIN)/python $(BENCHMARK_CUDA) --models segformer --variants fp32 amp --ranks 0

# TABLES="grad_sync_cpu scale": these alone. What was measured on this commit is not measured again.
TABLES ?=
benchmark-all: install install-xla standins  ## Measure every table of the docs on this commit in an hour, fill the pages
	$(BIN)/python benchmarks/run_all.py --xla-python $(BIN_XLA)/python $(TABLES)

$(STAMP_DOCS): $(STAMP) docs/requirements.txt
	$(PIP) install -r docs/requirements.txt
	touch $@

docs: $(STAMP_DOCS)  ## Build docs/_build; a warning or a broken link between pages fails
	$(BIN)/python -m sphinx -q -E -W --keep-going -b html docs/en docs/_build/en
	$(BIN)/python -m sphinx -q -E -W --keep-going -b html docs/zh_cn docs/_build/zh_cn
	$(BIN)/python docs/check_built.py

docs-links: $(STAMP_DOCS)  ## See whether links to other sites answer; needs the network
	$(BIN)/python -m sphinx -q -b linkcheck docs/en docs/_build/links/en
	$(BIN)/python -m sphinx -q -b linkcheck docs/zh_cn docs/_build/links/zh_cn

docs-pictures: install install-xla  ## Draw and record the pictures of the docs that are no measurements
	$(BIN)/python docs/drawings/draw.py
	$(BIN)/python docs/record_terminal.py
	$(ON_XLA) $(BIN_XLA)/python docs/record_training.py
	$(BIN_XLA)/python docs/record_guard.py

docs-tables: install  ## Write the pages that are made from the source
	for page in options_page cli_page patch_table; do $(BIN)/python docs/$$page.py || exit 1; done

docs-resume: install  ## Resume every schedule with every optimizer, write docs/*/resuming.md
	$(BIN)/python -m docs.resume.measure docs/resume
	$(BIN)/python docs/resume_table.py

docs-sites: install install-xla  ## Look at MMEngine's device assumptions, write docs/*/device_sites.md
	MMDEVPLUG_RESULTS=docs/sites $(BIN)/python -m pytest tests/sites -m "not cuda and not xla and not tpu and not opencl"
	MMDEVPLUG_RESULTS=docs/sites PJRT_DEVICE=CPU $(BIN_XLA)/python -m pytest tests/sites -m xla
	$(BIN)/python docs/site_table.py

clean:  ## Remove the environments and what was built or trained
	rm -rf $(VENV) $(VENV_XLA) $(VENV_T20) $(VENV_TPU) build dist docs/_build *.egg-info work_dirs .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
