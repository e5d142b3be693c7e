# `make train` and `make test` are all that a newcomer needs. Each first installs what it uses into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Tests start hundreds of interpreters, which would each compile the package if they could not keep what they compile.
test test-fast test-long test-oldest test-silent test-slurm bench: export PYTHONDONTWRITEBYTECODE :=

.PHONY: train check docs check-docs test test-fast test-long test-oldest test-silent test-slurm slurm slurm-down chaos ports gpu-check bench clean

train: $(VENV)/installed  ## train on 5,000 handwritten digits on this machine
	$(BIN)/python launch.py --local

check: $(VENV)/installed-dev docs  ## lint and types, and the documentation
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

docs: $(VENV)/installed-dev  ## the documentation as a site in site/; a broken link is an error
	$(BIN)/zensical build --clean --strict

# Most tests wait for Slurm or for ranks, so four test processes suit two cores; the quick tests compute.
WORKERS ?= 4
# A test process that dies ends the run at once: with --dist loadgroup, xdist would start another and never finish.
GROUPED := --dist loadgroup --no-loadscope-reorder --max-worker-restart=0

test: $(VENV)/installed-dev system-packages  ## the tests, but those for a GPU and the long ones; some start a real Slurm
	$(BIN)/python -m pytest -n $(WORKERS) $(GROUPED) -m "not gpu and not retyped and not long" $(PYTEST_ARGS)

test-long: $(VENV)/installed-dev system-packages  ## more places, ranks and launchers for what `make test` proves
	$(BIN)/python -m pytest -n $(WORKERS) $(GROUPED) -m long $(PYTEST_ARGS)

check-docs: $(VENV)/installed-dev system-packages  ## whether each page and picture of docs shows what is printed today
	$(BIN)/python -m pytest -m retyped tests/test_docs.py

test-fast: $(VENV)/installed-dev  ## after each edit: the quick tests, without Slurm, root or system packages
	$(BIN)/python -m pytest -n auto $(GROUPED) -m "not gpu and not slow and not retyped" $(PYTEST_ARGS)

# The oldest torch and frameworks that setup.cfg promises. A warning of torch's fails a test, here as in all targets.
OLDEST := torch==2.11.* torchvision==0.26.* lightning==2.5.* transformers==5.0.* accelerate==1.6.* trl==1.0.* peft==0.18.*
test-oldest: .venv-oldest/installed  ## the quick tests, and those of frameworks, on the oldest versions that are promised
	.venv-oldest/bin/python -m pytest -n auto $(GROUPED) -m "not gpu and not slow and not retyped" $(PYTEST_ARGS)
	.venv-oldest/bin/python -m pytest -n 2 $(GROUPED) -m "slow and not long" $(PYTEST_ARGS) tests/frameworks

.venv-oldest/installed: setup.cfg pyproject.toml
	test -x .venv-oldest/bin/python || $(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet --upgrade pip
	.venv-oldest/bin/python -m pip install --quiet $(OLDEST) --editable '.[dev]'
	@touch $@

# RELEASE: a Debian release whose Slurm and Python to use, in a chroot: trixie has Slurm 24.11, sid 26.05.
RELEASE ?=
test-slurm: $(VENV)/installed-dev system-packages  ## the tests on Slurm; python -m tools.slurm_versions makes a table
ifeq ($(RELEASE),)
	@mkdir -p .releases
	$(BIN)/python -m pytest -n $(WORKERS) $(GROUPED) tests/slurm --junitxml=.releases/here.xml \
		-o junit_suite_name="Slurm $$(slurmctld -V | sed 's/.* //'), $$($(BIN)/python --version)" $(PYTEST_ARGS)
else
	WORKERS=$(WORKERS) tests/slurm/release.sh $(RELEASE) $(PYTEST_ARGS)
endif

test-silent: $(VENV)/installed-dev system-packages  ## stops, faults, rescues, restarts on collectives that never fail
	LASTSTEP_TEST_SILENT=1 $(BIN)/python -m pytest -n $(WORKERS) $(GROUPED) -m "not gpu" $(PYTEST_ARGS) tests/attempt \
		tests/submission/test_local.py tests/job/test_supervisor.py tests/loops tests/slurm

slurm: $(VENV)/installed system-packages  ## start a real Slurm on this machine; make slurm-down ends it
	$(BIN)/python -m tests.slurm.cluster up

slurm-down:
	$(BIN)/python -m tests.slurm.cluster down

# N faults (200 take about half an hour), planned from SEED. The exit status is 1 if a run broke a promise.
# SILENT=1: collectives do not fail when a rank dies, as NCCL's.
# IO=1: instead, N file operations fail (300 take some forty minutes); the same command continues what was interrupted.
N ?= 30
SEED ?= 1
SILENT ?=
# IO=1, SLURM=1, PROCESSES=1 instead: the worst day of a disk, of Slurm, of processes, N faults in turn.
SLURM ?=
PROCESSES ?=
IO ?=
chaos: $(VENV)/installed-dev system-packages  ## random faults at random moments on real runs, reported in docs/reports.md
ifneq ($(SLURM),)
	$(BIN)/python -m tests.faults --slurm --faults $(N) --seed $(SEED) --report docs/reports.md
else ifneq ($(PROCESSES),)
	$(BIN)/python -m tests.faults --processes --faults $(N) --seed $(SEED) --report docs/reports.md
else ifneq ($(IO),)
	$(BIN)/python -m tests.worst_day --runs $(N) --seed $(SEED) --results .cache/worst-day/$(N)-$(SEED).json \
		--report docs/reports.md
else
	$(BIN)/python -m tests.faults --faults $(N) --seed $(SEED) $(if $(SILENT),--silent) \
		--results .cache/faults/$(N)-$(SEED)$(if $(SILENT),-silent).json \
		--report docs/reports.md
endif

ports: $(VENV)/installed-dev system-packages  ## the scripts of examples/ports on a real Slurm, reported in docs/reports.md
	$(BIN)/python -m tests.slurm.ports $(PORTS)

# With the torch of this machine's Python. If that lacks a package, it says which.
MINUTES ?= 20
gpu-check:  ## on a machine with GPUs: tests in order of worth, then benchmarks, for 10, 20 or 40 MINUTES
	$(PYTHON) -m tests.gpu --minutes $(MINUTES)

bench: $(VENV)/installed  ## measure most figures of docs/benchmarks.md, and check the limits; about 15 minutes
	$(BIN)/python -m benchmarks

# For tests of Slurm, mpirun, network namespaces, Tab completion and torch.compile. Without root or apt these tests
# are skipped, with the reason. So is the test that opens the report in a browser: Ubuntu has no package of chromium.
PACKAGES := slurmctld slurmd slurm-client slurmdbd munge mariadb-server openmpi-bin iproute2 zsh g++
BROWSER := chromium
.PHONY: system-packages
system-packages:
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && ! dpkg -s $(PACKAGES) $(BROWSER) >/dev/null 2>&1; then \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
			$(PACKAGES) >/dev/null && \
		{ apt-get install -y -qq --no-install-recommends $(BROWSER) >/dev/null 2>&1 || true; }; fi

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

$(VENV)/installed: $(VENV)/bin/python setup.cfg pyproject.toml
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) .venv-oldest site build dist .cache .pytest_cache .mypy_cache .ruff_cache *.egg-info
