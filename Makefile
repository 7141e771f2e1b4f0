# Two commands: `make demo` shows Freewheel at work, `make test` checks all of it.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
REPORT ?= runs/demo/report.html

.PHONY: demo test check format clean

demo: $(INSTALLED)
	$(BIN)/freewheel simulate --strategy all --task digits:apart=true --workers 8 --steps 200 --compute-ms 10 \
		--slow 0:5 --link-mbit 1000 --latency-ms 0.2 --target 0.8 --seed 0 --report $(REPORT)

test: demo check
	$(BIN)/pytest -n 2

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(INSTALLED): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) runs
