# make quickstart   a fresh clone to two trained models: .venv, install, `seqmix quickstart`
# make test         the same set-up with the tools of development, then lint, types and tests

PYTHON ?= python3
# Tests run in two processes; each then gets half of the cores.
THREADS ?= $(shell $(PYTHON) -c 'import os; print(max(1, os.cpu_count() // 2))')

.PHONY: quickstart test lint clean

quickstart: .venv/installed
	.venv/bin/seqmix quickstart --overwrite

test: lint
	OMP_NUM_THREADS=$(THREADS) .venv/bin/pytest -n 2 --dist worksteal

lint: .venv/installed-dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/pyright --pythonpath .venv/bin/python

.venv/torch: constraints.txt
	$(PYTHON) -m venv .venv
	.venv/bin/pip install --quiet --constraint constraints.txt torch
	touch $@

.venv/installed: .venv/torch pyproject.toml
	.venv/bin/pip install --quiet --constraint constraints.txt --editable .
	touch $@

.venv/installed-dev: .venv/torch pyproject.toml
	.venv/bin/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@ .venv/installed

clean:
	rm -rf .venv .pytest_cache .ruff_cache runs build dist
