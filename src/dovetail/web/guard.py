"""Who may see the page: the Host and Origin of a request, and its token.

The page listens on loopback, but so does every web site that the user's browser has open: any of them can send requests
there, and with a name that resolves to 127.0.0.1 it could read the answers. So a request must name a host that the page
was started for, must not come from another origin, and must have the token that only the terminal has shown. A browser
gets it once in the address, and keeps it in a cookie that no script can read and no other site's request carries.
"""

import hmac
from collections.abc import Collection
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs, urlencode, urlsplit

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["Guard"]

_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'none'; base-uri 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
_NO_TOKEN = "This page needs the token of the address that was printed when it was started."


class Guard:
    """ASGI middleware; ``hosts`` are the names under which the page may be asked for, without ports."""

    def __init__(self, app: ASGIApp, token: str, hosts: Collection[str], cookie: str) -> None:
        self._app, self._token, self._hosts, self._cookie = app, token, frozenset(hosts), cookie

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        if refusal is not None:
            await refusal(scope, receive, _with_headers(send))
        else:
            await self._app(scope, receive, _with_headers(send))

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        if _host_name(headers.get("host", "")) not in self._hosts:
            return PlainTextResponse("This host name is not one that the page was started for.", 421)
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != headers.get("host"):
            return PlainTextResponse("Requests of other sites are refused.", 403)
        if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none") and scope["method"] != "GET":
            return PlainTextResponse("Requests of other sites are refused.", 403)
        query = parse_qs(scope["query_string"].decode("latin-1"))
        given = query.pop("token", [""])[0]
        if given and self._is_token(given):
            # Out of the address bar, the history and what is copied from it.
            rest = urlencode(query, doseq=True)
            answer = RedirectResponse(scope["path"] + (f"?{rest}" if rest else ""), 303)
            answer.set_cookie(self._cookie, self._token, httponly=True, samesite="strict", path="/")
            return answer
        bearer = headers.get("authorization", "").removeprefix("Bearer ")
        if self._is_token(bearer) or self._is_token(self._kept(headers)):
            return None
        return PlainTextResponse(_NO_TOKEN, 401)

    def _kept(self, headers: Headers) -> str:
        try:
            morsel = SimpleCookie(headers.get("cookie", "")).get(self._cookie)
        except CookieError:
            return ""
        return "" if morsel is None else morsel.value

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self._token.encode())


def _host_name(host: str) -> str:
    """The name in a Host header, without the port.

    >>> _host_name("localhost:8610"), _host_name("[::1]:8610"), _host_name("")
    ('localhost', '::1', '')
    """
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            kept = [pair for pair in message["headers"] if pair[0].lower() != b"cache-control"]
            extra = [(name.lower().encode(), value.encode()) for name, value in _HEADERS.items()]
            message = {**message, "headers": [*kept, *extra]}
        await send(message)

    return sending
