"""Settings of ``yolofleet serve``."""

from __future__ import annotations

from typing import ClassVar

from yolofleet.config.schema.fields import (
    DEVICE,
    MAX_THREADS,
    Device,
    Natural,
    Texts,
    execution_setting,
    method_setting,
)
from yolofleet.config.schema.inference import NetworkSettings


class ServeConfig(NetworkSettings):
    """Settings of ``yolofleet serve``."""

    verb: ClassVar[str] = "serve"
    batch: Natural = method_setting(8, "images per forward pass; those of several requests share one")
    wait_ms: int = method_setting(
        5, "milliseconds that an image waits for others of its forward pass", ge=0, le=1000
    )
    device: Device = execution_setting("auto", "auto, cpu, mps, or one CUDA device number", pattern=DEVICE)
    threads: int = execution_setting(0, "CPU threads; 0 = all cores", ge=0, le=MAX_THREADS)
    host: str = execution_setting(
        "127.0.0.1",
        "address to listen on; with the default, other machines cannot connect; there is no encryption and no password",
        in_files=False,
    )
    port: int = execution_setting(8643, "port to listen on; 0 = any free one", ge=0, le=65535, in_files=False)
    allow_host: Texts = execution_setting(
        (),
        "also answer requests to this name (the header Host), such as that of a container; may be repeated",
        in_files=False,
    )
    queue: Natural = execution_setting(128, "requests that may wait for an answer; others get status 503")
    max_mib: int = execution_setting(32, "largest body of a request, MiB", ge=1, le=1024)
    max_megapixels: int = execution_setting(
        50, "largest image of a request, millions of pixels", ge=1, le=268
    )
    label_studio_url: str = execution_setting(
        "",
        "fetch images of Label Studio's tasks below this address, such as http://127.0.0.1:8080; without it, only images in "
        "the request are read",
        in_files=False,
        pattern=r"^(https?://[\w.:\[\]-]+(/[\w./~-]*)?)?$",
    )
