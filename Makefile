# Two commands: `make demo` shows Freewheel at work, `make test` checks all of it.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
TOOLS := $(VENV)/.tools
REPORT ?= runs/demo/report.html

.PHONY: demo test check docs format clean

demo: $(INSTALLED)
	$(BIN)/freewheel compare --task digits:apart=true --workers 4 --steps 150 --compute-ms 10 --slow 0:5 \
		--target 0.8 --folder runs/demo --force --report $(REPORT)

test: demo check
	$(BIN)/pytest -n 2
	$(BIN)/pytest -m alone

check: $(TOOLS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs: $(TOOLS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "Open build/site/index.html; searching needs a server: $(BIN)/mkdocs serve"

format: $(TOOLS)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(INSTALLED): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	touch $@

$(TOOLS): $(INSTALLED) benchmarks/pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]' -e benchmarks
	touch $@

clean:
	rm -rf $(VENV) runs
