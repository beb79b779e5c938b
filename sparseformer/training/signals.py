"""Stop and save requests from the operating system, answered between two steps."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}


class StopRequested(Exception):  # noqa: N818 - it is a request, not an error
    """Leave the current evaluation, save, and end the process with this code."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


class Signals:
    """What has been asked for since the run began.

    SIGTERM and Ctrl-C end the run after the current step with a checkpoint; a second one ends it
    at once, and the last checkpoint stays as it was. SIGUSR1 saves and goes on.
    """

    def __init__(self) -> None:
        self.exit_code: int | None = None
        self.save = False

    def raise_if_stopped(self) -> None:
        """Raise StopRequested when the run should end."""
        if self.exit_code is not None:
            raise StopRequested(self.exit_code)

    def take_save_request(self) -> bool:
        """Return whether SIGUSR1 came in, and forget it."""
        requested, self.save = self.save, False
        return requested

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGUSR1:
            self.save = True
        elif self.exit_code is not None:
            os._exit(self.exit_code)
        else:
            self.exit_code = _EXIT_CODES[signal.Signals(number)]


@contextmanager
def catch_signals() -> Iterator[Signals]:
    """Collect signals inside the block, and put the former handlers back after it."""
    signals = Signals()
    numbers = [*_EXIT_CODES, signal.SIGUSR1]
    former = {number: signal.signal(number, signals._handle) for number in numbers}
    try:
        yield signals
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
