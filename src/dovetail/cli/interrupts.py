"""Detection of Ctrl-C behind the errors that it causes.

Code that is interrupted inside a library need not receive a ``KeyboardInterrupt``: Spark cancels its job first, and
compiled code raises a ``SystemError``.
"""

import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def noticing_interrupts() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether Ctrl-C was pressed, whoever handles it. Spark installs its own handler."""
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
