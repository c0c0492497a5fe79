# Everything a person or CI types. PYTHON= names the interpreter to start from, PIP_ARGS= goes to every `pip install`.
SHELL := /bin/sh
PYTHON ?= $(shell for p in python3 python3.12 python3.11 python3.13; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$p" && break; done)
ifeq ($(strip $(PYTHON)),)
PYTHON := python3
endif
PIP_ARGS ?=
export PIP_ARGS
SETUP = "$(PYTHON)" scripts/setup.py
NOT_HERE = not gpu and not cluster

.PHONY: help demo test test-long test-oldest test-pure-312 venv peers peers-surface clean

help:  ## this list
	@sed -n 's/^\([a-z0-9-]*\):.*## */  make \1	/p' Makefile

demo:  ## train a small model through five faults, and prove that nothing was lost
	@py=$$($(SETUP) demo) && "$$py" -m everstep.experiments.demo $(DEMO_ARGS)

test:  ## what CI runs: set-up, ./check, the tests with real processes, the pure tests on Python 3.12
	@py=$$($(SETUP) dev) && EVERSTEP_VENV="$${py%/bin/python}" ./check && \
	echo && echo "== process tests" && "$$py" -m pytest -q tests/procs -n 2 --dist loadfile -m 'not long and $(NOT_HERE)'
	@$(MAKE) --no-print-directory test-pure-312

test-long:  ## the full counts that take minutes to hours; their summary goes to docs/results/long.md
	@py=$$($(SETUP) dev) && mkdir -p build && \
	{ "$$py" -m pytest -q tests -n 2 --dist load --junitxml build/long.xml -m 'long and $(NOT_HERE)'; code=$$?; \
	"$$py" scripts/long_summary.py build/long.xml > docs/results/long.md; exit $$code; }

test-oldest:  ## the oldest torch that is promised, by hand: 2.8
	@py=$$($(SETUP) oldest) && "$$py" -m pytest -q tests -m 'not long and $(NOT_HERE)'

test-pure-312:  ## the pure tests without torch on Python 3.12, where it is installed
	@new=$$($(SETUP) find 3.12); \
	if [ -z "$$new" ]; then echo "no Python 3.12 on this machine: the pure tests ran on $(PYTHON) alone"; exit 0; fi; \
	echo && echo "== pure tests, Python 3.12, no torch" && \
	py=$$("$$new" scripts/setup.py pure) && "$$py" -m pytest -q tests/unit -n 2 -m 'not long'

venv:  ## the environment to develop in
	@py=$$($(SETUP) dev) && echo "ready: $$py"

peers:  ## an environment of its own for the library that we compare with
	@py=$$($(SETUP) peers) && echo "ready: $$py"

peers-surface:  ## read the other library's public names and answers anew, into the tables that our tests are held to
	@py=$$($(SETUP) peers) && "$$py" -W ignore scripts/peers_surface.py && "$$py" -W ignore scripts/peers_monitors.py

clean:  ## all that make has made, the environments and the demo's runs included
	rm -rf .venv .venv-* .demo .mypy_cache .ruff_cache .import_linter_cache .pytest_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
