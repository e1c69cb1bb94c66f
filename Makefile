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
# Unit tests keep their files in memory where they can.
FAST := tests/memory.sh
AS_ROOT := $(filter 0,$(shell id -u))
# The quick unit tests go to a process for each core, file by file: every worker of xdist would collect them all.
CORES := $(shell nproc)
PARTS := $(addprefix unit-,$(shell seq $(CORES)))
CHECKS := $(PARTS) mypy lint format-check world-200
# A step of tests/steps.py, by the start of its name. As root all of it is in a private root (tests/root).
RUN := python3 -m tests.run
ENTER = tests/root/enter.sh $(or $(ROOT),labs)

##@ Use
demo: $(RUNTIME)  ## gpulock on a simulated node: no GPU, no scheduler, no root
	@$(BIN)/python -m tests.demo

man: $(RUNTIME)  ## man pages and completions for shells, below build/share
	@$(BIN)/python packaging/manual.py build/share

docs: $(RUNTIME)  ## the pages as a site, below build/site; a link that leads nowhere ends it
	@rm -rf build/pages && mkdir -p build/pages
	@cp -r --parents *.md LICENSE docs exporter/README.md prolog/drop-env.c tests/gpu/README.md build/pages
	@test -d build/mkdocs || $(BIN)/python -m pip install -qq --target build/mkdocs mkdocs==1.6.1
	@PYTHONPATH=build/mkdocs $(STEP) "docs" $(BIN)/python -m mkdocs build --strict -f packaging/site.yml

packages: $(RUNTIME)  ## a .deb and an .rpm for each machine, sdist and wheel, below build/packages
	@$(STEP) "packages" $(BIN)/python packaging/build.py build/packages

install: $(RUNTIME)  ## gpulock below PREFIX= (/usr/local) of DESTDIR=, with a library of its own
	@$(STEP) "install" $(BIN)/python packaging/build.py --prefix "$(or $(PREFIX),/usr/local)" "$(or $(DESTDIR),/)"

##@ Check
check: $(DEV)  ## format, lint, types by mypy, layers, quick unit tests, all at the same time (the default)
	@$(MAKE) -j -O $(CHECKS)

format-check: $(DEV)
	@$(STEP) "ruff format" $(BIN)/ruff format --check
lint: $(DEV)
	@$(STEP) "ruff check" $(BIN)/ruff check
mypy: $(DEV)
	@$(STEP) "mypy" $(BIN)/mypy
# In the 16 MiB that node gives new objects by itself, it takes a sixth more of a processor.
pyright: $(DEV)  ## types by pyright: a minute, which no other target takes
	@test -x $(BIN)/pyright || $(BIN)/python -m pip install -qq --editable '.[pyright]'
	@NODE_OPTIONS="$${NODE_OPTIONS:-} --max-semi-space-size=64" \
	    $(STEP) "pyright" $(BIN)/pyright --project pyproject.toml
unit: $(DEV)  ## the quick unit tests alone (the layers are one of them)
	@$(MAKE) -j -O $(PARTS)
$(PARTS): unit-%: $(DEV)
	@$(FAST) $(STEP) "unit tests $*/$(CORES)" $(PYTEST) -m "$(QUICK)" \
	    $$(find tests/unit -name 'test_*.py' | sort | awk 'NR % $(CORES) + 1 == $*')
slow: $(DEV)  ## the slow unit tests: many processes, installations
	@$(FAST) $(STEP) "slow tests" $(PYTEST) -n auto -m "slow and not soak" tests/unit

world-%: $(DEV)
	@GPULOCK_WORLD_SCHEDULES=$* GPULOCK_WORLD_SEED=$(SEED) $(FAST) $(STEP) "world $*" \
	    $(PYTEST) -m "$(if $(filter 200,$*),not slow,not soak)" tests/world
world: $(DEV)  ## the real code in a deterministic world: SCHEDULES=10000 SEED=1 (as printed) WORDS='-k slurm'
	@GPULOCK_WORLD_SCHEDULES=$(or $(SCHEDULES),10000) GPULOCK_WORLD_SEED=$(SEED) \
	    $(FAST) $(PYTEST) -n auto --timeout 0 $(WORDS) tests/world

format: $(DEV)  ## rewrite the code as `check` wants it
	@$(BIN)/ruff format
	@$(BIN)/ruff check --fix

##@ Test
test: $(if $(AS_ROOT),,$(DEV))  ## everything that is quick, as root with real schedulers: ten minutes; STEPS=slow
	@$(RUN) test $(STEPS)
labs:  ## every lab with its real scheduler, packages, other Pythons (root): twenty minutes; STEPS="Slurm"
	@$(RUN) labs $(STEPS)
soak:  ## every "must hold" at its full count: hours (root)
	@$(RUN) soak $(STEPS)
lab:  ## tests of a lab (root): WORDS="tests/labs/sge -k share"; ROOT=trixie or sid: a newer Slurm; CGROUPS=2: no version 1
	@$(ENTER) python -m pytest -v --timeout 600 -m lab $(or $(WORDS),tests/labs)
shell:  ## a shell in the private root, gone with all that it wrote but the checkout (root); ROOT= as above
	@$(ENTER) bash

attack:  ## what hostile users tried, each attack with what stopped it (root)
	@$(ENTER) python -m pytest -v --timeout 600 -m attack tests/labs tests/unit tests/exporter

sweep: $(DEV)  ## stop the hooks at system calls, sampled
	@$(PYTEST) -m sweep --timeout 3000 tests/sweep

# A mutant of code that ends processes may end any: it sees those of its own root alone.
mutants:  ## small wrong changes of hot code, which unit tests must see (root; COUNT=300 WORDS="locks gate")
	@tests/root/enter.sh bookworm python tests/mutants/run.py $(if $(COUNT),--count $(COUNT)) $(if $(SEED),--seed $(SEED)) $(WORDS)

coverage: $(DEV)  ## which part of the hot code's lines and branches the quick unit tests run, in per cent
	@$(FAST) $(STEP) "unit tests" $(BIN)/coverage run -m pytest -q -m "$(QUICK)" tests/unit
	@for package in alloc hooks isolation job node sge slurm store '*'; do printf '%-13s %s %%\n' "$$package" \
	    "$$($(BIN)/coverage report --format total --precision 1 --include "gpulock/$$package/*")"; done

bench: $(DEV)  ## how long a hook takes as a process, and a release's look among up to 30,000 processes
	@code=0; $(BIN)/python -m tests.bench.hooks || code=1; $(BIN)/python -m tests.bench.release || code=1; exit $$code

bench-walks: $(DEV)  ## how many modules and functions a prolog, a dead owner and a metric pass through
	@$(BIN)/python -m tests.bench.walks $(WORDS)

bench-exporter: $(DEV)  ## the exporter on the NVML double
	@$(BIN)/python -m tests.bench.exporter

gpu-check: $(RUNTIME)  ## every metric beside nvidia-smi, on a real GPU; writes docs/hardware/
	@$(BIN)/python -m tests.gpu.check

##@ Housekeeping
pictures: $(DEV)  ## photograph `gpulock status` and the exporter's page for README (needs chromium)
	@$(BIN)/python -m tests.demo.pictures

clean:  ## remove .venv, caches and build output
	@rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

help:  ## this list
	@awk 'BEGIN { FS = ":.*## " } /^##@/ { print "\n" substr($$0, 5) } \
	    /^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile

.PHONY: demo man docs packages install check format-check lint mypy pyright unit $(PARTS) slow world format test labs soak lab shell attack sweep mutants coverage bench bench-walks bench-exporter gpu-check pictures clean help

# An editable install: only a change of pyproject.toml makes it stale.
$(RUNTIME): pyproject.toml
	@$(STEP) "set up" tests/setup.sh runtime
$(DEV): pyproject.toml
	@$(STEP) "set up (dev)" tests/setup.sh dev
