# The verbs people and CI share. Each makes the environment it needs.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

.PHONY: demo test check check-types check-code docs fuzz mutants test-gpu bench clean

# Two stamps: the demo needs less than the tests do. Both are made anew when pyproject.toml changes.
DEMO_ENV := $(VENV)/.installed-llm
DEV_ENV  := $(VENV)/.installed-dev

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else f"graphrt needs Python >= 3.11; {sys.executable} is {sys.version.split()[0]}. Try: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

# pip itself makes bytecode in one process, which is half of its time. What this Python cannot read
# (torch has a file for newer ones) fails where it is imported, as after pip.
define install
$(BIN)/python -m pip install --quiet --no-compile --editable '.[$(1)]'
@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
endef

$(DEMO_ENV): pyproject.toml | $(BIN)/python
	$(call install,llm)
	@touch $@

$(DEV_ENV): pyproject.toml | $(BIN)/python
	$(call install,dev)
	@touch $@ $(DEMO_ENV)

demo: $(DEMO_ENV)
	$(BIN)/graphrt demo

# Two processes, and the tests of a file in one of them, because they share what is slow to make.
TEST_PROCESSES ?= 2
test: $(DEV_ENV)
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile tests/pure tests/simulated tests/architecture

# Two halves, each in a process of its own where make is given --jobs.
check: check-types check-code

check-types: $(DEV_ENV)
	$(BIN)/mypy

check-code: $(DEV_ENV)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/python tests/architecture/size_report.py

# The pages of docs/ and the reference, as files to open in site/. Every warning is an error, but
# not with --quiet: it also hides them from --strict.
docs: $(DEV_ENV)
	$(BIN)/mkdocs build --strict
	@echo "site/index.html"

# Random engines and runners against eager. A failing case prints the command that runs it alone.
FUZZ ?= --seed 1 --engine-steps 50000 --runner-steps 10000
fuzz: $(DEV_ENV)
	$(BIN)/python -m tests.fuzz $(FUZZ)

# Runs in the interpreter that sees the GPU: the active one, unless PYTHON_GPU names another.
PYTHON_GPU ?= $(PYTHON)
test-gpu:
	$(PYTHON_GPU) -m pytest tests/gpu

# Deliberate mistakes, each of which some test must notice. Takes many minutes.
mutants: $(DEV_ENV)
	$(BIN)/python tests/mutation/run.py

bench: $(DEV_ENV)
	$(BIN)/python -m benchmarks --save benchmarks/results

clean:
	rm -rf $(VENV) build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
