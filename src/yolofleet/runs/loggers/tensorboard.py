"""TensorBoard: event files in ``tensorboard/`` of the run folder (extra: ``tensorboard``)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from yolofleet.runs.loggers.logger import LoggedRun, Logger
from yolofleet.support.files.foreign import read_foreign

MAX_PICTURE_BYTES = 64 << 20


class TensorboardLogger(Logger):
    """Writes curves with the package's own writer, which does not import torch.

    A resumed run adds a file. TensorBoard shows both files as one run, without the earlier rows of epochs that are trained again.
    """

    def __init__(self, run: LoggedRun) -> None:
        super().__init__(run)
        self._writer: Any = None
        self._next_epoch = 0 if run.resumed else 1  # the first row of a resumed run replaces later ones

    def row(self, row: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        epoch, now = int(row["epoch"]), time.time()
        writer, next_epoch = self._writer or EventFileWriter(str(self.run.folder)), self._next_epoch
        self._writer, self._next_epoch = None, 0  # a writer that fails once, on a full disk, does not recover
        if epoch != next_epoch:  # rows of this epoch and later ones are replaced
            start = SessionLog(status=SessionLog.START)
            writer.add_event(Event(wall_time=now, step=epoch, session_log=start))
        values = [Summary.Value(tag=k, simple_value=v) for k, v in row.items() if k != "epoch"]
        writer.add_event(Event(wall_time=now, step=epoch, summary=Summary(value=values)))
        writer.flush()
        self._writer, self._next_epoch = writer, epoch + 1

    def picture(self, path: Path, epoch: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = self._writer or EventFileWriter(str(self.run.folder))
        image = Summary.Image(
            encoded_image_string=read_foreign(path, limit_bytes=MAX_PICTURE_BYTES), colorspace=3
        )
        value = Summary.Value(tag=f"validation/{path.stem}", image=image)
        self._writer.add_event(Event(wall_time=time.time(), step=epoch, summary=Summary(value=[value])))
        self._writer.flush()

    def close(self, finished: bool) -> None:
        if self._writer is not None:
            self._writer.close()
