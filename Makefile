# Two commands do everything: `make quickstart` and `make test`. TORCH picks torch's requirement, for example
# `make test TORCH=torch==2.13.0`; by default it is the newest torch with the Triton that it brings.
PYTHON ?= python3
TORCH ?= torch
VENV := .venv
BIN := $(VENV)/bin
# One stamp for each choice of torch: another TORCH, or a change of dependencies, installs anew.
STAMP := $(VENV)/.installed-$(subst /,_,$(TORCH))

.PHONY: quickstart test lint venv bench-cpu gpu-test gpu-sanitize compile-check compile-check-other test-compile-other peers
.PHONY: mutants clean

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

# What compute-sanitizer and Triton's ConSan say of small problems; SANITIZE narrows it, as SANITIZE="--tools racecheck".
gpu-sanitize:
	$(PYTHON) benchmarks/sanitize.py $(SANITIZE)

# Compiles the kernels for GPUs that need not be there and holds them to their budgets. QUICK=1: each Gluon family once, a
# minute on two cores. Otherwise every case and every configuration of the portable kernels, more than an hour; CHECKS
# narrows it, as CHECKS="--kernels hopper blackwell" (about ten minutes). Beside FlashAttention-4's where `make peers` has
# installed it.
PEERS ?= $(HOME)/.cache/jaggedtensor-peers
PEER = $(wildcard $(PEERS)/bin/python)
compile-check: venv
	$(BIN)/python benchmarks/compile_check.py $(if $(QUICK),--quick) $(if $(PEER),--peers $(PEER)) $(CHECKS)

# The same with another version of Triton, put into a folder of its own.
OTHER ?= 3.8.0
compile-check-other: venv build/triton-$(OTHER)
	$(MAKE) compile-check CHECKS="--triton build/triton-$(OTHER) $(CHECKS)"

# What tests say of compiled kernels with it: one to three minutes.
test-compile-other: venv build/triton-$(OTHER)
	PYTHONPATH=build/triton-$(OTHER) $(BIN)/python -m pytest -n auto tests/compile

build/triton-%:
	$(BIN)/python -m pip install --quiet --no-deps --target $@ triton==$*

# FlashAttention-4 and what it imports, for compile-check, in an environment of their own outside of this folder.
peers:
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet "$(TORCH)" numpy packaging einops
	$(PEERS)/bin/python -m pip install --quiet --no-deps --pre --only-binary=:all: flash-attn-4==4.0.0b36 \
	    quack-kernels==0.6.5 nvidia-cutlass-dsl==4.8.1 nvidia-cutlass-dsl-libs-base==4.8.1 \
	    nvidia-cutlass-dsl-libs-core==4.8.1 nvidia-cutlass-dsl-libs-cu13==4.8.1 apache-tvm-ffi==0.1.15.post2 \
	    torch-c-dlpack-ext==0.1.5 cuda-bindings cuda-pathfinder triton==3.9.0

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
