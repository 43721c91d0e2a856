"""The live page as an ASGI application: the files of the page, views of flows, a stream of changes, stop and drain."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Sequence
from importlib import resources
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from dovetail.core.errors import DovetailError, StateError
from dovetail.storage.stop_request import ask_to_stop
from dovetail.web.letters import examples_of
from dovetail.web.reading import FlowReader

__all__ = ["Flows", "page_app"]

_ASSETS = ("index.html", "app.js", "charts.js", "app.css", "icon.svg")
_TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
_POLL_SECONDS = 0.5
_SILENT_SECONDS = 15.0
_DRAIN_SECONDS = 600.0


class Flows:
    """The flows of a page, read by one thread at a time however many browsers look at them."""

    def __init__(self, checkpoints: Sequence[str], shows_examples: bool) -> None:
        self.readers = {reader.id: reader for reader in map(FlowReader, checkpoints)}
        self.shows_examples = shows_examples
        self._guard = threading.Lock()
        self._views: dict[str, tuple[int, dict[str, Any]]] = {}

    def reader(self, identity: str) -> FlowReader:
        if identity not in self.readers:
            raise StateError("This page has no such flow.", hint="Go back to the list of flows.")
        return self.readers[identity]

    def summaries(self) -> list[dict[str, Any]]:
        """All flows in a few words, those that run first."""
        with self._guard:
            for reader in self.readers.values():
                reader.refresh()
            found = [reader.summary() for reader in self.readers.values()]
        return sorted(found, key=lambda one: (one["running"] is None, one["flow"]))

    def view(self, identity: str) -> tuple[int, dict[str, Any]]:
        """A flow in full, and a number that grows whenever it changes."""
        reader = self.reader(identity)
        with self._guard:
            reader.refresh()
            known = self._views.get(identity)
            if known is None or known[0] != reader.changes:
                known = reader.changes, {**reader.view(), "shows_examples": self.shows_examples}
                self._views[identity] = known
            return known

    def examples(self, identity: str) -> list[dict[str, Any]]:
        """Some of the rows that went to side outputs, if the page was started to show them."""
        reader = self.reader(identity)
        if not self.shows_examples:
            raise StateError("This page does not show rows.", hint="Start it with --examples, or examples=True.")
        with self._guard:
            reader.refresh()
            nodes = [node for node in reader.picture["nodes"] if node["kind"] == "side"]
        return [examples_of(node) for node in nodes]

    def stop(self, identity: str, drain: bool) -> None:
        """Ask the process that runs the flow to stop it."""
        ask_to_stop(self.reader(identity).checkpoint, drain, _DRAIN_SECONDS)


def page_app(flows: Flows, closing: threading.Event) -> Starlette:
    """The application; `dovetail.web.guard` decides who may use it. Streams end when ``closing`` is set."""

    async def asset(request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        if name not in _ASSETS:
            return Response("There is no such file.", 404, media_type="text/plain")
        data = resources.files("dovetail.web").joinpath("assets", name).read_bytes()
        return Response(data, media_type=_TYPES[name.rpartition(".")[2]])

    async def listed(request: Request) -> Response:
        return JSONResponse({"flows": await run_in_threadpool(flows.summaries)})

    async def viewed(request: Request) -> Response:
        number, view = await run_in_threadpool(flows.view, request.path_params["id"])
        return JSONResponse({"change": number, **view})

    async def examples(request: Request) -> Response:
        return JSONResponse({"side": await run_in_threadpool(flows.examples, request.path_params["id"])})

    async def changes(request: Request) -> Response:
        identity = request.path_params["id"]
        flows.reader(identity)
        stream = _changes(flows, identity, closing)
        return StreamingResponse(stream, media_type="text/event-stream")

    async def stop(request: Request) -> Response:
        if request.headers.get("content-type", "").partition(";")[0] != "application/json":
            return JSONResponse({"error": {"class": "PlanError", "message": "Send JSON.", "hint": None}}, 415)
        try:
            drain = (await request.json())["drain"]
        except (ValueError, KeyError, TypeError):
            drain = None
        if not isinstance(drain, bool):
            error = {"class": "PlanError", "message": 'Send {"drain": true} or false.', "hint": None}
            return JSONResponse({"error": error}, 400)
        await run_in_threadpool(flows.stop, request.path_params["id"], drain)
        return JSONResponse({"asked": "drain" if drain else "stop"}, 202)

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, DovetailError)
        document = {"class": type(error).__name__, "message": error.message, "hint": error.hint}
        return JSONResponse({"error": document}, 409 if request.method == "POST" else 404)

    return Starlette(
        routes=[
            Route("/", asset),
            Route("/assets/{name}", asset),
            Route("/api/flows", listed),
            Route("/api/flows/{id}", viewed),
            Route("/api/flows/{id}/changes", changes),
            Route("/api/flows/{id}/examples", examples),
            Route("/api/flows/{id}/stop", stop, methods=["POST"]),
        ],
        exception_handlers={DovetailError: refused},
    )


async def _changes(flows: Flows, identity: str, closing: threading.Event) -> AsyncIterator[str]:
    """Server-sent events: the view whenever it has changed, and a comment now and then so that nobody hangs up."""
    seen, silent_s = -1, 0.0
    while not closing.is_set():
        number, view = await run_in_threadpool(flows.view, identity)
        if number != seen:
            seen, silent_s = number, 0.0
            yield f"id: {number}\nevent: view\ndata: {json.dumps(view)}\n\n"
        elif silent_s >= _SILENT_SECONDS:
            silent_s = 0.0
            yield ": nothing new\n\n"
        await asyncio.sleep(_POLL_SECONDS)
        silent_s += _POLL_SECONDS
