# Two commands do everything: `make quickstart` and `make test`. TORCH picks torch's requirement, for example
# `make test TORCH=torch==2.13.0`; by default it is the newest torch with the Triton that it brings.
PYTHON ?= python3
TORCH ?= torch
VENV := .venv
BIN := $(VENV)/bin
# One stamp for each choice of torch: another TORCH, or a change of dependencies, installs anew.
STAMP := $(VENV)/.installed-$(subst /,_,$(TORCH))

.PHONY: quickstart test lint venv bench-cpu gpu-test compile-check mutants clean

venv: $(STAMP)

$(STAMP): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@rm -f $(VENV)/.installed-*
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --upgrade "$(TORCH)"
	$(BIN)/python -m pip install --quiet "$(TORCH)" --editable ".[test,lint]"
	@touch $@

quickstart: venv
	$(BIN)/python examples/quickstart.py

test: venv
	$(BIN)/python -m pytest -n auto --ignore=tests/interpret
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -n auto tests/interpret

# On a machine with a GPU, in whatever environment has torch for it.
gpu-test:
	$(PYTHON) -m pytest tests/gpu

# Every configuration of the portable kernels, for GPUs that need not be there: about an hour on two cores.
compile-check: venv
	$(BIN)/python benchmarks/compile_check.py

# Breaks kernels on purpose and counts what the emulator finds, of the emulator's mechanisms and of the kernels that
# are shipped; FAMILIES are files or modules with a FAMILY. Less than 95 % of some family's is an error.
FAMILIES ?= tests/emulator/mechanisms/*.py tests/emulator/families/*.py
mutants: venv
	$(BIN)/python -m jaggedtensor.testing.mutants $(FAMILIES)

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench-cpu: venv
	$(BIN)/python benchmarks/cpu.py

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
