"""Load on `yolofleet serve`: requests a second beside the runtime alone, times of answers, memory, and lost requests.

    yolofleet export --weights best.safetensors --format onnx --img 640 --dynamic batch --out best.onnx
    python benchmarks/serve.py --weights best.onnx --images folder --clients 64 --seconds 60 --times 1 4

Each client sends one JPEG after the other on one connection, and sends it again after status 503. A request is lost if it has
another status, or no answer. The clients are one process; the server is another.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import onnxruntime


class Clients:
    """What some clients have seen."""

    def __init__(self, port: int, pictures: list[bytes], until_s: float) -> None:
        self.port, self.pictures, self.until_s = port, pictures, until_s
        self.seconds: list[float] = []
        self.statuses: Counter[str] = Counter()

    async def send(self) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        while time.monotonic() < self.until_s:
            body, began_s = random.choice(self.pictures), time.monotonic()
            try:
                status, closes = await self.ask(reader, writer, body)
            except (OSError, ValueError, asyncio.IncompleteReadError) as problem:
                status, closes = type(problem).__name__, True
            self.statuses[status] += 1
            if status == "200":
                self.seconds.append(time.monotonic() - began_s)
            elif status == "503":
                await asyncio.sleep(1)  # Retry-After
            if closes:
                writer.close()
                reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.close()

    async def ask(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes
    ) -> tuple[str, bool]:
        head = f"POST /predict HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        answer = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = re.search(r"content-length: (\d+)", answer, re.IGNORECASE)
        if length is None:
            raise ValueError(answer)
        await reader.readexactly(int(length[1]))
        status = answer.split(" ", 2)[1]
        if status == "503" and "retry-after" not in answer.lower():
            status = "503 without Retry-After"
        return status, "connection: close" in answer.lower()


def memory_mib(process: int, name: str) -> float:
    status = Path(f"/proc/{process}/status").read_text()
    found = re.search(rf"{name}:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) / 1024


def alone(weights: str, batch: int, seconds: float) -> float:
    """Return the images a second of ONNX Runtime, without decoding, letterboxing and suppression."""
    session = onnxruntime.InferenceSession(weights, providers=["CPUExecutionProvider"])
    one = session.get_inputs()[0]
    shape = [batch if not isinstance(one.shape[0], int) else one.shape[0], 3, *one.shape[2:]]
    images = np.random.default_rng(0).random(shape, np.float32)
    session.run(None, {one.name: images})
    count, began_s = 0, time.monotonic()
    while time.monotonic() < began_s + seconds:
        session.run(None, {one.name: images})
        count += len(images)
    return count / (time.monotonic() - began_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--weights", required=True, help="an ONNX file")
    parser.add_argument("--images", type=Path, required=True, help="a folder of JPEG files of one size")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--times", type=int, nargs="+", default=[1, 4])
    options = parser.parse_args()
    pictures = [path.read_bytes() for path in sorted(options.images.glob("*.jpg"))[:64]]

    def rate_alone() -> float:
        rate = alone(options.weights, options.batch, min(options.seconds, 20))
        print(f"ONNX Runtime alone, batches of {options.batch}: {rate:.1f} images/s", flush=True)
        return rate

    rate = rate_alone()
    command = [sys.executable, "-m", "yolofleet", "serve", "--weights", options.weights, "--port", "0"]
    with subprocess.Popen(
        [*command, "--batch", str(options.batch)], stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline().rpartition(":")[2].partition("/")[0])
            for times in options.times:
                before = memory_mib(server.pid, "VmRSS")
                clients = Clients(port, pictures, time.monotonic() + options.seconds)

                async def load(clients: Clients, count: int) -> None:
                    await asyncio.gather(*(clients.send() for _ in range(count)))

                began_s = time.monotonic()
                asyncio.run(load(clients, options.clients * times))
                elapsed_s = time.monotonic() - began_s
                lost = clients.statuses.total() - clients.statuses["200"] - clients.statuses["503"]
                p50, p99 = (1000 * float(np.percentile(clients.seconds, q)) for q in (50, 99))
                after, peak = (memory_mib(server.pid, name) for name in ("VmRSS", "VmHWM"))
                served = clients.statuses["200"] / elapsed_s
                print(
                    f"{options.clients * times} clients, {elapsed_s:.0f} s: {served:.1f} requests/s = {served / rate:.2f} of the "
                    f"runtime alone; p50 {p50:.0f} ms, p99 {p99:.0f} ms; {dict(clients.statuses)}, {lost} lost; memory before "
                    f"{before:.0f}, after {after:.0f}, peak {peak:.0f} MiB",
                    flush=True,
                )
        finally:
            server.terminate()
        print(f"exit code after SIGTERM: {server.wait()}")
    rate_alone()  # the load of a shared machine changes


if __name__ == "__main__":
    main()
