# Two commands, each from a fresh clone: `make demo` (the main job) and `make test` (lint, types, CPU tests).
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint types cpu-tests

demo: .venv/demo
	$(BIN)/python -m bench.demo

test: lint types cpu-tests

lint: .venv/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# kernels/ and bench/workloads/ install into marble; mypy wants them to be folders there.
types: .venv/test
	rm -rf build/types && mkdir -p build/types/marble
	ln -s $(CURDIR)/marble/* build/types/marble/ && ln -s $(CURDIR)/kernels build/types/marble/kernels
	ln -s $(CURDIR)/bench/workloads build/types/marble/workloads
	cd build/types && $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml

cpu-tests: .venv/test
	$(BIN)/python -m pytest -n 2 --dist worksteal

.venv/demo: EXTRAS := demo
.venv/test: EXTRAS := cuda,baselines,plots,demo,report,dev
.venv/demo .venv/test: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[$(EXTRAS)]'
	touch $@
