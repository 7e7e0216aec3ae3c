# Two commands on a fresh machine: `make demo` and `make test`. Python 3.11 and make are all they need.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

EXAMPLES := fleet form_submissions harvester portfolio_jobs price_feed signup

.PHONY: help setup demo examples docs test test-all matrix check package acceptance bench bench-ab bench-peers chaos clean
help:
	@echo 'make setup       the environment in .venv, with all that development needs'
	@echo 'make demo        the main job, for real, on an embedded PostgreSQL (DEMO_INPUT=file.csv for your own rows)'
	@echo 'make example-NAME  one of $(EXAMPLES); SERVE=1 keeps it up, SHORT=1 is quick'
	@echo 'make test        every test that is not marked slow, on PostgreSQL 18'
	@echo 'make test-all    every test on PostgreSQL 18; those that depend on the server on 16, 15 and through PgBouncer too'
	@echo 'make matrix      the tests on every Python, PostgreSQL and library that is supported; over an hour, ONLY=py3.12,pg17 for some'
	@echo 'make check       ruff, mypy --strict, import-linter, and the linters of the workflows and the Dockerfile'
	@echo 'make package     sdist and wheel in dist/, checked; the wheel alone runs the demo, a first job and the dashboard'
	@echo 'make acceptance  every row of the mission with the tests that show it; REPORT=build/tests.xml reads what make test-all ran'
	@echo 'make bench       figures; BENCH=cost|enqueue|drain|claimers|latency|pinned|idle|outage|poison|rescue|schedule|scheduled|pinned_scheduled|upsert|query|roles|limit|concurrency|fair|counters|history|why|pages|lists|fleet|fleet_view|cpu_bound|install, SCALE=0.1 for a short run'
	@echo 'make bench-ab BASE=rev  drain, latency, cost and verbs of this commit beside those of another, PAIRS=10 times'
	@echo 'make bench-peers the queues that the figures are held against, in an environment of their own'
	@echo 'make chaos       120 s of faults on real processes, and what became of every job; SECONDS=30, MINUTES=10, SEED=7, BREAK=fence, FLEET=3 (CITUS_SOURCE=citus.tar.xz moves tenants)'
	@echo 'make docs        the docs as a site, in site/; begin at site/index.html'
	@echo 'make clean       the environments and caches away'

$(READY): pyproject.toml
	@test -x $(BIN)/python || { echo 'setup: making the environment in $(VENV)'; $(PYTHON) -m venv $(VENV); }
	@echo 'setup: installing what the project needs (once)'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

setup: $(READY)

demo: $(READY)
	@$(BIN)/tallybook demo $(if $(DEMO_INPUT),--input '$(DEMO_INPUT)')

example-%: $(READY)
	@$(BIN)/python -m examples.$*

examples: $(addprefix example-,$(EXAMPLES))

docs: $(READY)
	@$(BIN)/python tools/docs.py

test: $(READY)
	@$(BIN)/python tools/run_tests.py

test-all: $(READY)
	@$(BIN)/python tools/run_tests.py --all

matrix: $(READY)
	@$(BIN)/python tools/matrix.py $(if $(ONLY),--only '$(ONLY)')

check: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python tools/words.py
	@$(BIN)/zizmor --quiet --offline --no-progress .github
	@$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml
	@$(BIN)/check-jsonschema --quiet --builtin-schema vendor.dependabot .github/dependabot.yml
	@$(BIN)/check-jsonschema --quiet --builtin-schema vendor.compose-spec compose.yaml
	@$(BIN)/hadolint Dockerfile
	@awk 'length > 120 { print FILENAME ":" FNR ": more than 120 columns"; wide = 1 } END { exit wide }' \
	  $$(find src/tallybook/sql -name '*.sql')

package: $(READY)
	@$(BIN)/python tools/package.py $(if $(TRY),--python '$(TRY)')

acceptance: $(READY)
	@$(BIN)/python tools/acceptance.py $(if $(REPORT),--report '$(REPORT)')

bench: $(READY)
	@$(BIN)/python -m bench $(BENCH)

bench-ab: $(READY)
	@test -n '$(BASE)' || { echo 'make bench-ab BASE=rev: which commit to compare with?' >&2; exit 2; }
	@$(BIN)/python -m bench.ab '$(BASE)' $(BENCH)

bench-peers: $(READY)
	@$(BIN)/python -m bench.peers.setup

# How long: MINUTES, else SECONDS. BREAK takes a fence away (the run must fail), NEMESES=a,b chooses, DISK names a small file system.
CHAOS = --seconds $(if $(MINUTES),$$(( $(MINUTES) * 60 )),$(or $(SECONDS),120)) $(if $(SEED),--seed $(SEED)) \
	$(if $(FLEET),--fleet $(FLEET)) $(if $(BREAK),--break $(BREAK)) $(if $(NEMESES),--nemeses $(NEMESES)) $(if $(DISK),--disk '$(DISK)') $(if $(RATE),--rate $(RATE))

chaos: $(READY)
	@$(BIN)/python -m chaos $(CHAOS)

clean:
	rm -rf $(VENV) .matrix .peers .cache build dist site
