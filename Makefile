PYTHON ?= python3
VENV := .venv
INSTALLED := $(VENV)/.installed

.PHONY: help install demo test check format lock soak clean
help: ## what can be made
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(INSTALLED): requirements.lock pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --require-hashes --requirement requirements.lock
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@

install: $(INSTALLED) ## the locked environment in .venv

demo: $(INSTALLED) ## the whole pipeline on this machine, no cluster
	$(VENV)/bin/kfp-ddp demo

test: $(INSTALLED) ## all tests
	$(VENV)/bin/pytest

check: $(INSTALLED) ## lint, format, types, compiled YAML
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy kfp_ddp tests
	$(VENV)/bin/kfp-ddp compile --check

format: $(INSTALLED) ## mend lint and format
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
