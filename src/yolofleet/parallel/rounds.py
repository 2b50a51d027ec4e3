"""Long work of rank 0 that is not a collective, such as reading from a store, while the other ranks wait for it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from yolofleet.errors import ClusterError
from yolofleet.parallel.world import World

ROUND_S = 5.0  # ranks meet after this time, so that no collective times out


def main_does(world: World, task: str, work: Callable[[], None] | None) -> None:
    """Let rank 0 do ``work``, and every rank wait for its end. Collective: every rank.

    Args:
        task: of :meth:`Activity.doing`; it has no limit of its own.
        work: of rank 0; may be None on the others.
    Raises:
        ClusterError: on the other ranks, if it failed. Rank 0 raises what ``work`` raised.
    """
    problems: list[BaseException] = []

    def run() -> None:
        assert work is not None
        try:
            work()
        except BaseException as problem:
            problems.append(problem)

    thread = threading.Thread(target=run, daemon=True, name=task) if world.is_main else None
    with world.activity.doing(task):
        if thread is not None:
            thread.start()
        answer = b"wait"
        while answer == b"wait":
            if thread is not None:
                thread.join(ROUND_S)
                answer = b"wait" if thread.is_alive() else b"failed" if problems else b"done"
            answer = world.broadcast_bytes(answer)
    if problems:
        raise problems[0]
    if answer == b"failed":
        raise ClusterError(f"rank 0 failed at {task}", hint="see the error that rank 0 reports")
