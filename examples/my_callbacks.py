"""A callback that watches: yolofleet train ... --callbacks examples/my_callbacks.py:Journal"""

import json

from yolofleet import Callback


class Journal(Callback):
    """Writes each event of a run as a line of journal.jsonl; rank 0 runs it."""

    def start(self, run):
        self.file = run.folder / "journal.jsonl"
        self.write("start", step=run.step, ranks=run.ranks, resumed=run.resumed)

    def write(self, event, **values):
        with self.file.open("a") as file:
            file.write(json.dumps({"event": event, **values}) + "\n")

    def epoch(self, epoch, row):
        self.write("epoch", epoch=epoch, images=row["images"])

    def validation(self, epoch, metrics, per_class):
        self.write("validation", epoch=epoch, mAP50=metrics["mAP50"])

    def save(self, file, step):
        self.write("save", file=file.name, step=step)

    def stop(self, reason, step):
        self.write("stop", reason=reason, step=step)
