# Everything that is installed goes into .venv (and .venv-modern) in this folder; the Horovod wheel,
# which takes some minutes to compile, is kept in the user's cache and outlives them.
# CONTRIBUTING.rst tells what the targets are for.

PYTHON ?= python3
PYTEST_ARGS ?=

# Processes keep the bytecode of what they import; without it, each would compile torch again.
unexport PYTHONDONTWRITEBYTECODE

comma := ,
BIN := .venv/bin
PYTHON_VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')

# What .venv holds. Petastorm needs PyArrow 14 and NumPy 1, which have no wheels for Python 3.13;
# today's Keras and NumPy have none for Python 3.10.
ifneq ($(filter $(PYTHON_VERSION),3.11 3.12),)
CONSTRAINTS := constraints/petastorm.txt
READER := petastorm
else ifeq ($(PYTHON_VERSION),3.10)
CONSTRAINTS := constraints/python-3.10.txt
else
CONSTRAINTS := constraints/modern.txt
endif
SOURCES := hvd_estimators tests benchmarks deploy examples docs setup.py
# Tests train with these. Some of their own dependencies do not fit beside the others.
LIBRARIES := accelerate keras-hub pytorch-metric-learning pytorch-optimizer pytorch-ranger timm \
	torch-optimizer
EXTRAS := build,dev,examples,hdfs,keras,lightning,mlflow,onnx,s3,torch

# An environment is as its files say if it has the stamp of their contents.
checksum = $(shell cat $(1) setup.cfg pyproject.toml Makefile | cksum | cut -d ' ' -f 1)
STAMP := .venv/.setup-$(call checksum,$(CONSTRAINTS))
STAMP_MODERN := .venv-modern/.setup-$(call checksum,constraints/modern.txt)

.DEFAULT_GOAL := help
.PHONY: help setup setup-modern demo test test-fast test-default test-modern test-versions soak
.PHONY: lint format bench docs clean distclean tools

help:  ## show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 22

setup: $(STAMP)  ## create .venv: Spark, the frameworks, Horovod, Petastorm if Python has it (minutes)

setup-modern: $(STAMP_MODERN)  ## create .venv-modern: PySpark 4, PyArrow 26, NumPy 2, Horovod

demo: setup  ## train on real flights and predict the delays of others
	$(BIN)/python examples/flight_delays.py

test: setup  ## run the tests; PYTEST_ARGS="-k name" picks some
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-fast: setup  ## run the unit tests that take at most ten seconds each
	$(BIN)/python -m pytest tests/unit -m "not slow" $(PYTEST_ARGS)

test-modern: setup-modern  ## run the tests in .venv-modern
	.venv-modern/bin/python -m pytest $(PYTEST_ARGS)

# CI runs a test on Spark in one environment, unless it depends on the versions of packages.
test-default: setup  ## the tests that CI runs in .venv; PYTEST_ARGS names files
	$(BIN)/python -m pytest -m "once or versions or not spark" $(PYTEST_ARGS)

# Only files with these tests, because importing all others takes a minute.
test-versions: setup-modern  ## the tests that CI runs in .venv-modern
	.venv-modern/bin/python -m pytest -m "(versions or spark) and not once" $(PYTEST_ARGS) \
		$$(grep -rlE 'mark\.(versions|spark)\b' tests --include='test_*.py' | sort)

soak: setup  ## the tests with many repeats, large models, other frameworks (hours)
	$(BIN)/python -m pytest -m soak $(PYTEST_ARGS)

lint: setup  ## check style, imports, docstrings and types
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy

format: setup  ## rewrite the sources in the project's style
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

bench: setup  ## measure against horovod.spark and a hand-written loop
	$(BIN)/python -m benchmarks

docs: setup  ## build the documentation in docs/_build/html; a warning is an error
	KERAS_BACKEND=tensorflow $(BIN)/python -m sphinx -W --keep-going -b html docs docs/_build/html

clean:  ## remove what builds, tests and tools left behind
	rm -rf build dist docs/_build *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache \
		derby.log lightning_logs metastore_db spark-warehouse
	find hvd_estimators tests benchmarks examples -name __pycache__ -prune -exec rm -rf {} +

distclean: clean  ## remove the environments too
	rm -rf .venv .venv-modern

# $(call install,FOLDER,CONSTRAINTS,EXTRAS,PACKAGES WITHOUT THEIR DEPENDENCIES)
# Processes compile what they import; pip would compile all of 30,000 files.
define install
	@echo "== $(1): creating the environment"
	@$(PYTHON) -m venv $(1)
	@echo "== $(1): installing the packages of $(2), about two minutes"
	@$(1)/bin/python -m pip install --quiet --constraint $(2) setuptools wheel
	@$(1)/bin/python -m pip install --quiet --no-compile --constraint $(2) --no-build-isolation \
		--editable '.[$(3)]'
	@$(if $(4),$(1)/bin/python -m pip install --quiet --no-compile --no-deps --constraint $(2) $(4))
	@echo "== $(1): Horovod"
	@$(1)/bin/hvd-estimators build-horovod
	@rm -f $(1)/.setup-* && touch $@
	@echo "== $(1): ready"
endef

$(STAMP): | tools
	@$(if $(READER),,echo "== .venv: without Petastorm, which Python $(PYTHON_VERSION) cannot have; PyArrow reads alone")
	$(call install,.venv,$(CONSTRAINTS),$(EXTRAS)$(comma)docs$(if $(READER),$(comma)petastorm),$(READER) $(LIBRARIES))

$(STAMP_MODERN): | tools
	$(call install,.venv-modern,constraints/modern.txt,$(EXTRAS)$(comma)connect,$(LIBRARIES))

tools:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo \
		"Python 3.10 or newer is needed: make PYTHON=python3.11 ..."; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { echo \
		"Python's venv module is missing. On Debian: apt-get install python3-venv"; exit 1; }
	@set -- $${CXX:-g++}; command -v "$$1" > /dev/null || { echo \
		"No C++ compiler, which Horovod is built with. On Debian: apt-get install g++"; exit 1; }
	@command -v "$${JAVA_HOME:+$$JAVA_HOME/bin/}java" > /dev/null || { echo \
		"No Java, which Spark runs on. On Debian: apt-get install openjdk-17-jre-headless"; exit 1; }
