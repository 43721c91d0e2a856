"""Processes that share a simulated disk, each of which stops before every step that it takes there."""

import threading
from collections.abc import Callable

from dovetail.storage.simulated import SimulatedStorage
from dovetail.storage.simulated_disk import SimulatedDisk

__all__ = ["Process"]


class Killed(BaseException):
    """Raised in a process to end it, wherever it is."""


class Process:
    """A thread that runs only while `advance` does. Otherwise it is suspended before a step on its storage."""

    def __init__(
        self, disk: SimulatedDisk, before_step: Callable[[str], None] = lambda step: None, host: str = "host"
    ) -> None:
        self.storage = SimulatedStorage(disk, self._before_step, host)
        self.error: Exception | None = None
        self.is_over = False
        self._is_killed = False
        self._steps_left = 0
        self._on_step = before_step
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._thread: threading.Thread | None = None

    def start(self, program: Callable[[], None]) -> None:
        """Take a program that uses `storage`; it has not begun before the first `advance`."""
        self._thread = threading.Thread(target=self._run, args=(program,), daemon=True)
        self._thread.start()

    def advance(self, steps: int) -> None:
        """Let it take this many steps, fewer if it ends or waits."""
        if not self.is_over:
            self._steps_left = steps
            self._go.release()
            self._stopped.acquire()

    def kill(self) -> None:
        """End it where it is."""
        self._is_killed = True
        self.advance(0)
        assert self.is_over
        assert self._thread is not None
        self._thread.join()

    def wait(self) -> None:
        """Called by the program: nothing to do until the next `advance`."""
        self._steps_left = 0
        self._suspend()

    def _run(self, program: Callable[[], None]) -> None:
        self._go.acquire()
        try:
            if not self._is_killed:
                program()
        except Killed:
            pass
        except Exception as error:  # noqa: BLE001 -- whoever advances it looks at it
            self.error = error
        finally:
            self.is_over = True
            self._stopped.release()

    def _before_step(self, step: str) -> None:
        while self._steps_left == 0:
            self._suspend()
        self._steps_left -= 1
        self._on_step(step)

    def _suspend(self) -> None:
        if self._is_killed:
            raise Killed
        self._stopped.release()
        self._go.acquire()
        if self._is_killed:
            raise Killed
