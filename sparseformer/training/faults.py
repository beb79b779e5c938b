"""Named points at which a test can kill the process, as a power cut would."""

import os
import signal
from collections import Counter

_passed: Counter[str] = Counter()


def fault_point(name: str) -> None:
    """Kill this process with SIGKILL when SPARSEFORMER_FAULT asks for this point.

    The variable is `point` or `point:n`: the n-th time that the point is passed. Points:
    `checkpoint-file` (after each file of a save), `checkpoint-rename` (the complete temporary
    folder is about to get its name), `checkpoint-prune` (before old checkpoints are deleted).

    Args:
        name: the point that the caller has reached.
    """
    wanted, _, count = os.environ.get("SPARSEFORMER_FAULT", "").partition(":")
    if wanted != name:
        return
    _passed[name] += 1
    if _passed[name] == int(count or 1):
        os.kill(os.getpid(), signal.SIGKILL)
