"""`yolofleet serve`: predictions over HTTP."""

from __future__ import annotations

import hashlib
import ipaddress
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from yolofleet.cli.board import address_of, listener_of, need_packages
from yolofleet.cli.commands import SchemaCommand, print_notes
from yolofleet.config.checks import check_networks
from yolofleet.config.load import without_recipe
from yolofleet.config.schema.serve import ServeConfig
from yolofleet.config.schema.verbs import PredictConfig
from yolofleet.support.system.signals import STOP_SIGNALS, handling
from yolofleet.support.text import echo, inform


def run_serve(options: dict[str, Any], config_file: str) -> int:
    resolved = without_recipe("serve", ServeConfig, check_networks, options, config_file=config_file)
    print_notes(resolved.notes)
    config = resolved.value
    address = address_of(config.host)
    need_packages("serve")
    with listener_of("server", address, [config.port], "another --port, or 0 for any free one") as listener:
        import numpy as np
        import torch

        from yolofleet.inference.predict.run import place_text, predictor_of, weights_text
        from yolofleet.inference.serve.service import Service, server_of
        from yolofleet.support.http_server import names_of

        if config.threads:
            torch.set_num_threads(config.threads)
        shared = ServeConfig.model_fields.keys() & PredictConfig.model_fields
        settings = PredictConfig.model_validate({name: getattr(config, name) for name in shared})
        predictor = predictor_of(settings)
        predictor.predict(np.zeros((predictor.img, predictor.img, 3), np.uint8))  # what cannot run fails here
        names, any_address = names_of(address)
        with Service(config, predictor, version_of(config.weights), names, any_address) as service:
            server = server_of(service)
            port = listener.getsockname()[1]
            if not ipaddress.ip_address(address).is_loopback:
                what = f"warning: the server listens on {address}, without encryption and without a password"
                echo(
                    f"{what}: anyone on the network can use it (docs/serve.md#behind-a-proxy)", to=sys.stderr
                )
            about = (weights_text(settings), f"{len(predictor.names)} classes", predictor.size.text)
            inform(f"{', '.join(about)}, {place_text(predictor)}; Ctrl-C ends the server", to=sys.stderr)
            echo(f"http://{'127.0.0.1' if any_address else address}:{port}/predict")
            # uvicorn handles Ctrl-C and SIGTERM, and sends them again at its end
            with suppress(KeyboardInterrupt), handling(server.handle_exit, STOP_SIGNALS):
                server.run(sockets=[listener])
            inform("the server has ended", to=sys.stderr)
    return 0


def version_of(weights: tuple[str, ...]) -> str:
    """Return the name and the start of the SHA-256 of weights, so that other content has another version."""
    from yolofleet.families.weights.catalogue import resolve_weights
    from yolofleet.inference.export.formats import format_of
    from yolofleet.storage.foreign import digest_of

    parts = list[Path]()
    for name in weights:
        format = format_of(Path(name))
        parts += [resolve_weights(name)] if format is None else format.module.parts(Path(name))
    digests = "".join(map(digest_of, parts))
    return f"{Path(weights[0]).stem}-{hashlib.sha256(digests.encode()).hexdigest()[:12]}"


command = SchemaCommand(
    "serve",
    ServeConfig,
    run_serve,
    help="Detect objects in images that programs send over HTTP: POST /predict with an image, or as the ML backend of Label "
    "Studio. Only this machine reaches the server, unless --host names another address. Needs the packages Starlette and uvicorn.",
    epilog="docs/serve.md has examples, the limits, and what to do behind a proxy.",
)
