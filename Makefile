PYTHON ?= python3
VENV := .venv
INSTALLED := $(VENV)/.installed

.PHONY: help install demo test test-all coverage e2e e2e-smoke e2e-kind images-test soak check reference format lock release-dry-run clean
help: ## what can be made
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(INSTALLED): requirements.lock pyproject.toml
	$(PYTHON) -m venv $(VENV)
ifdef CPU
	$(PYTHON) images/without_cuda.py requirements.lock > $(VENV)/requirements.lock
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps --require-hashes --requirement $(VENV)/requirements.lock
	$(VENV)/bin/python images/without_cuda.py
else
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps --require-hashes --requirement requirements.lock
endif
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	# The checkout is also found relative to the environment: a pod may see both at another path.
	echo ../../../.. > $$($(VENV)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/kfp_ddp_checkout.pth
	touch $@

install: $(INSTALLED) ## the locked environment in .venv; CPU=1: without what only a GPU needs

demo: $(INSTALLED) ## the whole pipeline on this machine, no cluster
	$(VENV)/bin/kfp-ddp demo

PYTEST := KUBECONFIG= $(VENV)/bin/pytest tests/unit tests/integration --numprocesses 3 --dist worksteal

test: $(INSTALLED) ## the tests without a cluster that take less than five seconds each
	$(PYTEST) -m "not slow"

test-all: $(INSTALLED) ## all tests without a cluster
	$(PYTEST) --durations 20

coverage: $(INSTALLED) ## the same, and a floor for the lines that they run; half as long again
	$(PYTEST) --cov --cov-report=

e2e: $(INSTALLED) ## all tests on the cluster that KUBECONFIG names
	$(VENV)/bin/pytest tests/e2e

e2e-smoke: $(INSTALLED) ## those of them that every change must pass
	$(VENV)/bin/pytest tests/e2e -m smoke --numprocesses 2 --dist loadfile --no-loadscope-reorder --durations 10

e2e-kind: ## these on a new cluster of kind (needs docker, kind, kubectl)
	tests/e2e/kind/run.sh

IMAGES := launcher server trainer-cpu trainer
images-test: $(INSTALLED) ## build the images and look into them (needs buildah, mmdebstrap, 30 GB of disk)
	images/build.sh "$(IMAGES)" $(VENV)/bin/pytest tests/images

soak: $(INSTALLED) ## hours of random faults; with KUBECONFIG set, those on a cluster too
	$(VENV)/bin/pytest -m soak

# A module, so that its sum is checked by Go; without shellcheck and pyflakes, which may be missing.
ACTIONLINT := GOFLAGS=-mod=mod go run github.com/rhysd/actionlint/cmd/actionlint@v1.7.12 \
	-shellcheck= -pyflakes= .github/workflows/*.yaml examples/upload_on_merge.yaml
check: $(INSTALLED) ## lint, format, types, and that nothing made from elsewhere is stale
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy kfp_ddp docs tests examples benchmarks release
	$(VENV)/bin/python -m docs.reference --check
	$(VENV)/bin/kfp-ddp compile --check
	@if command -v go > /dev/null; then $(ACTIONLINT); else echo "no go: workflow files are not checked"; fi

reference: $(INSTALLED) ## write anew what is made from elsewhere: preflight's inputs, tables, compiled YAML
	$(VENV)/bin/python -m docs.reference
	$(VENV)/bin/kfp-ddp compile

format: $(INSTALLED) ## mend lint and format
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

UV_LOCK := uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --no-annotate
STORES := --extra azure --extra huggingface --extra s3
lock: ## the locks again, from pyproject.toml (needs uv)
	$(UV_LOCK) --all-extras --group dev pyproject.toml --output-file requirements.lock
	$(UV_LOCK) --no-emit-package kfp-server-api --constraint requirements.lock --extra launch --extra registry --extra sign --extra sweep $(STORES) pyproject.toml --output-file images/launcher/requirements.lock
	$(UV_LOCK) --no-emit-package kfp-server-api --constraint requirements.lock --extra train --extra monitor --extra mlflow --extra export --extra heif --extra parquet --extra timm $(STORES) pyproject.toml --output-file images/trainer/requirements.lock
	$(UV_LOCK) --no-emit-package kfp-server-api --constraint requirements.lock --extra serve $(STORES) pyproject.toml --output-file images/server/requirements.lock
	echo hatchling | $(UV_LOCK) --constraint requirements.lock - --output-file images/wheel/requirements.lock

release-dry-run: $(INSTALLED) ## all of a release that needs no network, in dist/release
	release/dry_run.sh

clean: ## remove what make and the demo wrote
	rm -rf $(VENV) .coverage build dist demo-output .mypy_cache .pytest_cache .ruff_cache
