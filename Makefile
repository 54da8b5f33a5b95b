# Two commands: `make demo` and `make test`. Both set up .venv from pyproject.toml; a second call starts at once.
# The demo installs what users need, the tests what they need besides.
PYTHON ?= python3
VENV := .venv
SUM := $(shell cksum < pyproject.toml | cut -d' ' -f1)
USED := $(VENV)/.used-$(SUM)
STAMP := $(VENV)/.stamp-$(SUM)
INSTALL := $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable
SHARED_DATA := ../shared/data
DATA := $(or $(SFUMATO_DATA),$(HOME)/.cache/sfumato/data)
export OMP_WAIT_POLICY := PASSIVE
# Tests write and sync many small files: in memory, where there is such a place.
export TMPDIR := $(if $(wildcard /dev/shm),/dev/shm,$(or $(TMPDIR),/tmp))
# A file of tests a process, of which there is one more than cores (tests/conftest.py).
PYTEST := $(VENV)/bin/python -m pytest -q --numprocesses auto --dist loadfile --no-loadscope-reorder

MAKEFLAGS += --jobs=2

.PHONY: demo test laws quick test-slow test-lowest docs browser lint setup release-check
demo: $(USED)
	$(VENV)/bin/sfumato train demo/digits

# Lint and types beside the laws.
test: lint laws

laws: $(STAMP) $(DATA)/.unpacked
	SFUMATO_DATA=$(DATA) $(PYTEST)

# Before a commit: style, types, and the laws that take seconds.
QUICK := $(addprefix tests/,test_imports.py test_config.py test_randomness.py planning run_folder) \
	$(addprefix tests/data/test_,sampling.py listing.py) \
	$(addprefix tests/training/test_,step.py noise.py learner.py state.py private_loop.py) \
	$(addprefix tests/clipping/test_,clip.py loss.py parametrization.py rows.py)
quick: lint $(DATA)/.unpacked
	SFUMATO_DATA=$(DATA) $(PYTEST) $(QUICK)

test-slow: $(STAMP) $(DATA)/.unpacked
	SFUMATO_DATA=$(DATA) $(VENV)/bin/python -m pytest -q -m slow

# On the lowest versions that pyproject.toml allows, all together: uv resolves them.
LOWEST := build/lowest/bin
test-lowest: $(DATA)/.unpacked
	$(PYTHON) -m venv build/lowest
	$(LOWEST)/python -m pip install --quiet uv
	$(LOWEST)/uv pip install --quiet --python $(LOWEST)/python --resolution lowest-direct --editable '.[test]'
	SFUMATO_DATA=$(DATA) $(LOWEST)/python -m pytest -q --numprocesses auto --dist loadfile --no-loadscope-reorder

# The site, in build/docs: a warning is an error, so no link within is broken.
docs: $(STAMP)
	$(VENV)/bin/python -m sphinx -q -W --keep-going docs build/docs

# Pages in a real browser: Debian's Chromium, which root installs, and what drives it. Then `make test` looks, too.
browser: $(STAMP)
	@command -v chromium || [ "$$(id -u)" = 0 ] || { echo "error: no chromium. Let root run: apt-get install chromium"; exit 1; }
	command -v chromium || { apt-get update && apt-get install --yes chromium; }
	$(INSTALL) '.[browser]'
	$(PYTEST) tests/reporting/test_browser.py tests/test_site.py

lint: $(STAMP)
	$(VENV)/bin/ruff check --no-cache .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

setup: $(STAMP)

# What would be released today: the wheel, alone in an empty environment of each Python that is here, trains the demo.
RELEASE := build/release
release-check: docs
	rm -rf $(RELEASE)
	$(PYTHON) -m venv $(RELEASE)/builds
	$(RELEASE)/builds/bin/python -m pip install --quiet --disable-pip-version-check build
	$(RELEASE)/builds/bin/python -m build --outdir $(RELEASE)/dist .
	set -e; for python in python3.11 python3.12 python3.13 python3.14; do \
	  if ! $$python -c "" 2>/dev/null; then echo "$$python is not here: not run"; continue; fi; \
	  $$python -m venv $(RELEASE)/$$python; \
	  $(RELEASE)/$$python/bin/python -m pip install --quiet --disable-pip-version-check $(RELEASE)/dist/*.whl; \
	  cd $(RELEASE); $$python/bin/sfumato train demo/digits --output run-$$python; cd - >/dev/null; \
	done

$(USED): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "error: Python 3.11 or newer is needed: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) .
	rm -f $(VENV)/.used-*
	touch $@

$(STAMP): $(USED)
	$(INSTALL) '.[test]'
	rm -f $(VENV)/.stamp-*
	touch $@

# Real data sets, where their archive lies beside the checkout; tests that need one are skipped elsewhere.
$(DATA)/.unpacked: $(STAMP)
	mkdir -p $(DATA)
	if [ -f $(SHARED_DATA)/unpack.py ]; then $(VENV)/bin/python $(SHARED_DATA)/unpack.py $(DATA) && touch $@; fi
