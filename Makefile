# `make` alone lists the targets.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

BIN := .venv/bin
# Flags for `make serve` and `make demo`: make serve ARGS="--port 9000"
ARGS ?=
# What to give pytest: make test PYTEST_ARGS="-k splice -x"
PYTEST_ARGS ?=
# What `make check` looks at; by default what differs from the last commit.
FILES ?=
# See deploy/images.sh
IMAGES ?=
PUSH ?=
# See deploy/digests.sh
CHECK ?=
REGISTRY ?=
export PYTEST_ARGS FILES

.PHONY: help setup sglang-setup vllm-setup tools clients-setup serve sglang vllm demo test check nightly clients lint fmt boards docs metrics-docs models-docs chart-schema screenshots wheel images digests clean

help: ## show this list
	@echo "Leyline: an OpenAI-compatible proxy that keeps the KV cache when agents edit their history."
	@echo
	@echo "First time here?   make serve      then, in another terminal:   make demo"
	@echo "Changing the code? make fmt, then make test"
	@echo
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo "Everything is installed into .venv, .venv-sglang and .venv-vllm; nothing outside the"
	@echo "checkout is changed, except that a missing python3-venv, and Chromium for tests, are installed with apt"
	@echo "when root or passwordless sudo allows it."
	@echo 'Python to use: make setup PYTHON=python3.12. PyTorch build: TORCH_INDEX=URL (or "none").'

setup: ## make .venv with everything in it; costs nothing when it is up to date
	@deploy/setup.sh

sglang-setup: setup ## make .venv-sglang: SGLang for a CPU (3 GB); costs nothing when it is up to date
	@deploy/sglang/setup.sh

vllm-setup: setup ## make .venv-vllm: vLLM for a CPU (2 GB); costs nothing when it is up to date
	@deploy/vllm/setup.sh

tools: setup
	@deploy/tools.sh
	@deploy/helm.sh

clients-setup: setup
	@deploy/clients.sh

serve: setup ## proxy and embedded engine on http://127.0.0.1:8790
	@exec $(BIN)/leyline serve $(ARGS)

sglang: sglang-setup ## SGLang with a small model on the CPU, and the proxy in front of it
	@exec deploy/sglang/run.sh $(ARGS)

vllm: vllm-setup ## vLLM with a tiny model on the CPU, and the proxy in front of it
	@exec deploy/vllm/run.sh $(ARGS)

demo: setup ## replay a recorded agent session and compare the cache with and without splicing
	@exec $(BIN)/leyline demo --plot out/demo.png $(ARGS)

test: ## what CI runs: lint, types, import contracts, tests
	@deploy/test.sh "not nightly and not gpu" setup sglang-setup vllm-setup tools lint

check: setup ## lint, types and tests of what changed, in under a minute: make check FILES="…" PYTEST_ARGS="-k splice -x"
	@deploy/check.sh

nightly: tools sglang-setup vllm-setup clients-setup ## the tests that are too slow for every commit
	@HYPOTHESIS_PROFILE=nightly LANES=2 deploy/test.sh "nightly and not gpu"

clients: clients-setup ## run real agents and SDKs, unmodified, against the proxy (8 GB; needs Node and Python 3.12)
	@OMP_NUM_THREADS=1 $(BIN)/python -m leyline_lab clients --json out/clients.json $(ARGS)

lint: setup ## ruff, mypy and import-linter, without the tests
	@echo "── ruff"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@echo "── mypy"
	@$(BIN)/mypy
	@$(BIN)/mypy grafana/build_dashboards.py grafana/draw_board.py
	@$(BIN)/mypy deploy/helm/values_schema.py
	@$(BIN)/mypy deploy/docs/build.py deploy/docs/metrics_page.py deploy/docs/models_page.py \
		deploy/docs/reference.py
	@$(BIN)/mypy deploy/release/release.py deploy/release/sbom.py
	@echo "── import contracts"
	@$(BIN)/lint-imports

fmt: setup ## format the code and fix what ruff can fix
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

boards: tools ## write grafana/dashboards/*.json anew from grafana/boards, and check the alert rules
	@$(BIN)/python grafana/build_dashboards.py
	@PATH="$(CURDIR)/$(BIN):$$PATH" promtool check rules deploy/alerts/*.yml
	@PATH="$(CURDIR)/$(BIN):$$PATH" promtool test rules tests/fixtures/alerts/*.yml

docs: setup ## write docs/api anew from the code, and the documentation as a site into out/site
	@$(BIN)/python deploy/docs/reference.py
	@$(BIN)/python deploy/docs/build.py

metrics-docs: setup ## write docs/metrics.md anew from the catalogues of metrics
	@$(BIN)/python deploy/docs/metrics_page.py

models-docs: setup ## write docs/models.md again from the measured verdicts
	@$(BIN)/python deploy/docs/models_page.py

chart-schema: setup ## write Leyline's settings into the Helm chart's values.schema.json anew
	@$(BIN)/python deploy/helm/values_schema.py

screenshots: tools ## write docs/live.png and docs/live-dark.png anew from a replayed session
	@OMP_NUM_THREADS=1 $(BIN)/python -m leyline_lab live-page

wheel: setup ## wheels, sdists, SBOM, provenance and SHA256SUMS of the last commit into dist, the same bits each time
	@rm -rf dist
	@$(BIN)/python deploy/release/release.py dist

images: ## the images of the last commit, with SBOM and provenance: make images IMAGES="proxy" PUSH=1 REGISTRY=ghcr.io/OWNER/
	@IMAGES="$(IMAGES)" PUSH="$(PUSH)" REGISTRY="$(REGISTRY)" deploy/images.sh

digests: ## pin the images of others by the digests of their tags, as the registries have them: make digests CHECK=1 only compares
	@CHECK="$(CHECK)" deploy/digests.sh

clean: ## remove caches, but keep .venv, .venv-sglang and .venv-vllm
	@rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist
	@find . -path './.venv*' -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf
