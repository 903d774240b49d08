# make demo | test | test-fast | test-ci | test-all | test-browser | test-distributed | test-vendors | test-lowest | check | check-kernels | check-ptx | docs | format | generate | constraints
#      bench-kv | bench-pool | bench-attention | bench-linear | bench-experts | bench-mixture | bench-ranks | bench-replicas | bench-routing | bench-compile | bench-cuda | bench-kernels | bench-products | bench-tensorrt | bench-tiers | bench-stores | bench-step | bench-page-ends | bench-sampling | bench-serve | bench-start
# Needs Python 3.11+, a C++ compiler and a package index.
PYTHON ?= python3
VENV := .venv
DOCS := .venv-docs
VENDORS := .venv-vendors
LOWEST := .venv-lowest
BIN := $(VENV)/bin
# The version that the tests ran with. On Linux the package index has its build for CUDA, gigabytes:
# PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu takes the one for CPUs.
TORCH ?= torch==2.13.0
# Versions that the tests ran with; empty: the newest that pyproject.toml allows.
CONSTRAINTS ?= -c constraints.txt
EXTRAS := compile,onnx,torch,test,cuda,tensorrt,tiers,serve,guide,events,ray
# One process for each core; a file's tests share what they compile, so they stay together.
WORKERS ?= auto --maxprocesses 8
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
BENCH := $(BIN)/python -m benchmarks
DEMO := out/tiny-llama.kvg
NATIVE := $(shell find plugins -type f 2>/dev/null)

# Both ways to install write to one environment.
.NOTPARALLEL:
.PHONY: demo test test-fast test-ci test-all test-browser test-distributed test-vendors test-lowest check check-kernels check-ptx docs format generate constraints clean
.PHONY: bench-kv bench-pool bench-attention bench-linear bench-experts bench-mixture bench-ranks bench-replicas bench-routing bench-compile bench-cuda bench-kernels bench-products bench-tensorrt bench-tiers bench-stores bench-step bench-page-ends bench-sampling bench-serve bench-start

demo: $(VENV)/.demo
	$(BIN)/kvgraph compile examples/tiny-llama -o $(DEMO) --force
	$(BIN)/kvgraph generate $(DEMO) "The import statement" --max-new-tokens 64

# Of costly tests a sample: tests/support/costs.py.
test: $(VENV)/.installed
	$(PYTEST) -m "not slow" --sample

test-ci: $(VENV)/.installed
	$(PYTEST) -m "not slow"

# Without torch, within a minute.
test-fast: $(VENV)/.installed
	$(PYTEST) -m "not slow" --fast

test-all: $(VENV)/.installed
	$(PYTEST)

# The server's page, in headless Chromium: apt install chromium.
test-browser: $(VENV)/.installed
	$(BIN)/python -m pytest tests/serve/test_page.py

# Artifacts of several ranks: the ladder over all models, and ranks that are killed at 50 moments.
# Replicas on Ray: 200 conversations over two and four of them, and replicas that are killed.
test-distributed: $(VENV)/.installed
	$(PYTEST) tests/ranks tests/test_ladder.py -k "ranks"
	$(BIN)/python -m pytest tests/serve/replicas

# Other projects' own packages: GPU builds, as far as they go without a GPU, and lm-eval against a
# served artifact. 400 MB of wheels.
test-vendors: $(VENDORS)/.installed
	$(VENDORS)/bin/python -m pytest tests/vendors tests/serve/test_lm_eval.py

# What a user meets, with the lowest versions that pyproject.toml allows (but for torch's). Older
# clients, words of an older typer, and a header of HTTP/1.0 are left out.
test-lowest: $(LOWEST)/.installed
	$(LOWEST)/bin/python -m pytest -n $(WORKERS) -m "not slow" --ignore=tests/serve/replicas \
		--ignore=tests/serve/test_openai_client.py --ignore=tests/serve/test_fuzz.py \
		-k "not http_1_0 and not refused_gets_a_sentence and not say_more_than_is_read" \
		tests/test_cli.py tests/test_cli_chat.py tests/test_cli_streams.py tests/test_conformance.py \
		tests/test_ladder.py tests/test_onnx.py tests/compiler/test_gguf.py tests/runtime/test_chat.py \
		tests/runtime/test_guide.py tests/runtime/test_text.py tests/runtime/test_tiers.py tests/serve

check: $(VENV)/.installed
	$(BIN)/python -m tools.check

# Every case on Triton's interpreter (sm_80's tiles decode float8 in software), then what each
# variant takes of each architecture.
check-kernels: $(VENV)/.installed
	TRITON_INTERPRET=1 $(BIN)/python -m tests.support.matrix --arch sm_90
	TRITON_INTERPRET=1 $(BIN)/python -m tests.support.matrix --arch sm_80
	$(BIN)/python -m tests.kernels.table

# The matrix on the compiled kernels of every architecture, executed as PTX: about 20 minutes.
check-ptx: $(VENV)/.installed
	$(BIN)/python -m tests.support.ptx_matrix

# Strict: a broken link or reference fails. An environment of its own, since docs need no torch.
docs: $(DOCS)/.installed
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python -m mkdocs build --strict

format: $(VENV)/.installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# What type checkers read of the table of public names and of the OpSpecs.
generate: $(VENV)/.installed
	$(BIN)/python -m tools.generate

# The newest versions that pyproject.toml allows, from here on.
constraints: $(VENV)/.installed
	$(BIN)/pip install --progress-bar on -q --upgrade "$(TORCH)" -e ".[$(EXTRAS)]"
	$(BIN)/python -m tools.constraints $(EXTRAS)

bench-kv: $(VENV)/.installed
	$(BENCH).kv

bench-pool: $(VENV)/.installed
	$(BENCH).pool

bench-attention: $(VENV)/.installed
	$(BENCH).attention

bench-linear: $(VENV)/.installed
	$(BENCH).linear

bench-experts: $(VENV)/.installed
	$(BENCH).experts

# 6 GB of disk, about 15 minutes. With peers: PEERS="NAME=PYTHON ..." make bench-mixture; FOLDER=DIR
# keeps the model, also in their formats.
bench-mixture: $(VENV)/.installed
	$(BENCH).mixture $(if $(FOLDER),--folder $(FOLDER)) $(PEERS:%=--peers %)

bench-ranks: $(VENV)/.installed
	$(BENCH).ranks

bench-replicas: $(VENV)/.installed
	$(BENCH).replicas $(ARTIFACT)

bench-routing: $(VENV)/.installed
	$(BENCH).routing

# 20 GB of disk, most of it sparse.
bench-compile: $(VENV)/.installed
	$(BENCH).compile

# On an NVIDIA GPU, about 10 minutes.
bench-cuda: $(VENV)/.installed
	$(BENCH).cuda

# GPU kernels executed as PTX on a CPU: what a profiler would count. Needs no GPU.
bench-kernels: $(VENV)/.installed
	$(BENCH).kernels

bench-products: $(VENV)/.installed
	$(BENCH).products

bench-tensorrt: $(VENV)/.installed
	$(BENCH).tensorrt

bench-tiers: $(VENV)/.installed
	$(BENCH).tiers

bench-stores: $(VENV)/.installed
	$(BIN)/pip install --progress-bar on -q -e ".[bench]"
	$(BENCH).stores

# 3 GB of disk, about 3 minutes. With an artifact at hand: ARTIFACT=DIR make bench-step.
bench-step: $(VENV)/.installed
	$(BENCH).step $(ARTIFACT)

bench-page-ends: $(VENV)/.installed
	$(BENCH).page_ends $(ARTIFACT)

bench-sampling: $(VENV)/.installed
	$(BENCH).sampling

bench-start: $(VENV)/.installed
	$(BENCH).start $(ARTIFACT)

bench-serve: $(VENV)/.installed
	$(BENCH).serve $(ARTIFACT) $(if $(VLLM),--vllm $(VLLM))

# Editable, so that Python edits need no reinstall; native sources do.
$(VENV)/.installed: OF := $(EXTRAS)
$(VENV)/.demo: OF := compile,onnx
$(VENV)/.installed $(VENV)/.demo: pyproject.toml constraints.txt $(NATIVE)
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "kvgraph needs Python 3.11 or newer, got " + sys.version'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --progress-bar on -q "$(TORCH)"
	$(BIN)/pip install --progress-bar on -q $(CONSTRAINTS) -e ".[$(OF)]"
	touch $(VENV)/.demo $@

$(DOCS)/.installed: pyproject.toml
	test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -c 'import tomllib; \
		project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
		print(*project["optional-dependencies"]["docs"], sep="\n")' > $(DOCS)/requirements.txt
	$(DOCS)/bin/pip install --progress-bar on -q -r $(DOCS)/requirements.txt
	touch $@

# Over the project's own packages. torch-tensorrt's libraries are for a CUDA build of torch; both of
# its wheels are the package torch_tensorrt.
$(VENDORS)/.installed: $(VENV)/.installed
	test -x $(VENDORS)/bin/python || $(PYTHON) -m venv $(VENDORS)
	echo "import site; site.addsitedir('$(abspath $(VENV))/lib/$$(ls $(VENV)/lib)/site-packages')" \
		> $(VENDORS)/lib/$$(ls $(VENDORS)/lib)/site-packages/project.pth
	$(VENDORS)/bin/pip install --progress-bar on -q --no-deps onnxruntime-gpu dllist torch-tensorrt-rtx==2.13.0
	$(VENDORS)/bin/pip install --progress-bar on -q "lm-eval[api]"
	rm -f $(VENDORS)/lib/*/site-packages/torch_tensorrt/lib/*.so $(VENDORS)/lib/*/site-packages/torch_tensorrt/_C*.so
	$(VENDORS)/bin/pip install --progress-bar on -q --no-deps --upgrade --target $(VENDORS)/torch-tensorrt torch-tensorrt==2.13.0
	touch $@

# uv alone resolves the lowest versions.
$(LOWEST)/.installed: pyproject.toml $(NATIVE)
	test -x $(LOWEST)/bin/uv || ($(PYTHON) -m venv $(LOWEST) && $(LOWEST)/bin/pip install -q uv)
	$(LOWEST)/bin/pip install --progress-bar on -q "$(TORCH)"
	$(LOWEST)/bin/uv pip install --python $(LOWEST)/bin/python --resolution lowest-direct "$(TORCH)" \
		-e ".[compile,onnx,serve,guide,tiers,events,test]"
	touch $@

clean:
	rm -rf $(VENV) $(DOCS) $(VENDORS) $(LOWEST) build out site
