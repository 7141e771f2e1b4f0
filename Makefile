# Two commands: `make demo` shows Freewheel at work, `make test` checks all of it.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
TOOLS := $(VENV)/.tools

.PHONY: demo test check docs format clean

demo: $(INSTALLED)
	$(BIN)/freewheel demo

test: demo check
	$(BIN)/pytest -n 3 || $(BIN)/pytest --last-failed --last-failed-no-failures none
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
	@echo "Installing into $(VENV): about a minute."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	touch $@

$(TOOLS): $(INSTALLED) benchmarks/pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]' -e benchmarks
	touch $@

clean:
	rm -rf $(VENV) runs
