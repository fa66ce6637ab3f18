# make train       train the quickstart, sample from it    make .venv   the environment alone
# make test        most tests, four minutes                make drills  large fault-injection drills
# make test-full   matrices of settings, whole runs
# make test-nightly  the longest tests, not before merges  make test-device  the accelerator here
# make test-colab  one case of each test of `make test`, and a notebook, with Colab's versions
# make lint        ruff, mypy, circles of imports          make format  lay the code out as ruff does
# make docs        build the documentation site into build/site
# make audit       known vulnerabilities of dependencies
# make results     ten minutes of each study of docs/results; again until all are done
#
# PYTHON=python3.12 builds the environment with that Python, in place of one with another.
# VENV=.venv-3.12 puts it elsewhere, so that several can live side by side.
# CONSTRAINTS="constraints-colab.txt constraints.txt" has the first file's versions before the others'.

VENV ?= .venv
CONSTRAINTS ?= constraints.txt
EXTRAS ?= [dev]
WORKERS ?= $(shell getconf _NPROCESSORS_ONLN)
RUN := $(VENV)/bin/python
# One file's tests stay in one process, which compiles what they share once. A process that dies
# fails the run: with another in its place, a run by files would wait for ever.
SPREAD := --numprocesses $(WORKERS) --maxprocesses 8 --dist loadfile --max-worker-restart 0

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help train test test-full test-nightly test-colab test-device drills results lint format \
	docs audit .venv

help:
	@sed -n '/^$$/q; s/^# \{0,1\}//p' Makefile

# Training needs none of the tools for tests and documentation, which take longer to install.
train:
	@$(MAKE) --no-print-directory .venv EXTRAS=
	$(RUN) -m train fit quickstart

test: .venv
	$(RUN) -m pytest $(SPREAD) -m "not full and not colab"

test-full: .venv
	$(RUN) -m pytest $(SPREAD) -m "full and not nightly"

test-nightly: .venv
	$(RUN) -m pytest $(SPREAD) -m nightly

test-colab:
	@$(MAKE) .venv VENV=.venv-colab PYTHON=python3.13 \
		CONSTRAINTS="constraints-colab.txt constraints.txt"
	.venv-colab/bin/python -m pytest $(SPREAD) -m "not full" --one-case

test-device: .venv
	$(RUN) -m pytest -c tests_device/pytest.ini --rootdir . tests_device

drills: .venv
	@set -e; names='from bench.drills import FAULTS; print(*[each.name for each in FAULTS])'; \
	for name in $$($(RUN) -c "$$names"); do \
		echo "== $$name"; $(RUN) -m bench $$name; \
	done

# A study that is not finished exits with 75: it goes on in the next call.
MINUTES ?= 10
# Half of the studies need data: STUDY_DATA=DIR, with wikitext-2/, trec/, sst2/ and multi30k/.
DATA_STUDIES := versus scaling mup pretraining translators
STUDIES ?= lengths stability family long_recall $(if $(STUDY_DATA),$(DATA_STUDIES))
results: .venv
	@for study in $(STUDIES); do \
		echo "== $$study"; status=0; set --; \
		case " $(DATA_STUDIES) " in *" $$study "*) set -- --data "$(STUDY_DATA)";; esac; \
		$(RUN) -m bench $$study "$$@" --minutes $(MINUTES) || status=$$?; \
		if [ $$status -ne 0 ] && [ $$status -ne 75 ]; then exit $$status; fi; \
	done

lint: .venv
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m tests.import_circles
	$(RUN) -m mypy

format: .venv
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

# A link that leads nowhere fails the build, like any other warning.
docs: .venv
	$(RUN) -m docs.site

# Asks the network; the versions that were tested, whatever is installed.
audit: .venv
	$(RUN) -m pip install --quiet --constraint constraints.txt pip-audit
	$(RUN) -m pip_audit --requirement constraints.txt --no-deps --disable-pip

# Without PYTHON, an environment that is there is kept; else the first Python that will do is taken.
# Each is tried by running it: a pyenv shim exists for versions that are not switched on.
PYENV := $(or $(PYENV_ROOT),$(HOME)/.pyenv)/versions/*/bin
CANDIDATES := $(if $(PYTHON),$(PYTHON) $(PYENV)/$(PYTHON),\
	$(RUN) python3 python3.13 python3.12 python3.11 $(PYENV)/python3)
SUITABLE := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))
VERSION := import sys; print("%d.%d" % sys.version_info[:2])

# Lines of several files of constraints, without those that an earlier file has the package of.
MERGED := awk -F '[=<>~!@ ;[]' '!/^ *(\#|$$)/ { name = tolower($$1); gsub(/[-_.]+/, "-", name); \
	if (!(name in taken) || taken[name] == FILENAME) { taken[name] = FILENAME; print } }'

# The environment is ready when .ready in it names this Python, this folder and these requirements,
# and the extras that are asked for. All extras serve for none. Python compiles what it imports when
# it first does; pip would compile all of it, which takes as long as the rest of the installation.
# Where Python must not write bytecode, pip does it: else every process would compile again.
.venv:
	@set -e; python=; \
	for each in $(CANDIDATES); do \
		if $$each -c '$(SUITABLE)' 2>/dev/null; then python=$$each; break; fi; \
	done; \
	if [ -z "$$python" ]; then \
		echo "make: $(if $(PYTHON),PYTHON=$(PYTHON) is not,there is no) Python 3.11 or later with venv;" \
			"install it (Debian, Ubuntu: apt install python3-venv) or name one with PYTHON=..." >&2; \
		exit 1; \
	fi; \
	version=$$($$python -c '$(VERSION)'); \
	ready="$$version $(CURDIR) $$(cat pyproject.toml $(CONSTRAINTS) | cksum)"; \
	found=$$(cat $(VENV)/.ready 2>/dev/null || true); \
	for each in "$(EXTRAS)" "[dev]"; do \
		if [ "$$found" = "$$ready $$each" ]; then exit 0; fi; \
	done; \
	echo "Building $(VENV) with Python $$version: a minute, and the network this once."; \
	if [ "$$version" != "$$($(RUN) -c '$(VERSION)' 2>/dev/null)" ]; then \
		$$python -m venv --clear $(VENV); \
	fi; \
	rm -f $(VENV)/.ready; \
	$(RUN) -m pip --version >/dev/null 2>&1 || $(RUN) -m ensurepip >/dev/null; \
	$(MERGED) $(CONSTRAINTS) >$(VENV)/constraints.txt; \
	$(RUN) -m pip install --quiet $(if $(PYTHONDONTWRITEBYTECODE),,--no-compile) \
		--constraint $(VENV)/constraints.txt --editable '.$(EXTRAS)'; \
	echo "$$ready $(EXTRAS)" >$(VENV)/.ready
