# SPDX-License-Identifier: Apache-2.0
# Every target sets up what it needs first, once: .venv/ (see tests/setup.sh). `make help` lists them.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
# A program under test would be compiled anew each time that it is started.
unexport PYTHONDONTWRITEBYTECODE
MAKEFLAGS += --no-builtin-rules --no-print-directory
.DEFAULT_GOAL := check

BIN := .venv/bin
RUNTIME := .venv/.runtime
DEV := .venv/.dev
STEP := tests/step.sh
QUICK := not slow and not install and not soak and not lab and not sweep
PYTEST := $(BIN)/pytest -q
# The time limit of a test ends it; where its fixtures then hang, the traceback of every thread tells where.
# Where each test waits in vain for what one has left behind, ten tell enough.
LIMITS := -v --timeout 600 -o faulthandler_timeout=900 --maxfail 10
LAB := $(BIN)/pytest $(LIMITS)
# RELEASE=trixie: the same in a root of that Debian, with its Slurm and its Python. hypothesis is built for one Python.
RELEASED = $(if $(RELEASE),GPULOCK_LAB=/tmp/gpulock-lab-$(RELEASE) tests/release.sh $(RELEASE) \
    python3 -m pytest -p no:hypothesispytest $(LIMITS),$(LAB))
# Unit tests keep their files in memory where they can.
FAST := tests/memory.sh
AS_ROOT := $(filter 0,$(shell id -u))
# A machine that has been up for 115 days, whatever this one's age: root alone makes a clock of its own.
LONG_UP := $(if $(AS_ROOT),tests/booted.sh 10000000)
LEFT_OUT := the labs with a real Grid Engine, Slurm, systemd, Prometheus and containers, installations and the sweep: \
    they install packages on this machine. As root: make labs$(if $(AS_ROOT),,. Root also runs: make booted)
# The quick unit tests go to a process for each core, file by file: every worker of xdist would collect them all.
CORES := $(shell nproc)
PARTS := $(addprefix unit-,$(shell seq $(CORES)))
# pyright takes as long as all of these together: it is a part of `make test`, where it runs beside them.
CHECKS := $(PARTS) mypy lint format-check world-5
# What a lab does to its host is looked at while it is alone; Slurm's, Grid Engine's and the others then run at the same time.
LABS := $(wildcard tests/labs/*/test_*.py)
ITSELF := $(filter %_itself.py,$(LABS))
SLURM := $(filter-out $(ITSELF),$(wildcard tests/labs/slurm/test_*.py))
SGE := $(filter-out $(ITSELF),$(wildcard tests/labs/sge/test_*.py))
# slurmd under systemd is of `make lab-systemd` and `make soak`: it takes a minute alone.
SLURMD := tests/labs/systemd/test_slurmd.py
# By their mark: one of them lies among the unit tests.
INSTALL = $(sort $(shell grep -rl --include="test_*.py" "mark\.install" tests))
OTHERS := $(filter-out $(ITSELF) $(SLURM) $(SGE) $(SLURMD),$(LABS))
# Processes of one lab are none of another's business: each scheduler has a /proc of its own.
ALONE := unshare --pid --fork --mount-proc --kill-child bash -c
# make runs a line that has $(MAKE) in it under -n as well: a dry run starts no lab.
SELF := $(MAKE)
# For what a target runs after it has asked itself (tests/consent.sh).
SURE := GPULOCK_LAB_YES=1

##@ Use
demo: $(RUNTIME)  ## gpulock on a simulated node: no GPU, no scheduler, no root
	@$(BIN)/gpulock demo

man: $(RUNTIME)  ## man pages and completions for shells, below build/share
	@$(BIN)/python packaging/manual.py build/share/man
	@$(BIN)/python packaging/completion.py build/share

docs: $(RUNTIME)  ## the pages as a site, below build/site; a link that leads nowhere ends it
	@$(BIN)/python packaging/collect_pages.py build/pages
	@test -d build/mkdocs || $(BIN)/python -m pip install -qq --target build/mkdocs mkdocs==1.6.1
	@PYTHONPATH=build/mkdocs $(STEP) "docs" $(BIN)/python -m mkdocs build --strict -f packaging/site.yml

packages: $(RUNTIME)  ## a .deb and an .rpm for each machine, and wheels for pip, below build/packages
	@$(STEP) "packages" $(BIN)/python packaging/build.py build/packages

##@ Check
check: tools $(DEV)  ## format, lint, types by mypy, layers, quick unit tests, all at the same time (the default)
	@$(MAKE) -j -O $(CHECKS)

format-check: $(DEV)
	@$(STEP) "ruff format" $(BIN)/ruff format --check
lint: $(DEV)
	@$(STEP) "ruff check" $(BIN)/ruff check
mypy: $(DEV)
	@$(STEP) "mypy" $(BIN)/mypy
# In the 16 MiB that node gives new objects by itself, it takes a sixth more of a processor.
pyright: $(DEV)  ## types by pyright: a minute, which `make check` does not take
	@NODE_OPTIONS="$${NODE_OPTIONS:-} --max-semi-space-size=64" \
	    $(STEP) "pyright" $(BIN)/pyright --project pyproject.toml
unit: tools $(DEV)  ## the quick unit tests alone (the layers are one of them)
	@$(MAKE) -j -O $(PARTS)
$(PARTS): unit-%: $(DEV)
	@$(FAST) $(STEP) "unit tests $*/$(CORES)" $(PYTEST) -m "$(QUICK)" \
	    $$(find tests/unit -name 'test_*.py' | sort | awk 'NR % $(CORES) + 1 == $*')
slow: tools $(DEV)  ## the slow unit tests: many processes, installations
	@$(FAST) $(STEP) "slow tests" $(PYTEST) -n auto -m "slow and not soak" tests/unit

pythons: tools $(RUNTIME)  ## the demo and the quick unit tests on other Pythons, or in a Debian with it: PYTHONS="3.9 3.13"
	@$(FAST) env QUICK="$(QUICK)" $(STEP) "pythons" tests/pythons.sh $(or $(PYTHONS),3.9 3.13)

world-%: $(DEV)
	@GPULOCK_WORLD_SECONDS=$* GPULOCK_WORLD_SEED=$(or $(SEED),1) $(FAST) $(STEP) "world $* s" \
	    $(PYTEST) -m "$(if $(filter 5,$*),not slow,not soak)" tests/world
world: $(DEV)  ## the real code in a deterministic world: SCHEDULES=10000 SEED=1 (as printed) WORDS='-k slurm'
	@GPULOCK_WORLD_SCHEDULES=$(or $(SCHEDULES),10000) GPULOCK_WORLD_SEED=$(SEED) \
	    $(FAST) $(PYTEST) -n auto --timeout 0 $(WORDS) tests/world

tools:
	@tests/tools.sh "make $(or $(MAKECMDGOALS),check)"

format: $(DEV)  ## rewrite the code as `check` wants it
	@$(BIN)/ruff format
	@$(BIN)/ruff check --fix

##@ Test on this machine
test: tools $(DEV)  ## check, pyright, slow and exporter tests; nothing is asked, nothing installed on this machine
	@$(LONG_UP) $(MAKE) -j -O pyright $(CHECKS)
	@$(LONG_UP) $(MAKE) slow world-60
	@$(LONG_UP) $(STEP) "exporter" $(PYTEST) -n 4 --dist loadfile --timeout 120 tests/exporter tests/gpu
	@$(if $(AS_ROOT),$(MAKE) booted,:)
	@echo "not run: $(LEFT_OUT)"
labs: tools $(DEV)  ## every lab in its short form, installations, the sweep sampled (root); it asks first
	@tests/consent.sh "make labs"
	@$(STEP) "labs themselves" $(LAB) -m lab $(ITSELF)
	@$(STEP) "labs, wheel, sweep" tests/together.sh 2700 \
	    $(foreach lab,SLURM SGE,"$(ALONE) '$(LAB) -m lab $($(lab)); exit \$$?'") "$(SELF) others"
booted: $(DEV)  ## unit and exporter tests on a machine that was booted 30 s and 10 minutes ago (root)
	@for seconds in 30 600; do $(FAST) $(STEP) "booted $$seconds s" tests/booted.sh $$seconds \
	    $(PYTEST) -n 4 --dist loadfile --timeout 120 -m "$(QUICK)" tests/unit tests/exporter tests/gpu; done
others: $(DEV)
	@$(LAB) -m lab $(OTHERS)
	@$(LAB) -m "install and not soak" $(INSTALL)
	@$(ALONE) '$(PYTEST) -m sweep --timeout 1500 tests/sweep; exit $$?'

lab-sge: $(DEV)  ## the lab with a real Grid Engine (root); GRIDENGINE=/opt/sge: the one below that folder
	@tests/consent.sh "make lab-sge"
	@GPULOCK_LAB_GRIDENGINE=$(GRIDENGINE) $(STEP) "lab-sge" $(LAB) -m lab tests/labs/sge

lab-isolation: $(DEV)  ## jobs kept to their devices by this machine's kernel (root)
	@tests/consent.sh "make lab-isolation"
	@$(STEP) "lab-isolation" $(LAB) -m lab tests/labs/isolation $(wildcard tests/labs/*/test_isolation.py)

lab-slurm: $(DEV)  ## the lab with a real Slurm (root); RELEASE=trixie or sid: that Debian's, in a root
	@tests/consent.sh "make lab-slurm"
	@$(STEP) "$(strip lab-slurm $(RELEASE))" env $(RELEASED) -m $(if $(SHORT),short,lab) tests/labs/slurm

lab-pyxis: $(DEV)  ## Slurm's steps in the real pyxis (root): SOURCES=folder with checkouts of pyxis and enroot; RELEASE=
	@tests/consent.sh "make lab-pyxis"
	@test -d "$(SOURCES)/pyxis" || { echo "SOURCES=: a folder with pyxis and enroot of NVIDIA's" >&2; exit 2; }
	@SHOWN="$(abspath $(SOURCES))" GPULOCK_PYXIS="$(abspath $(SOURCES))" $(STEP) "$(strip lab-pyxis $(RELEASE))" env $(RELEASED) -m lab tests/labs/slurm/test_pyxis.py tests/labs/slurm/real_enroot.py

lab-containers: $(DEV)  ## the lab with real Apptainer, podman, bubblewrap, Charliecloud (root)
	@tests/consent.sh "make lab-containers"
	@$(STEP) "lab-containers" $(PYTEST) -m lab --timeout 300 tests/labs/containers

lab-prometheus: $(DEV)  ## the lab with a real Prometheus: rules, alerts and dashboards (root)
	@tests/consent.sh "make lab-prometheus"
	@$(STEP) "lab-prometheus" $(LAB) -m lab tests/labs/prometheus

lab-systemd: $(DEV)  ## gpulock's services and slurmd under a real systemd, in namespaces (root); RELEASE=: slurmd
	@tests/consent.sh "make lab-systemd"
	@$(STEP) "$(strip lab-systemd $(RELEASE))" env $(RELEASED) -m lab $(if $(RELEASE),$(SLURMD),tests/labs/systemd)

attack: $(DEV)  ## what hostile users tried, each attack with what stopped it (root)
	@tests/consent.sh "make attack"
	@$(LAB) -m attack tests/labs tests/unit tests/exporter

sweep: tools $(DEV)  ## stop the hooks at system calls, sampled
	@$(PYTEST) -m sweep --timeout 3000 tests/sweep

mutants: $(DEV)  ## small wrong changes, each of which a unit test must see (root; WORDS="locks gate")
	@$(STEP) "mutants" $(BIN)/python tests/mutants/run.py $(WORDS)

soak: $(DEV)  ## every "must hold" at its full count: hours (root)
	@tests/consent.sh "make soak"
	@GPULOCK_WORLD_SCHEDULES=1000000 GPULOCK_WORLD_ALL=1 $(FAST) $(STEP) "world" \
	    $(PYTEST) -n auto --timeout 0 tests/world
	@$(MAKE) mutants
	@$(MAKE) pythons PYTHONS="3.9 3.11 3.13 3.14"
	@GPULOCK_SOAK=1 $(STEP) "soak" $(PYTEST) -m "lab or sweep or soak" --timeout 14400 tests
	@for release in trixie sid; do for lab in slurm systemd; do $(SURE) $(MAKE) lab-$$lab RELEASE=$$release; done; done
	@CGROUPS=2 $(SURE) $(MAKE) lab-slurm RELEASE=sid SHORT=1

bench: $(RUNTIME)  ## how long a claim and a hook take
	@$(BIN)/python tests/bench/run.py

bench-paired: $(RUNTIME)  ## the hooks of another commit and of this tree in turns (BEFORE=HEAD~1)
	@$(BIN)/python tests/bench/paired.py $(or $(BEFORE),HEAD~1) $(or $(ROUNDS),400)

bench-history: $(RUNTIME)  ## a million finished claims, filtered and summed (3 GB of scratch)
	@$(BIN)/python tests/bench/history.py

bench-isolation: $(DEV)  ## what ISOLATION=cgroup adds to the hooks (root)
	@tests/consent.sh "make bench-isolation"
	@$(BIN)/python tests/bench/isolation.py

bench-sge: $(DEV)  ## 200 short jobs on a real Grid Engine against /bin/true hooks (root)
	@tests/consent.sh "make bench-sge"
	@$(BIN)/python tests/bench/lab_sge.py

bench-slurm: $(DEV)  ## srun on a real Slurm against /bin/true hooks, and the Epilog's tail (root)
	@tests/consent.sh "make bench-slurm"
	@$(BIN)/python tests/bench/lab_slurm.py

bench-exporter: $(DEV)  ## the exporter on the NVML double, beside nvitop-exporter
	@$(BIN)/python tests/bench/exporter.py

bench-fleet: $(DEV)  ## 1,000 simulated nodes into a real Prometheus, on two cores (root; 5 minutes)
	@tests/consent.sh "make bench-fleet"
	@$(BIN)/python tests/bench/fleet.py

gpu-check: $(RUNTIME)  ## every metric beside nvidia-smi, on a real GPU under a load; writes docs/hardware/
	@$(BIN)/python tests/gpu/check.py

##@ Housekeeping
dashboards: $(DEV)  ## write the Grafana dashboards anew from their code
	@PYTHONPATH=exporter $(BIN)/python -m dashboards.make

clean:  ## remove .venv, caches and build output
	@rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

help:  ## this list
	@awk 'BEGIN { FS = ":.*## " } /^##@/ { print "\n" substr($$0, 5) } \
	    /^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile

.PHONY: demo man docs packages check tools booted format-check lint mypy pyright unit $(PARTS) slow pythons format test labs others lab-sge lab-isolation lab-slurm lab-pyxis lab-systemd lab-prometheus dashboards lab-containers attack sweep mutants soak bench bench-paired bench-history bench-isolation bench-sge bench-slurm bench-exporter bench-fleet gpu-check clean help

# An editable install: only a change of pyproject.toml makes it stale.
$(RUNTIME): pyproject.toml
	@$(STEP) "set up" tests/setup.sh runtime
$(DEV): pyproject.toml
	@$(STEP) "set up (dev)" tests/setup.sh dev
