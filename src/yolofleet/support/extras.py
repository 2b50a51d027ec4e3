"""The packages that some features need beyond the dependencies of yolofleet, and the command that installs them."""

from __future__ import annotations

EXTRAS = {  # [project.optional-dependencies] of pyproject.toml, which a checkout that is not installed cannot ask for
    "tensorboard": ("tensorboard>=2.15",),
    "wandb": ("wandb>=0.19",),
    "mlflow": ("mlflow>=3.1",),
    "clearml": ("clearml>=1.16",),
    "comet": ("comet-ml>=3.47",),
    "albumentations": ("albumentations>=2.0,<2.1",),
    "ray": ("ray[train]>=2.60",),
    "tune": ("optuna>=4.2",),
    "board": ("starlette>=0.40", "uvicorn>=0.30"),
    "s3": ("s3fs>=2024.12",),
    "gcs": ("gcsfs>=2024.12",),
    "azure": ("adlfs>=2024.7",),
    "http": ("aiohttp>=3.9",),
    "parquet": ("pyarrow>=15",),
    "screen": ("mss>=9",),
    "onnx": ("onnx>=1.16", "onnxruntime>=1.18", "onnxslim>=0.1.50"),
    "openvino": ("onnx>=1.16", "openvino>=2024.4"),
    "ncnn": ("ncnn>=1.0.20241226", "pnnx>=20241223"),
    "tflite": ("litert-torch>=0.10,<0.11", "ai-edge-litert>=2.1", "ai-edge-quantizer>=0.10", "pydantic<2.12"),
    "coreml": ("coremltools>=9.0",),
    "tensorrt": ("onnx>=1.16", "tensorrt>=10.12"),
}


def install_hint(extra: str) -> str:
    """Return the command that installs the packages of an extra.

    It names the packages and not ``yolofleet[extra]``: the name yolofleet on PyPI does not belong to this project, and a
    checkout that is not installed would make pip ask PyPI for it.
    """
    return "pip install " + " ".join(f'"{requirement}"' for requirement in EXTRAS[extra])
