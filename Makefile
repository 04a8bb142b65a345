# `make test` is all that a fresh machine needs: it makes its own .venv and leaves everything else alone.

PYTHON ?= python3
VENV ?= .venv
# Most tests wait for something, so there are more jobs than cores; one that has no test left takes some of another.
JOBS ?= 6
# Seconds; a test that hangs is shown with the stacks of all its threads.
TEST_TIMEOUT ?= 300
# The torch that is tested, and numpy, without which torch warns. A version and not just the name: the newest one may bring
# gigabytes of CUDA with it.
TORCH ?= torch==2.13.0 numpy
# The peer that forming is measured beside.
TORCHFT ?= torchft
# Extra words for every pytest, such as ARGS="-k wire".
ARGS ?=

# The tests start hundreds of processes. Without bytecode, which some environments forbid, each compiles the package anew.
export PYTHONDONTWRITEBYTECODE :=

BIN := $(VENV)/bin
USABLE := $(VENV)/usable
STAMP := $(VENV)/installed
MEASURABLE := $(VENV)/measurable
# The rules, the member and the simulator, and the checks of the source and the pages: they start few processes and wait for no clock.
QUICK := tests/core tests/config tests/member tests/testing tests/sim tests/engines/test_reference.py tests/engines/test_memory.py \
	tests/test_tidy.py tests/test_control_flow.py tests/test_docs.py tests/test_errors.py tests/test_aio.py
# The profile "ci" draws the same examples each time and has no deadline: a push is judged by its change, not by luck or load.
PYTEST := $(BIN)/python -m pytest --timeout=$(TEST_TIMEOUT) --hypothesis-profile=ci -n $(JOBS) --dist worksteal

.PHONY: help test quick lint types collect unit seeds seeds-beside gates soak soak-others soak-crowds soak-seeds demo bench bench-peers docs pictures dist clean

help:
	@echo "make test   lint, types, all tests but the long ones, coverage gates"
	@echo "make quick  lint, types, and the tests of the rules, the member and the pages: under a minute"
	@echo "make lint   ruff only            make types  mypy only"
	@echo "make unit   tests with coverage  make seeds  the simulator's seeds"
	@echo "make soak   the long tests       make bench  the benchmarks, 15 minutes"
	@echo "make bench-peers  those in which torch takes minutes"
	@echo "make docs   the documentation site, into build/site"
	@echo "make dist   wheel, sdist and bill of materials, built and checked, into dist"
	@echo "make demo   a server and four members on this machine: one is killed, one comes late"
	@echo "make clean  remove what was made, .venv too"

test:
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory --jobs=2 types collect
	@$(MAKE) --no-print-directory --jobs=2 unit seeds-beside
	@$(MAKE) --no-print-directory gates

# One job per core: each collects the tests, and these hardly wait. They take 48 s of CPU; types, unless they are known, 20 s more.
quick:
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory types
	$(PYTEST) -n 2 -m "not soak and not seeds" $(QUICK) $(ARGS)

# What a user has: the demo needs neither torch nor the tools of development.
$(USABLE): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[cli]'
	@touch $@

$(STAMP): $(USABLE)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]' $(TORCH)
	@touch $@

lint: $(STAMP)
	$(BIN)/ruff check .

types: $(STAMP)
	$(BIN)/mypy --strict src

# A test that cannot be imported fails here, in seconds. And pytest compiles each file once, not in every job.
collect: $(STAMP)
	@$(BIN)/python -m pytest --collect-only --quiet --quiet > $(VENV)/collected 2>&1 || { cat $(VENV)/collected; exit 1; }

unit: $(STAMP)
	$(PYTEST) -m "not soak and not seeds" --cov --cov-report= tests $(ARGS)

# Tracing makes what only computes several times slower, and it reaches no line that the others should not reach too. Exploration
# forks at every choice, which costs several times more in a process that has imported torch: so these have processes of their own.
seeds: $(STAMP)
	$(PYTEST) -m "seeds and not soak" tests/sim tests/core/test_rules_hold.py $(ARGS)

# They only compute: they get the time that the other tests wait, and are no hindrance to those.
seeds-beside: $(STAMP)
	@nice -n 10 $(MAKE) --no-print-directory seeds JOBS=2 > $(VENV)/seeds 2>&1; code=$$?; cat $(VENV)/seeds; exit $$code

# The rules are to be covered to the last branch: a branch no test takes is a decision nobody has looked at.
gates: $(STAMP)
	$(BIN)/coverage report --include='src/rdzv/core/*' --fail-under=100
	$(BIN)/coverage report --fail-under=90

# Three parts beside each other, in at most an hour on two cores: the seeds compute, and most of the other tests wait. A part from
# which ARGS leave no test (code 5) is none that failed.
SOAK := $(BIN)/python -m pytest -m soak --maxschedchunk=1
soak: $(STAMP)
	@$(MAKE) --no-print-directory --jobs=3 --keep-going soak-others soak-crowds soak-seeds

# One test at a time to each job: none waits behind a long one for more than that. The longest begin first (tests/conftest.py).
# Beside the other two parts, five jobs brought the load to 70, and tests that wait for a minute failed.
soak-others: $(STAMP)
	$(SOAK) -n 3 --durations=20 --ignore=tests/sim --deselect=tests/faults/test_crowds.py tests $(ARGS) || [ $$? = 5 ]

# 200 members on each engine, for half an hour.
soak-crowds: $(STAMP)
	@$(SOAK) -n 2 tests/faults/test_crowds.py $(ARGS) > $(VENV)/crowds 2>&1; code=$$?; cat $(VENV)/crowds; [ $$code = 0 ] || [ $$code = 5 ]

soak-seeds: $(STAMP)
	@nice -n 5 $(SOAK) -n 2 tests/sim $(ARGS) > $(VENV)/soak-seeds 2>&1; code=$$?; cat $(VENV)/soak-seeds; [ $$code = 0 ] || [ $$code = 5 ]

# Warnings are errors, and nothing is loaded from elsewhere (mkdocs.yml).
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "built: $(BIN)/python -m http.server --directory build/site"

# Built twice and compared, checked, and listed with all that the extras bring (tools/dist.py).
dist: $(STAMP)
	$(BIN)/python tools/dist.py dist

# From the code's own tables, from a run of the demo, and of the page in a real browser.
pictures: $(STAMP)
	$(BIN)/python tools/pictures.py
	$(BIN)/python tools/demo_picture.py
	$(BIN)/python -m pytest -q --rewrite tests/web/test_page.py

demo: $(USABLE)
	$(BIN)/rdzv demo

# What the figures are drawn with, and the peer. torchft's package wants a torch of its own choosing; its extension does not.
$(MEASURABLE): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[bench]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(TORCHFT)
	@touch $@

# Of a machine that has nothing else to do. Results are in bench/results.
bench: $(MEASURABLE)
	$(BIN)/python bench/suite.py $(ARGS)

bench-peers: $(MEASURABLE)
	$(BIN)/python bench/suite.py --peers $(ARGS)

clean:
	rm -rf $(VENV) build dist .coverage .coverage.* .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests bench -name __pycache__ -type d -prune -exec rm -rf {} +
