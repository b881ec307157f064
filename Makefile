# Everything runs in .venv, made by the first target that needs it; PYTHON may name another interpreter, JAX a bound as "<0.12".
PYTHON ?= python3
JAX :=
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-all mutants soak soak-serve clients replicas integrations ahead gpu lint audit docs wheel clean

$(VENV)/ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable ".[dev]" "jax$(JAX)"
	touch $@

demo: $(VENV)/ready
	$(BIN)/python -m mamba_align_jax demo $(DEMO_ARGS)

# A worker runs whole files, which share programs, and the slowest files come first (tests/conftest.py). Each process would
# compile all modules of Python anew where the environment forbids it to keep them.
test: export PYTHONDONTWRITEBYTECODE :=
test: $(VENV)/ready
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 $(TEST_ARGS)

# Also the long searches and the full products of cases, which `make test` leaves out.
test-all:
	$(MAKE) test TEST_ARGS="--depth=full $(TEST_ARGS)"

mutants: $(VENV)/ready
	$(BIN)/python tests/mutants.py $(MUTANTS_ARGS)

soak: $(VENV)/ready
	$(BIN)/python tests/soak.py $(SOAK_ARGS)

# Hundreds of clients, many of them rude, against the server for two minutes.
soak-serve: $(VENV)/ready
	$(BIN)/python tests/serve/load.py $(SOAK_ARGS)

# Clients of others, each in an environment of its own in build/clients, against the server.
clients: $(VENV)/ready
	$(BIN)/python tests/clients/run.py $(CLIENTS_ARGS)

# Two replicas of the bundled model behind routers of others, each in an environment of its own in build/replicas.
replicas: $(VENV)/ready
	$(BIN)/python tests/replicas/run.py $(REPLICAS_ARGS)

# This library inside other people's stacks. SGLANG_JAX is a clone of sglang-jax, TPU_INFERENCE an unpacked wheel of
# tpu-inference; docs/integrations.md names the versions.
integrations: $(VENV)/ready
	@test -n "$(SGLANG_JAX)$(TPU_INFERENCE)" || { echo "give SGLANG_JAX=DIR or TPU_INFERENCE=DIR"; exit 1; }
	$(if $(SGLANG_JAX),$(BIN)/python tests/integrations/run.py $(SGLANG_JAX) $(INTEGRATIONS_ARGS))
	$(if $(TPU_INFERENCE),$(BIN)/python tests/integrations/run_tpu_inference.py $(TPU_INFERENCE))

# Every kernel and whole steps, compiled for GPUs that this machine does not have. JAX's plugin for CUDA is in an environment
# of its own.
ahead:
	$(PYTHON) -m venv build/ahead
	build/ahead/bin/python -m pip install --quiet --editable ".[dev]" "jax[cuda13]==0.11.2"
	PYTHONPATH=tests build/ahead/bin/python tests/ahead.py $(AHEAD_ARGS)

# All tests that need a GPU, on a machine that has one, with the Python that has JAX's plugin for it. It needs no installation.
gpu:
	$(PYTHON) tests/gpu/run.py $(GPU_ARGS)

# The types that users see are checked as well, with mypy too.
lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check
	$(BIN)/python tests/typed/check.py

# Looks up known weaknesses of what is installed. It asks pypi.org, so it is not part of `make lint`.
audit: $(VENV)/ready
	$(PYTHON) -m venv build/audit
	build/audit/bin/python -m pip install --quiet "pip-audit>=2.9"
	build/audit/bin/pip-audit --path $$($(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")

docs: $(VENV)/ready
	$(BIN)/python -m sphinx --quiet --fresh-env --fail-on-warning --keep-going docs build/docs

wheel: $(VENV)/ready
	$(BIN)/python -m build --wheel

clean:
	rm -rf $(VENV) dist build
