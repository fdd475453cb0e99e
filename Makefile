# The one entry to the repository: a fresh clone, GNU make and Python 3.11 or newer are enough. pip's environment
# variables (PIP_EXTRA_INDEX_URL and the like) pass through.

PYTHON ?= python3
BIN ?= .venv/bin
TP ?= 1
PORT ?= 8000
MODEL ?=
IMAGE_PYTHON ?= 3.12
ENGINE ?= docker
TAG ?= dev
# Tests of one file stay together, in order; files are begun in order of their names: those of many processes come early, and no long one
# is left for the end. Those marked as timed must not share the machine with others.
TEST_PROCESSES ?= 2
# Seconds of a test that names none: it may have to install a browser first, or to wait for another that does.
SYSTEM_TIMEOUT_S := 300
TEST_ROOM := tests --ignore=tests/system --ignore=tests/gpu --ignore=tests/cluster
TARGETS ?= gateway scheduler worker worker-cpu
# Podman would take layers from its cache though the wheels have changed, and keep each layer as an image without a name.
UNCACHED = $(if $(findstring podman,$(ENGINE)),--layers=false)
# For CUDA the version whose Triton is the one that the kernels are written for; it wants an older setuptools than the rest.
CUDA_TORCH ?= 2.11.0
PIP := $(PYTHON) -m pip --disable-pip-version-check
# Wheels are built for one of many versions of glibc, and the base of the images has 2.34 or later; the first that is found is taken.
PLATFORMS := $(patsubst %,manylinux_2_%_x86_64,$(shell seq 34 -1 5)) manylinux2014_x86_64 any
DOWNLOAD := $(PIP) download --quiet --only-binary=:all: --find-links dist/wheels --python-version $(IMAGE_PYTHON) \
	$(PLATFORMS:%=--platform %)
# Where `make proto` writes; tests/test_repository.py compares a copy elsewhere with what is committed.
STUBS ?= .
# What `make lint` compares the contracts with: the last commit, or, when nothing has changed since, the one before their last change.
AGAINST ?= $(shell git diff --quiet HEAD -- proto && git log -1 --format=%h~1 -- proto || echo HEAD)

EXTRAS := gateway,scheduler,worker,local,dev
PROTOS := $(patsubst proto/lockstep/v1/%,shared/protocol/%,$(wildcard proto/lockstep/v1/*.proto))

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup constraints proto chart wheels images model run test test-system test-gpu gpu chaos test-cluster format clean
.PHONY: lint lint-style lint-types lint-imports lint-contracts lint-stubs

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: .venv/stamp ## Install everything into .venv, as pinned by constraints.txt

# torch comes first, asked for by its exact version: a CPU build offered beside PyPI's CUDA build is found only so.
.venv/stamp: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(f"Python >= 3.11 is needed, {sys.executable} is {sys.version}: make PYTHON=..." if sys.version_info < (3, 11) else 0)'
	@test -x .venv/bin/python || { echo "making .venv"; $(PYTHON) -m venv .venv; }
	@echo "installing torch into .venv (minutes on a slow line)"
	@.venv/bin/pip install --quiet --constraint constraints.txt "$$(grep '^torch==' constraints.txt)"
	@echo "installing the other packages into .venv"
	@.venv/bin/pip install --quiet --constraint constraints.txt --editable '.[$(EXTRAS)]'
	@touch $@

constraints: ## Resolve all dependencies anew and rewrite constraints.txt (TORCH=torch==2.13.0)
constraints: TORCH ?= $(shell grep '^torch==' constraints.txt)
constraints:
	@fresh=$$(mktemp -d) && trap 'rm -rf "$$fresh"' EXIT && \
	$(PYTHON) -m venv $$fresh && \
	$$fresh/bin/pip install --quiet "$(TORCH)" && \
	$$fresh/bin/pip install --quiet "$(TORCH)" --editable '.[$(EXTRAS)]' && \
	{ echo "# Every dependency of every extra, direct and transitive, at the version that CI runs. Made by \`make constraints\`."; \
	  $$fresh/bin/pip freeze --all --exclude pip --exclude lockstep | sed 's/+cpu$$//'; } > $$fresh/constraints.txt && \
	cp $$fresh/constraints.txt constraints.txt

proto: .venv/stamp ## Generate the stubs in shared/protocol from proto
	@$(BIN)/python -m grpc_tools.protoc -Ishared/protocol=proto/lockstep/v1 --plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc \
		--python_out=$(STUBS) --pyi_out=$(STUBS) --grpc_python_out=$(STUBS) --mypy_grpc_out=quiet,only_async:$(STUBS) $(PROTOS)

chart: .venv/stamp ## Generate the chart's values, schema and tables from helm/values.py
	@$(BIN)/python -m helm.generate

wheels: ## Fill dist/wheels with what the images install (IMAGE_PYTHON=3.12; CUDA=1: torch for GPUs too, gigabytes)
	@rm -rf dist/wheels build/lib && mkdir -p dist/wheels # build/lib: else modules that are gone come back
	$(PIP) wheel --quiet --no-deps --wheel-dir dist/wheels .
	$(DOWNLOAD) --no-deps --dest dist/wheels "$$(sed -n 's/^PACKAGE = "\(.*\)"/\1/p' services/worker/weights/demo.py)"
	$(DOWNLOAD) --constraint constraints.txt --dest dist/wheels "$$(grep '^torch==' constraints.txt)" 'lockstep[gateway,scheduler,worker]'
	$(if $(CUDA),mkdir dist/wheels/cuda)
	$(if $(CUDA),sed 's/^torch==.*/torch==$(CUDA_TORCH)/; /^setuptools==/d' constraints.txt > dist/wheels/cuda/constraints.txt)
	$(if $(CUDA),$(DOWNLOAD) --constraint dist/wheels/cuda/constraints.txt --dest dist/wheels/cuda torch==$(CUDA_TORCH))

images: ## Build the images from dist/wheels (ENGINE=docker TAG=dev BASE= WORKER_BASE= TARGETS="gateway scheduler worker-cpu")
	@for target in $(TARGETS); do \
		$(ENGINE) build --target $$target --tag lockstep-$$target:$(TAG) --build-context wheels=dist/wheels \
			$(if $(BASE),--build-arg BASE=$(BASE)) $(if $(WORKER_BASE),--build-arg WORKER_BASE=$(WORKER_BASE)) \
			$(UNCACHED) $(BUILD_FLAGS) . || exit; \
	done

model: .venv/stamp ## Convert the demo model once; prints the path of its folder
	@$(BIN)/python -m services.worker.weights.demo

run: .venv/stamp ## Serve on this machine (MODEL=folder TP=1 PORT=8000; without MODEL the demo model)
	@$(BIN)/lockstep serve $(if $(MODEL),'$(MODEL)') --tensor-parallel-size $(TP) --port $(PORT)

# Hundreds of processes are started: each would compile what it imports, where nobody may keep that.
test: export PYTHONDONTWRITEBYTECODE :=
test: .venv/stamp ## Run every test that needs nothing but Python packages
	@$(BIN)/python -m pytest $(TEST_ROOM) -m "not timed" --numprocesses=$(TEST_PROCESSES) --dist=loadfile --no-loadscope-reorder
	@$(BIN)/python -m pytest $$(grep -rl --include='test_*.py' 'mark\.timed' tests) -m timed

test-system: .venv/stamp ## Run the tests that need root, Debian packages or a registry
	@$(BIN)/python -m pytest tests/system --timeout=$(SYSTEM_TIMEOUT_S) --numprocesses=$(TEST_PROCESSES) --dist=loadfile

test-gpu: .venv/stamp ## Run the tests that need GPUs
	@$(BIN)/python -m pytest tests/gpu

gpu: .venv/stamp ## Run the tests that need GPUs, then print every table of kernels and models (QUICK=--quick: each line once)
	@PYTHON=$(BIN)/python QUICK='$(QUICK)' .ci/gpu

chaos: REQUESTS ?= 100000
chaos: .venv/stamp ## Ask REQUESTS times while services are killed, stopped and drained (for an hour and more)
	@$(BIN)/python -m tests.e2e.chaos $(REQUESTS)

test-cluster: .venv/stamp ## Run the tests that need a KUBECONFIG
	@$(BIN)/python -m pytest -rs tests/cluster

lint: lint-style lint-types lint-imports lint-contracts lint-stubs ## Check style, types, import rules, contracts and stubs

lint-style: .venv/stamp
	$(BIN)/ruff check
	$(BIN)/ruff format --check

lint-types: .venv/stamp
	$(BIN)/mypy

lint-imports: .venv/stamp
	$(BIN)/lint-imports

lint-contracts: .venv/stamp
	$(BIN)/buf lint proto
	@if git cat-file -e $(AGAINST):proto/lockstep 2>/dev/null; then \
		echo "buf breaking proto, against $(AGAINST)" && mkdir -p build \
		&& git archive --output build/contracts.tar $(AGAINST):proto && $(BIN)/buf breaking proto --against build/contracts.tar; \
	else echo "buf breaking: no earlier contracts to compare with"; fi

lint-stubs: .venv/stamp
	$(BIN)/python -m pytest -q tests/test_repository.py -k stubs

format: .venv/stamp ## Rewrite the code as `make lint` wants it
	$(BIN)/ruff check --fix-only
	$(BIN)/ruff format

clean: ## Remove what was built and cached, .venv included
	rm -rf .venv .lockstep build dist *.egg-info .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
