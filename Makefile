# `make demo` and `make test` work on a machine with Python 3.11+ and make: they fill .venv once, by constraints.txt.
PYTHON ?= python3

VENV := .venv
PY := $(VENV)/bin/python
INSTALLED := $(VENV)/.memopt-installed
INSTALLED_TEST := $(VENV)/.memopt-installed-test
TORCH = $$(grep '^torch==' constraints.txt)

.PHONY: demo test lint bench clean

demo: $(INSTALLED)
	$(VENV)/bin/memopt demo

test: $(INSTALLED_TEST)
	$(PY) -m pytest -n 2 -q --durations=10 -m "not slow and not gpu"

lint: $(INSTALLED_TEST)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/lint-imports

bench: $(INSTALLED_TEST)
	@set -e; for script in benchmarks/bench_*.py; do \
		if [ ! -e "$$script" ]; then echo "no benchmarks/bench_*.py"; exit 1; fi; \
		echo "== $$script"; $(PY) "$$script"; \
	done

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis .memopt*
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

# pip is the last thing that venv writes, so an interrupted one is made again.
$(VENV)/bin/pip:
	@$(PYTHON) -c 'import sys; sys.exit("memopt needs Python 3.11 or newer: make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)

# torch by its exact pin and before anything else: a range could bring a newer build of several gigabytes.
$(INSTALLED): pyproject.toml constraints.txt | $(VENV)/bin/pip
	$(PY) -m pip install -q "$(TORCH)"
	$(PY) -m pip install -q -c constraints.txt -e .
	touch $@

$(INSTALLED_TEST): $(INSTALLED)
	$(PY) -m pip install -q -c constraints.txt -e '.[test]'
	touch $@
