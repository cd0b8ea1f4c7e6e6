# Two commands matter: `make demo` (post-train the tiny model) and `make test`. Both set up what they need.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1
# GPU=1 installs CUDA builds instead of the CPU ones.
REQUIREMENTS := $(if $(GPU),requirements/gpu.txt,requirements/torch-cpu.txt requirements/cpu.txt)

.PHONY: setup demo test test-full gpu-check lint types contracts check base-models monitoring docs clean help

help:
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

setup: $(VENV)/.installed ## install the pinned requirements into .venv (about 2 minutes, 4 GB); GPU=1 for CUDA builds

# --no-deps: the requirement files are complete, and an ordinary resolve would bring CUDA builds of torchvision.
$(VENV)/.installed: $(REQUIREMENTS) requirements/dev.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || \
		{ echo "BAPO needs Python 3.11, found '$(PYTHON)'. Try: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11"; exit 2; }
	@test -x $(BIN)/python || { echo "creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@for file in $(REQUIREMENTS) requirements/dev.txt; do \
		echo "installing $$file ($$(grep -c == $$file) packages; up to 3 minutes without output)"; \
		$(BIN)/python -m pip install --quiet --no-deps -r $$file || exit 1; done
	@$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@ldconfig -p | grep -q libnuma.so.1 || apt-get install -y --no-install-recommends libnuma1 || \
		echo "vLLM's CPU kernels need libnuma.so.1: install the package libnuma1 (Debian, Ubuntu) or numactl-libs"
	@command -v chromium >/dev/null || { test "$$(id -u)" = 0 && \
		apt-get install -y -qq --no-install-recommends -o DPkg::Lock::Timeout=300 chromium fonts-dejavu-core >/dev/null; } || \
		echo "the tests of the web page are skipped without a browser: install chromium (and fonts-dejavu-core)"
	@touch $@

demo: setup ## post-train the shipped tiny model on chains of operations with BAPO, all parts real
	$(BIN)/bapo train deploy/configs/demo.toml --run.name auto
	@echo "The table above: how often the model solves chains of operations it has not seen, before and after training by"
	@echo "reward alone. Next: bapo view latest (what it wrote, and why each group trained or not); bapo init (your own data);"
	@echo "bapo train deploy/configs/demo-agents.toml (the same for an agent with tools). Commands are in .venv/bin."

# One xdist worker per core (nproc heeds OMP_ variables); each has a Redis of its own and imports torch once.
WORKERS ?= $(shell env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc)
PYTEST := $(BIN)/python -m pytest --numprocesses $(WORKERS)
FAST_TIERS := tests/unit tests/contrib tests/contract tests/process tests/smoke

test: setup ## what everybody runs: 6 to 10 minutes on two idle cores; says what it left out
	$(PYTEST) $(FAST_TIERS)

# torchvision in a folder of its own: it is optional, and `make test` shows that everything else works without it.
test-full: setup ## what `make test` leaves out, at most 25 minutes; OPTIONS="--stop-after SECONDS --since COMMIT"
	@test -d .vision || $(BIN)/python -m pip install --quiet --no-deps --target .vision -r requirements/vision.txt
	PYTHONPATH=$(CURDIR)/.vision $(PYTEST) tests/full $(OPTIONS)

# Without `setup`: a machine without network has its own Python, and what `benchmarks.gpu unpack` has installed.
GPU_PYTHON := PYTHONPATH=$(wildcard .gpu/site) $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
gpu-check: ## measure all that needs a GPU (docs/gpus.md); STAGES="learner engine" OPTIONS="--device cpu --size tiny"
	$(GPU_PYTHON) -m benchmarks.gpu run $(STAGES) $(OPTIONS)

lint: setup ## ruff, and words that the field does not use
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python .ci/words.py

types: setup ## mypy --strict on everything but tests and benchmarks
	$(BIN)/mypy

contracts: setup ## who may import whom
	$(BIN)/lint-imports

# The site is made of the Markdown where it lies: mkdocs wants its pages below one folder.
DOCS_ENV := .venv-docs
docs: ## build the pages as a searchable site in site/
	@test -x $(DOCS_ENV)/bin/mkdocs || { $(PYTHON) -m venv $(DOCS_ENV); \
		echo "installing requirements/docs.txt"; $(DOCS_ENV)/bin/pip install --quiet -r requirements/docs.txt; }
	@rm -rf .mkdocs && mkdir .mkdocs
	@git ls-files -co --exclude-standard -- '*.md' docs/images deploy/configs deploy/examples examples LICENSE CITATION.cff \
		| xargs cp --parents -t .mkdocs
	NO_MKDOCS_2_WARNING=1 $(DOCS_ENV)/bin/mkdocs build --strict

check: lint types contracts test ## before a commit

base-models: setup ## train the five tiny base models again (about 40 minutes of one core)
	$(BIN)/python -m models.train_base_model --out models/countdown-tiny
	$(BIN)/python -m models.train_chain_model --out models/chain-tiny
	$(BIN)/python -m models.train_lookup_model --out models/lookup-tiny
	$(BIN)/python -m models.train_math_model --out models/math-tiny
	$(BIN)/python -m models.train_geometry_model --out models/geometry-tiny

monitoring: setup ## write dashboards, alerts and docs/metrics.md again, from the registry of metrics
	$(BIN)/python -m deploy.monitoring

clean: ## remove the environment and all runs
	rm -rf $(VENV) .vision outputs
