# Each recipe is one line; the work is in scripts/. `make help` lists the targets.
SHELL := /bin/bash
PYTHON := .venv/bin/python
STAMP := .venv/.setup-stamp
DEMO := .demo/venv/.setup-stamp
FRAMEWORKS := .venv/.frameworks-stamp

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-matrix lint e2e chaos fuzz bench bench-bulk docs test-gpu bench-gpu test-frameworks pictures

help: ## Show this list
	@grep -hE '^[a-z0-9-]+:.*## ' Makefile | sed -E 's/^([a-z0-9-]+):.*## /\1\t/' | expand -t 10

$(STAMP): pyproject.toml requirements/dev.txt requirements/torch.txt scripts/setup
	@scripts/setup

$(DEMO): pyproject.toml requirements/demo.txt scripts/setup
	@scripts/setup demo

$(FRAMEWORKS): pyproject.toml requirements/dev.txt requirements/frameworks.txt requirements/torch.txt scripts/setup
	@scripts/setup frameworks

setup: ## Make .venv and install everything for development
	@scripts/setup

demo: $(DEMO) ## Serve a digits classifier, kill its worker, check every answer (KEEP=1 leaves it up)
	@.demo/venv/bin/python -m scripts.demo $(if $(filter-out 0,$(KEEP)),--keep)

test: $(STAMP) ## Lint, then every test but the long ones, against one server
	@scripts/test

test-matrix: $(STAMP) ## The same tests on Redis 6.2, Valkey, a cluster, Sentinels and object stores
	@scripts/test --matrix

lint: $(STAMP) ## ruff, mypy, import layers
	@scripts/lint

e2e: $(STAMP) ## Only the tests that drive the whole server, with Triton's own clients and perf_analyzer
	@scripts/tools && $(PYTHON) -m pytest tests/e2e -q -m 'not long' && $(PYTHON) -m pytest tests -q -m long -n 3 --dist loadfile

chaos: $(STAMP) ## Kill processes under load for ten minutes (CHAOS_SECONDS, CHAOS_KILLS, CHAOS_SEED)
	@CHAOS_SECONDS=$${CHAOS_SECONDS:-600} CHAOS_KILLS=$${CHAOS_KILLS:-220} $(PYTHON) -m pytest tests -m chaos -v

fuzz: $(STAMP) ## Send damaged input to every part for an hour (QINFER_TEST_FUZZ_S, QINFER_TEST_SEED)
	@QINFER_TEST_FUZZ_S=$${QINFER_TEST_FUZZ_S:-3600} $(PYTHON) -m pytest tests/fuzz -v

bench: $(STAMP) ## Measure against peers; writes benchmarks/RESULTS.md (an hour; ARGS="--quick")
	@$(PYTHON) benchmarks/run $(ARGS)

bench-bulk: $(STAMP) ## Score data sets beside a hand-written loop and Ray Data; writes its section of RESULTS.md
	@$(PYTHON) -m benchmarks.bulk.suite $(ARGS)

test-gpu: $(STAMP) ## Models on a GPU against the CPU's answers (skipped where there is none)
	@$(PYTHON) -m pytest tests/gpu -v -rs

test-frameworks: $(FRAMEWORKS) ## Models of TensorFlow, LiteRT, treelite, JAX and MLflow (downloads 600 MB)
	@$(PYTHON) -m pytest tests/integration/frameworks -v -rs

bench-gpu: $(STAMP) ## Throughput on a GPU as a share of the raw backend; writes benchmarks/GPU.md
	@$(PYTHON) -m benchmarks.gpu $(ARGS)

docs: $(STAMP) ## Generate the reference pages, check links and snippets, build the site into .site
	@scripts/docs

pictures: $(STAMP) ## Make the console's pictures in docs/images anew (ten minutes; scripts/tools chromium)
	@QINFER_TEST_PICTURES=docs/images $(PYTHON) -m pytest tests/e2e/console -q -k pictures --basetemp=/tmp/qinfer-pictures
