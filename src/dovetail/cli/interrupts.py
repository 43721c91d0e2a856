"""Ctrl-C, told apart from the errors that it comes out as.

Who is interrupted in foreign code need not see a ``KeyboardInterrupt``: Spark cancels its job first, and compiled code
turns it into a ``SystemError``.
"""

import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def noticing_interrupts() -> Iterator[Callable[[], bool]]:
    """Tell whether Ctrl-C was pressed, whoever handles it; Spark installs a handler of its own when it starts."""
    told, telling = socket.socketpair()
    with told, telling:
        told.setblocking(False)
        telling.setblocking(False)
        previous = signal.set_wakeup_fd(telling.fileno(), warn_on_full_buffer=False)

        def was_interrupted() -> bool:
            try:
                return signal.SIGINT in told.recv(4096)
            except BlockingIOError:
                return False

        try:
            yield was_interrupted
        finally:
            signal.set_wakeup_fd(previous)
