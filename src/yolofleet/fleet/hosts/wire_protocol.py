"""The protocol between launcher and host agent: lines of JSON. The host agent uses this module without pydantic.

From the launcher:

- ``beat``: a heartbeat
- ``ask``: ``id``, ``request``, ``arguments``; the request ``warm_up`` with a ``job`` loads torch for it,
  ``save_state`` writes the state in memory to the disk
- ``start``: ``job``; again after ``exit``, for another attempt
- ``stop``: ``grace_s``
- ``resize``: ``terminal``, with the rows and columns that the launcher's terminal has now

From the host agent (``messages.py`` has the fields):

- ``hello``: the first message
- ``beat``: a heartbeat
- ``reply``: ``id``, and ``value`` or ``error``
- ``output``: text for the screen
- ``log``: text of a rank's log; rank ``AGENT`` is torchrun's agent
- ``exit``: the attempt has ended
"""

from __future__ import annotations

PROTOCOL = 4
MOST_MESSAGE_BYTES = 16 << 20
HEARTBEAT_S = 2.0
AGENT = -1  # in place of a rank
STOPPED_ON_REQUEST = "stopped on request"  # by `fleet stop`, or by a signal
STOPPED_BY_LAUNCHER = "stopped by the launcher"
