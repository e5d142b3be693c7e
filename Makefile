# `make train` and `make test` are all that a newcomer needs: each installs what it uses into .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: train check test slurm slurm-down chaos gpu-check bench clean

train: $(VENV)/installed  ## the main job: learn 5,000 handwritten digits on this machine
	$(BIN)/python launch.py --local

check: $(VENV)/installed-dev  ## lint and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

test: $(VENV)/installed-dev system-packages  ## all tests, those on a real Slurm where one can be started
	$(BIN)/python -m pytest $(PYTEST_ARGS)

slurm: $(VENV)/installed system-packages  ## a real Slurm on this machine, thrown away by slurm-down
	$(BIN)/python -m tests.slurm.cluster up

slurm-down:
	$(BIN)/python -m tests.slurm.cluster down

# N faults (200 take the better half of an hour), by the plan of SEED; 1 in the exit status when anything went wrong.
N ?= 30
SEED ?= 1
chaos: $(VENV)/installed-dev system-packages  ## random faults at random moments on real runs, and one table: docs/chaos.md
	$(BIN)/python -m tests.faults --faults $(N) --seed $(SEED) --report docs/chaos.md

gpu-check: $(VENV)/installed-dev  ## on a machine with a GPU: what needs one is tested, then measured; planned for 20 minutes
	$(BIN)/python -m pytest tests/gpu -W default
	$(BIN)/python -m benchmarks.gpu

bench: $(VENV)/installed  ## every figure that README quotes
	$(BIN)/python -m benchmarks

# For the tests of Slurm, of mpirun and of the Tab key. Elsewhere, or without root, those say why they skip.
PACKAGES := slurmctld slurmd slurm-client slurmdbd munge mariadb-server openmpi-bin iproute2 zsh
.PHONY: system-packages
system-packages:
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && ! dpkg -s $(PACKAGES) >/dev/null 2>&1; then \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
			$(PACKAGES) >/dev/null; fi

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
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache *.egg-info
