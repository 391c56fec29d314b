# What a person or CI does with this checkout. `make` alone lists it; `make PYTHON=...` chooses the interpreter.
SHELL := /bin/sh
BIN := .venv/bin
export PYTHON

.PHONY: help venv demo test prove check bench soak conformance others format docs humaneval clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv:  ## make .venv ready (every target below does it by itself)
	@sh tools/venv.sh

demo: venv  ## the main job: acquire sandboxes, run code in them, get the results, leave nothing
	@$(BIN)/python examples/demo.py

test: venv  ## run the test suite (more arguments: make test ARGS="-k ledger")
	@$(BIN)/pytest -n 2 $(ARGS)

prove: venv  ## SIGKILL, Ctrl-C and cancellations at every point, loads in full (many minutes)
	@$(BIN)/pytest --exhaustive tests/manager/test_crash.py tests/manager/test_interruptions.py \
		tests/manager/test_cancellation.py tests/local/faults/test_loads.py $(ARGS)

check: venv  ## lint, format, types, import contracts, generated docs
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python tools/docs.py --check

bench: venv  ## how long the main job takes, what the manager adds to the bare SDK, and how fast the local server is
	@$(BIN)/python bench/main_job.py $(ARGS)
	@$(BIN)/python bench/local.py $(ARGS)

soak: venv  ## many processes, faults, SIGKILLs: what leaks (make soak ARGS="--seconds 600")
	@$(BIN)/python bench/soak.py $(ARGS)

humaneval: venv  ## the 164 HumanEval problems, each in a sandbox of its own
	@$(BIN)/python examples/humaneval.py $(ARGS)

conformance: venv  ## E2B's own suites and command line against the local server (needs E2B_REPO, see docs/conformance.md)
	@$(BIN)/python tools/conformance.py $(ARGS)

others: venv  ## tools of others that speak E2B against the local server (needs Python 3.12)
	@$(BIN)/python tools/others.py $(ARGS)

format: venv  ## rewrite the code in the project's format
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

docs: venv  ## write the generated parts of docs/ anew
	@$(BIN)/python tools/docs.py

clean:  ## remove the environment and all caches
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis build dist *.egg-info
