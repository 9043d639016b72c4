# Everything a developer or CI runs. Each target installs what it needs into $(VENV) first.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
# Files of tests that run at a time, each on one thread.
WORKERS ?= 2
# Rooms whose tests start no interpreter and train next to nothing.
FAST := architecture arguments cli docs filters ledger mechanism metrics \
	optim randomness sampling spectral upstream
INSTALLED := $(VENV)/.installed

.PHONY: help install finetune test test-fast audit mutants docs lint format types check clean

help:  ## Say what the targets do.
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 12

$(INSTALLED): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

install: $(INSTALLED)  ## Make the virtual environment.

finetune: install  ## Fine-tune a small ViT privately on handwritten digits, offline.
	HF_HUB_OFFLINE=1 $(BIN)/accelerate launch scripts/finetune_vit.py --config configs/quickstart.yaml

test: install  ## Run the tests, offline, on the CPU.
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

docs: install  ## Make the pages that follow from the code.
	HF_HUB_OFFLINE=1 $(BIN)/python docs/generate.py

test-fast: install  ## Run the tests of single rooms, for the loop of editing.
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile \
		$(FAST:%=tests/test_%.py)

# A venv of its own for the newest pre-releases; it sees the torch of $(VENV) by a path file.
upstream: install  ## Run the contract tests on the newest pre-releases of what we build on.
	$(BIN)/python -m venv .venv-upstream
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
	  "$$(.venv-upstream/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/main.pth"
	.venv-upstream/bin/python -m pip install --quiet --pre --upgrade \
	  transformers accelerate opacus timm datasets
	PYTHONPATH=. OMP_NUM_THREADS=1 .venv-upstream/bin/python -m pytest -p no:xdist \
	  tests/test_upstream.py tests/test_opacus_conformance.py

audit: install  ## Run the audits that take long: 20 runs, all faults, images, every engine, two processes.
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python benchmarks/bench_audit.py

mutants: install  ## Plant faults of one line, and print those that no test notices.
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python benchmarks/mutants.py

wheel: install  ## Build the source distribution, and the wheel from it, into dist/.
	rm -rf dist
	$(BIN)/python -m build --outdir dist

# REQUIREMENTS=no takes those of $(VENV), by a path file, instead of installing them again.
wheel-test: wheel  ## Install the wheel into an empty environment and train with it elsewhere.
	rm -rf .venv-wheel && $(PYTHON) -m venv .venv-wheel
ifeq ($(REQUIREMENTS),no)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
	  "$$(.venv-wheel/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/main.pth"
endif
	.venv-wheel/bin/python -m pip install --quiet $(if $(filter no,$(REQUIREMENTS)),--no-deps) dist/*.whl
	rm -rf build/elsewhere && mkdir -p build/elsewhere
	cd build/elsewhere && HF_HUB_OFFLINE=1 ../../.venv-wheel/bin/hf-dpmuon finetune --config quickstart \
	  --max_steps 5 --output_dir run
	cd build/elsewhere && ../../.venv-wheel/bin/hf-dpmuon inspect run

lint: install  ## Check style and format.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: install  ## Mend style and format.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: install  ## Check types.
	$(BIN)/mypy

check: lint types test  ## All that CI runs.

clean:  ## Remove what the targets made, but no outputs.
	rm -rf $(VENV) .venv-upstream .venv-wheel .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
