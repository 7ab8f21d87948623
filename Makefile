# Two commands do all: `make demo` and `make test`. Both set themselves up in $(VENV).
PYTHON ?= python3
VENV ?= .venv
BUNDLE ?= demo-bundle
WORKERS ?= 2
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test lint setup clean

setup: $(INSTALLED)

# torch first and by exact version: any other way of asking may bring a CUDA build of several gigabytes.
# The authors' package is an oracle of the tests; what it depends on is not needed for that.
$(INSTALLED): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps dflash==0.1.0
	touch $@

demo: $(INSTALLED)
	test -f $(BUNDLE)/config.json || $(BIN)/dflash-trt build --config build_configs/tiny-d2sd.yaml --output $(BUNDLE)
	$(BIN)/python examples/demo.py $(BUNDLE)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/mypy

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

clean:
	rm -rf $(VENV) $(BUNDLE)
