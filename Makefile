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
# Tiny models run fastest on one thread, and two test processes don't fight over cores.
TEST_ENV := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false

.PHONY: help setup tools serve demo test nightly lint fmt boards clean

help: ## show this list
	@echo "Leyline: an OpenAI-compatible proxy that keeps the KV cache when agents edit their history."
	@echo
	@echo "First time here?   make serve      then, in another terminal:   make demo"
	@echo "Changing the code? make fmt, then make test"
	@echo
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo "Everything is installed into .venv; nothing outside the checkout is changed, except that"
	@echo "a missing python3-venv is installed with apt when root or passwordless sudo allows it."
	@echo 'Python to use: make setup PYTHON=python3.12. PyTorch build: TORCH_INDEX=URL (or "none").'

setup: ## make .venv with everything in it; costs nothing when it is up to date
	@deploy/setup.sh

tools: setup
	@deploy/tools.sh

serve: setup ## proxy and embedded engine on http://127.0.0.1:8790
	@exec $(BIN)/leyline serve $(ARGS)

demo: setup ## replay a recorded agent session and compare the cache with and without splicing
	@exec $(BIN)/leyline demo --plot out/demo.png $(ARGS)

test: tools lint ## what CI runs: lint, types, import contracts, tests
	@echo "── pytest"
	@$(TEST_ENV) $(BIN)/pytest -m "not nightly and not gpu" $(PYTEST_ARGS)

nightly: tools ## the tests that are too slow for every commit
	@$(TEST_ENV) HYPOTHESIS_PROFILE=nightly $(BIN)/pytest -m "nightly and not gpu" $(PYTEST_ARGS)

lint: setup ## ruff, mypy and import-linter, without the tests
	@echo "── ruff"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@echo "── mypy"
	@$(BIN)/mypy
	@$(BIN)/mypy grafana/build_dashboards.py
	@echo "── import contracts"
	@$(BIN)/lint-imports

fmt: setup ## format the code and fix what ruff can fix
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

boards: setup ## write grafana/dashboards/*.json anew from grafana/build_dashboards.py
	@$(BIN)/python grafana/build_dashboards.py

clean: ## remove caches, but keep .venv
	@rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist
	@find . -path ./.venv -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf
