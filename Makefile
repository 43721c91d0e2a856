# Every target does its own set-up; `make` alone lists them.
SHELL := /bin/bash
.DEFAULT_GOAL := help

READY := .venv/.ready
RUN := scripts/with-env
# Extra arguments for the command behind a target, e.g. make test ARGS="-k manifest"
ARGS ?=
# The interpreter that .venv is made from, e.g. make setup PYTHON=python3.12
PYTHON ?=
export PYTHON

.PHONY: help
help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: setup
setup: java $(READY)  ## create .venv with the pinned packages and dovetail in it; find or install Java

.PHONY: java
java:
	@scripts/java-home --install >/dev/null

$(READY): requirements.txt requirements-dev.txt pyproject.toml scripts/setup
	@scripts/setup
	@touch $@

.PHONY: demo
demo: setup  ## the retail example: bursts of orders cleaned, keyed, joined and loaded, with a report
	@$(RUN) python examples/retail_demo.py $(ARGS)

.PHONY: demo-enrich
demo-enrich: setup  ## join a stream with a large table, by Spark's own join and by ours, with timings
	@$(RUN) python examples/enrich_demo.py $(ARGS)

.PHONY: demo-flow
demo-flow: setup  ## a flow that is killed and started again: every row exactly once
	@$(RUN) python examples/flow_demo.py $(ARGS)

.PHONY: demo-news
demo-news: setup  ## two streams of XML files joined live, with punctuations that close groups
	@$(RUN) python examples/news/news_demo.py $(ARGS)

.PHONY: test
test: setup  ## all tests that need no service
	@$(RUN) scripts/run-tests $(ARGS)

.PHONY: test-variants
test-variants: setup  ## the kernels' and operators' tests with the JIT off, and with forced collisions
	@$(RUN) scripts/run-tests --variants $(ARGS)

.PHONY: test-faults
test-faults: setup  ## the fault tests at full size: every kill repeated 50 times
	@DOVETAIL_FAULT_ROUNDS=50 $(RUN) python -m pytest tests/faults $(ARGS)

.PHONY: chaos
chaos: setup  ## a thousand SIGKILLs of five flows' drivers and workers; stop it, start it again: it goes on, with a report
	@$(RUN) python tests/chaos/run_chaos.py $(ARGS)

.PHONY: soak
soak: setup  ## three flows for an hour, idle and busy by turns: memory, open files and files on disk must stay flat
	@$(RUN) python tests/chaos/run_soak.py $(ARGS)

.PHONY: test-drills
test-drills: setup  ## what operators do to checkpoints and drivers, every crash with an older copy, five rounds
	@DOVETAIL_DRILL_ROUNDS=5 $(RUN) python -m pytest tests/drills $(ARGS)

.PHONY: test-machine
test-machine: setup  ## the commit protocol on a simulated disk: 10,000 actions per seed, guards taken out, explorations
	@$(RUN) python tests/machine/run_machine.py $(ARGS)

.PHONY: test-services
test-services: setup  ## flows with a real PostgreSQL and a real Kafka broker, installed if need be
	@$(RUN) python -m pytest tests/services $(ARGS)

.PHONY: test-browser
test-browser: setup  ## the live page in a real Chromium, which it installs; screenshots into artifacts/browser
	@$(RUN) python -m pytest tests/browser $(ARGS)

.PHONY: test-memory
test-memory: setup  ## what processes take beside their budget, for every strategy and on Spark
	@$(RUN) python -m pytest -s tests/memory $(ARGS)

.PHONY: test-versions
test-versions: java  ## a few tests at the ends of the supported range of Spark and Python, in environments of their own
	@scripts/test-versions $(ARGS)

.PHONY: jars
jars:  ## fetch the connectors' jars (Kafka, PostgreSQL as master data) into jars/
	@scripts/fetch-jars

.PHONY: test-cluster
test-cluster: setup  ## a standalone cluster of two workers, one of them killed; enrich through Spark Connect
	@$(RUN) python -m pytest tests/cluster $(ARGS)

.PHONY: lint
lint: setup  ## ruff (rules and format) and mypy --strict, changing nothing
	@$(RUN) ruff check .
	@$(RUN) ruff format --check .
	@$(RUN) mypy

.PHONY: docs
docs: setup  ## the documentation as a site in build/site; a broken link fails
	@NO_MKDOCS_2_WARNING=1 $(RUN) mkdocs build --quiet
	@echo "build/site/index.html"

.PHONY: format
format: setup  ## format the code and mend what ruff can mend
	@$(RUN) ruff format .
	@$(RUN) ruff check --fix .

.PHONY: bench-kernels
bench-kernels: setup  ## hash table and sorted lookup against a bare random read and numpy
	@$(RUN) python benchmarks/kernels.py $(ARGS)

.PHONY: bench-workloads
bench-workloads: setup  ## tuples per second and core of every generator
	@$(RUN) python benchmarks/workloads.py $(ARGS)

.PHONY: bench-relation
bench-relation: setup  ## build, scan, lookup and upsert against Spark, a plain read loop and numpy
	@$(RUN) python benchmarks/relation.py $(ARGS)

.PHONY: bench-operators
bench-operators: setup  ## the semi-stream joins against each other, DuckDB and their cost models
	@$(RUN) python benchmarks/operators.py $(ARGS)

.PHONY: bench-multiway
bench-multiway: setup  ## three streams joined on Spark, against Spark's own joins, Flink and no join at all; ten rows; growth
	@$(RUN) python benchmarks/multiway.py $(ARGS)

.PHONY: bench-metadata
bench-metadata: setup  ## joins with punctuations against XJoin, purging and scheduling strategies; table, JSON and plots
	@$(RUN) python benchmarks/metadata.py $(ARGS)

.PHONY: bench-enrich
bench-enrich: setup  ## enrich against Spark's joins, DuckDB and the ceilings of Python; table, JSON and plot
	@$(RUN) python benchmarks/enrich.py $(ARGS)

.PHONY: bench-cold
bench-cold: setup  ## lookups in a table several times larger than memory, in a memory cgroup, against DuckDB, LMDB and RocksDB
	@$(RUN) python benchmarks/cold.py $(ARGS)

.PHONY: bench-flow
bench-flow: setup  ## flow.enrich that lets nothing wait against enrich, both into Parquet, in turns; table and JSON
	@$(RUN) python benchmarks/flow_enrich.py $(ARGS)

.PHONY: bench-nexmark
bench-nexmark: setup  ## Nexmark's joins on Dovetail, Spark alone and Flink, from the same files; table, JSON and plot
	@$(RUN) python benchmarks/nexmark.py $(ARGS)

.PHONY: bench-start
bench-start: setup  ## dovetail run on the starter pipeline: sign of life, first row, processor time
	@$(RUN) python benchmarks/start.py $(ARGS)

.PHONY: bench-warehouse
bench-warehouse: setup  ## surrogate keys, a fifth of them new, against the plain join, in one run
	@$(RUN) python benchmarks/warehouse.py $(ARGS)

.PHONY: bench-follow
bench-follow: setup  ## a relation that follows a table, against deltalake's merge of the same changes, in one run
	@$(RUN) python benchmarks/follow.py $(ARGS)

.PHONY: lab
lab: setup  ## the papers' experiments at full size, results into docs/lab/results (about an hour)
	@$(RUN) dovetail lab run --all --resume --results docs/lab/results $(ARGS)

.PHONY: lab-quick
lab-quick: setup  ## the papers' experiments at their small size, results into lab-results
	@$(RUN) dovetail lab run --all --quick --results lab-results $(ARGS)

.PHONY: lab-report
lab-report: setup  ## docs/lab/index.html and index.md from docs/lab/results, and the README's table of verdicts
	@$(RUN) dovetail lab report --results docs/lab/results --output docs/lab --readme README.md $(ARGS)

.PHONY: soak-enrich
soak-enrich: setup  ## memory of enrich's workers and of their shared cache through 100 micro-batches
	@$(RUN) python benchmarks/enrich_soak.py $(ARGS)

.PHONY: soak-metadata
soak-metadata: setup  ## state of a join with trailing punctuations through 10 million rows
	@$(RUN) python benchmarks/metadata.py --soak $(ARGS)

.PHONY: clean
clean:  ## remove .venv, caches and everything else that was made here
	@rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist src/*.egg-info \
		spark-warehouse metastore_db derby.log artifacts jars
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
