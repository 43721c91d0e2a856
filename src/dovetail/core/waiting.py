"""How long the present thread waited for a processor: time that says nothing about the work or a device."""

__all__ = ["seconds_ready"]

_NANOSECONDS = 1e-9


def seconds_ready() -> float:
    """Seconds in which this thread could have run but others did; 0 where the system does not count them.

    Examples
    --------
    >>> before = seconds_ready()
    >>> seconds_ready() >= before >= 0.0
    True
    """
    try:
        with open("/proc/thread-self/schedstat", "rb") as file:
            return int(file.read().split()[1]) * _NANOSECONDS
    except (OSError, IndexError, ValueError):
        return 0.0
