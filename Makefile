# Everything that people and CI run. `make demo` and `make test` work on a fresh machine.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: install demo test check gate bench bench-gpu clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(STAMP)

demo: install
	$(BIN)/keelbench compare sweeps/demo.yaml --out results/demo
	@echo "figures: results/demo/*.png   page: results/demo/report.html"

test: install
	$(BIN)/pytest -n auto

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

gate: install
	$(BIN)/keelbench check --sweep sweeps/ci.yaml --max-seeds 12 --quiet

bench: install
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	$(BIN)/python -m benchmarks.run

bench-gpu: install
	$(BIN)/python -m benchmarks.gpu

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
