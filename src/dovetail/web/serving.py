"""Serving the live page and metrics from a thread of this process.

Importing this module imports Starlette and uvicorn; nothing else of Dovetail does.
"""

import os
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from html import escape
from types import TracebackType
from typing import Any, Self

import uvicorn

from dovetail.core.errors import PlanError
from dovetail.web.app import Flows, page_app
from dovetail.web.guard import Guard

__all__ = ["DEFAULT_PORT", "Page", "ServedThread", "open_page", "serve"]

DEFAULT_PORT = 8610
_TRIED_PORTS = 20
_START_SECONDS = 30.0
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class ServedThread:
    """An ASGI application on a port, served by a thread until `close`, or the end of the process."""

    def __init__(self, host: str, port: int | None, make_app: Callable[[int], Any]) -> None:
        self._socket = _bound(host, port)
        self.host, self.port = host, int(self._socket.getsockname()[1])
        config = uvicorn.Config(
            make_app(self.port),
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="off",
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._socket]}, name=f"dovetail port {self.port}", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop serving; nothing happens the second time."""
        self._server.should_exit = True
        self._thread.join(_START_SECONDS)
        self._socket.close()


def _bound(host: str, port: int | None) -> socket.socket:
    """A listening socket: on this port, or by default on the first free one from `DEFAULT_PORT` on."""
    tried = [port] if port is not None else [*range(DEFAULT_PORT, DEFAULT_PORT + _TRIED_PORTS), 0]
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    failure: OSError | None = None
    for number in tried:
        found = socket.socket(family, socket.SOCK_STREAM)
        try:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind((host, number))
            found.listen(100)
            return found
        except (OSError, OverflowError) as error:
            found.close()
            failure = error if isinstance(error, OSError) else OSError(0, "not a port")
    reason = "unknown" if failure is None else failure.strerror
    raise PlanError(f"Port {port} of {host} cannot be used: {reason}.", hint="Name another port, or none.")


class Page:
    """A live page that is being served; made by `serve`. As a context manager, until the end of the block.

    Attributes
    ----------
    address
        What to open in a browser, with the token.
    """

    def __init__(self, flows: Flows, host: str, port: int | None, names: Sequence[str]) -> None:
        token, self._closing = secrets.token_urlsafe(24), threading.Event()
        hosts = {*_LOOPBACK, *names} if host in _LOOPBACK else {host, *names, *_LOOPBACK, socket.gethostname().lower()}

        def guarded(port_in_use: int) -> Guard:
            return Guard(page_app(flows, self._closing), token, hosts, f"dovetail_{port_in_use}")

        self._served = ServedThread(host, port, guarded)
        self.port = self._served.port
        shown = names[0] if names else {"0.0.0.0": socket.gethostname(), "::1": "[::1]"}.get(host, host)
        self.address = f"http://{shown}:{self.port}/?token={token}"

    def close(self) -> None:
        """Stop serving the page. The flows run on."""
        self._closing.set()
        self._served.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Page({self.address!r})"

    def _repr_html_(self) -> str:
        address = escape(self.address, quote=True)
        return f'<p>Live page: <a href="{address}" target="_blank" rel="noopener">{address}</a></p>'


def open_page(
    checkpoints: Sequence[str],
    *,
    host: str = "127.0.0.1",
    port: int | None = None,
    names: Sequence[str] = (),
    examples: bool = False,
) -> Page:
    """Serve the page of these checkpoints; ``names`` are further host names under which it is reached."""
    return Page(Flows(checkpoints, examples), host, port, [name.lower() for name in names])


def serve(
    *flows: Any, host: str = "127.0.0.1", port: int | None = None, names: Sequence[str] = (), examples: bool = False
) -> Page:
    """Serve a live page of flows, in this process, and return it; its ``address`` is for a browser.

    It is read from the flows' checkpoints, and can stop or drain them. Who has no token sees nothing.

    Parameters
    ----------
    flows
        Running flows, as ``Flow.write`` returned them, or paths of checkpoints.
    host
        Where it listens: by default on loopback, for browsers on this machine.
    port
        By default the first free one from 8610 on.
    names
        Further host names under which browsers reach it, for example behind a proxy. Requests for others are refused.
    examples
        Whether it shows rows of side outputs, such as dead letters.

    Examples
    --------
    >>> import tempfile
    >>> with serve(tempfile.mkdtemp()) as page:
    ...     page.address.startswith("http://127.0.0.1:")
    True
    """
    if not flows:
        raise PlanError("serve needs a flow.", hint="Pass what flow.write returned, or the path of a checkpoint.")
    checkpoints = [os.fspath(getattr(flow, "checkpoint", flow)) for flow in flows]
    return open_page(checkpoints, host=host, port=port, names=names, examples=examples)
