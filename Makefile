PYTHON ?= python3
VENV := .venv
INSTALLED := $(VENV)/.installed

.PHONY: help install demo test test-all test-kernels coverage e2e e2e-smoke e2e-changed e2e-kind images-test soak check reference format lock release-dry-run clean
help: ## what can be made
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

LOCKED := --no-deps --require-hashes --requirement
PIP := $(VENV)/bin/pip install --quiet --disable-pip-version-check
UV := VIRTUAL_ENV=$(VENV) $(VENV)/bin/uv pip install --quiet
# uv has wheels for few kinds of machines, and does not read the settings of pip.
define INSTALL
	$(UV) $(1) || { echo "uv cannot install here: pip does it, which takes minutes"; $(PIP) $(1); }
endef
ifdef CPU
SIZE := 1.1 GB, without what only a GPU needs
else
SIZE := 3.5 GB; CPU=1 leaves out what only an NVIDIA GPU needs, and loads 1.1 GB
endif

$(INSTALLED): requirements.lock pyproject.toml images/uv/requirements.lock images/wheel/requirements.lock
	@echo "installing into $(VENV) by the hashes of requirements.lock: $(SIZE)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) --only-binary :all: $(LOCKED) images/uv/requirements.lock || echo "no wheel of uv for this machine"
	@# One package has no wheel: pinned tools build it.
	@$(call INSTALL, --only-binary :all: $(LOCKED) images/wheel/requirements.lock)
ifdef CPU
	@$(PYTHON) images/without_cuda.py requirements.lock > $(VENV)/requirements.lock
	@$(call INSTALL, --no-build-isolation $(LOCKED) $(VENV)/requirements.lock)
	@$(VENV)/bin/python images/without_cuda.py
else
	@$(call INSTALL, --no-build-isolation $(LOCKED) requirements.lock)
endif
	@$(call INSTALL, --no-deps --no-build-isolation --editable .)
	@# The checkout is also found relative to the environment: a pod may see both at another path.
	@echo ../../../.. > $$($(VENV)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/kfp_ddp_checkout.pth
	@touch $@

# Tests make errors of warnings, and a compiler warns of modules of others when it meets them.
COMPILED := $(VENV)/.compiled
$(COMPILED): $(INSTALLED)
	@echo "compiling the installed modules"
	@$(VENV)/bin/python -W ignore -m compileall -q -j 0 $(VENV)/lib > /dev/null || true
	@touch $@

install: $(INSTALLED) ## the locked environment in .venv; CPU=1: without what only a GPU needs

demo: $(INSTALLED) ## the whole pipeline on this machine, no cluster
	$(VENV)/bin/kfp-ddp demo

PYTEST := KUBECONFIG= $(VENV)/bin/pytest components tests/unit tests/integration --numprocesses 3 --dist worksteal

test: $(COMPILED) ## the tests without a cluster that take less than five seconds each
	$(PYTEST) -m "not slow"

test-all: $(COMPILED) ## all tests without a cluster
	$(PYTEST) --durations 20

KERNELS := ATEN_CPU_CAPABILITY=default ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 \
	ONEDNN_MAX_CPU_ISA=AVX512_CORE MKL_CBWR=COMPATIBLE OMP_NUM_THREADS=2
COMPUTE := evaluation export local pictures serve training
NUMERIC := $(wildcard $(foreach room,$(COMPUTE),tests/unit/$(room) tests/integration/$(room)) \
	tests/unit/test_predict.py tests/integration/test_predict_command.py)
test-kernels: $(COMPILED) ## the tests of computed numbers, as other CPUs compute them (tests/README.md)
	for kernels in $(KERNELS); do \
		echo $$kernels; \
		env KUBECONFIG= $$kernels $(VENV)/bin/pytest $(NUMERIC) --numprocesses 3 --dist worksteal || exit 1; \
	done

coverage: $(COMPILED) ## all tests without a cluster, and a floor for the lines that they run; half as long again
	$(PYTEST) --cov --cov-report=

e2e: $(COMPILED) ## all tests on the cluster that KUBECONFIG names
	$(VENV)/bin/pytest tests/e2e

e2e-smoke: $(COMPILED) ## those of them that every change must pass
	$(VENV)/bin/pytest tests/e2e -m smoke --numprocesses 2 --dist loadfile --no-loadscope-reorder --durations 10

# No test there and nothing left of one by -m (5) are no failures.
e2e-changed: $(COMPILED) ## those that the changes of the last day reach, begun within MINUTES (8)
	files=$$($(VENV)/bin/python -m tests.changed) && echo "reached: $${files:-none}" && { [ -z "$$files" ] || \
	KFP_DDP_TEST_MINUTES=$(or $(MINUTES),8) $(VENV)/bin/pytest $$files -m "not smoke and not slow" \
	--numprocesses 2 --dist loadfile --no-loadscope-reorder --durations 10 || [ $$? = 5 ]; }

e2e-kind: ## these on a new cluster of kind (needs docker, kind, kubectl)
	tests/e2e/kind/run.sh

IMAGES := launcher server trainer-cpu trainer
images-test: $(COMPILED) ## build the images and look into them (needs buildah, mmdebstrap, 30 GB of disk)
	images/build.sh "$(IMAGES)" $(VENV)/bin/pytest tests/images

soak: $(COMPILED) ## hours of random faults; with KUBECONFIG set, those on a cluster too
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

UV_LOCK := $(VENV)/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --no-annotate
# The one package without a wheel is for people, and no pod needs it.
IMAGE_LOCK := $(UV_LOCK) --no-emit-package kfp-server-api --constraint requirements.lock
STORES := --extra azure --extra huggingface --extra s3
lock: $(INSTALLED) ## the locks again, from pyproject.toml
	$(UV_LOCK) --all-extras --group dev pyproject.toml --output-file requirements.lock
	$(IMAGE_LOCK) --extra launch --extra registry --extra sign --extra sweep $(STORES) pyproject.toml --output-file images/launcher/requirements.lock
	$(IMAGE_LOCK) --extra train --extra monitor --extra mlflow --extra export --extra heif --extra parquet --extra timm --extra verify $(STORES) pyproject.toml --output-file images/trainer/requirements.lock
	$(IMAGE_LOCK) --extra serve --extra verify $(STORES) pyproject.toml --output-file images/server/requirements.lock
	printf '%s\n' hatchling setuptools | $(UV_LOCK) --constraint requirements.lock - --output-file images/wheel/requirements.lock
	echo mlflow-skinny | $(UV_LOCK) --constraint requirements.lock - --output-file images/mlflow/requirements.lock
	echo pyarrow | $(UV_LOCK) --constraint requirements.lock - --output-file images/parquet/requirements.lock
	echo uv | $(UV_LOCK) - --output-file images/uv/requirements.lock

release-dry-run: $(INSTALLED) ## all of a release that needs no network, in dist/release
	release/dry_run.sh

clean: ## remove what make and the demo wrote
	rm -rf $(VENV) .coverage build dist demo-output .mypy_cache .pytest_cache .ruff_cache
