"""The live page's server, asked over a real socket as a browser or an attacker would ask."""

import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dovetail as dt
from dovetail.core.errors import PlanError
from dovetail.storage.running import running
from dovetail.storage.stop_request import StopRequest, stop_request
from dovetail.testing.checkpoints import WrittenFlow
from dovetail.web.serving import Page, open_page

HOSTILE = "<script>alert(1)</script>"


@pytest.fixture
def flow(tmp_path: Path) -> WrittenFlow:
    written = WrittenFlow(tmp_path / "checkpoint", "orders")
    written.start(side=str(tmp_path / "dead-letters"))
    written.run(20)
    return written


@pytest.fixture
def page(flow: WrittenFlow) -> Iterator[Page]:
    with open_page([str(flow.checkpoint)], port=0) as served:
        yield served


class Answer:
    def __init__(self, status: int, headers: Any, body: bytes) -> None:
        self.status, self.headers, self.body = status, headers, body

    @property
    def document(self) -> Any:
        return json.loads(self.body)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


def ask(page: Page, path: str, data: bytes | None = None, token: bool = True, **headers: str) -> Answer:
    address = urlsplit(page.address)
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    if token:
        given.setdefault("Authorization", f"Bearer {address.query.removeprefix('token=')}")
    request = urllib.request.Request(f"http://127.0.0.1:{page.port}{path}", data, given)
    try:
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=20) as answer:
            return Answer(answer.status, answer.headers, answer.read())
    except urllib.error.HTTPError as error:
        return Answer(error.code, error.headers, error.read())


def flow_id(page: Page) -> str:
    return str(ask(page, "/api/flows").document["flows"][0]["id"])


PATHS = [
    "/",
    "/assets/app.js",
    "/api/flows",
    "/api/flows/x",
    "/api/flows/x/changes",
    "/api/flows/x/examples",
    "/nothing",
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "headers", [{}, {"Authorization": "Bearer wrong"}, {"Cookie": "dovetail_1=x"}, {"Cookie": "\x01="}]
)
def test_without_the_token_there_is_no_data(page: Page, path: str, headers: dict[str, str]) -> None:
    answer = ask(page, path, token=False, **headers)
    assert (answer.status, b"orders" in answer.body) == (401, False)
    assert ask(page, f"{path}?token=wrong", token=False).status == 401


def test_stop_without_the_token_changes_nothing(page: Page, flow: WrittenFlow) -> None:
    with running(flow.checkpoint):
        address = f"/api/flows/{flow_id(page)}/stop"
        assert ask(page, address, b'{"drain": false}', token=False, Content_Type="application/json").status == 401
        assert stop_request(flow.checkpoint) is None


def test_token_of_the_address_becomes_a_cookie_and_leaves_the_address(page: Page) -> None:
    query = urlsplit(page.address).query
    answer = ask(page, f"/?{query}&x=1", token=False)
    assert (answer.status, answer.headers["location"]) == (303, "/?x=1")
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert ask(page, "/api/flows", token=False, Cookie=cookie.partition(";")[0]).status == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "[", "169.254.169.254"]
)
def test_other_host_is_refused_even_with_the_token(page: Page, host: str) -> None:
    assert ask(page, "/api/flows", Host=host).status == 421


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::1]"])
def test_loopback_has_several_names(page: Page, host: str) -> None:
    assert ask(page, "/api/flows", Host=f"{host}:{page.port}").status == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:1", "https://localhost"])
def test_other_origin_is_refused_even_with_the_token(page: Page, origin: str) -> None:
    assert ask(page, "/api/flows", Origin=origin).status == 403


def test_own_origin_may_ask_and_a_request_from_another_site_may_not_change(page: Page, flow: WrittenFlow) -> None:
    own = f"http://127.0.0.1:{page.port}"
    assert ask(page, "/api/flows", Origin=own).status == 200
    address = f"/api/flows/{flow_id(page)}/stop"
    answer = ask(page, address, b"{}", Content_Type="application/json", Sec_Fetch_Site="cross-site")
    assert answer.status == 403


def test_answers_forbid_scripts_frames_and_caches(page: Page) -> None:
    headers = ask(page, "/").headers
    assert "script-src 'self'" in headers["content-security-policy"]
    assert "unsafe" not in headers["content-security-policy"]
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert headers.get_all("cache-control") == ["no-store"]
    assert "server" not in headers


def test_page_asks_nobody_else(page: Page) -> None:
    for path in ("/", "/assets/app.js", "/assets/charts.js", "/assets/app.css", "/assets/icon.svg"):
        answer = ask(page, path)
        assert answer.status == 200
        text = answer.body.decode().replace("http://www.w3.org/2000/svg", "")
        assert "http:" not in text
        assert "https:" not in text
        assert "innerHTML" not in text
    assert ask(page, "/assets/../reading.py").status == 404
    assert ask(page, "/assets/reading.py").status == 404


def test_view_of_a_flow_and_of_none(page: Page) -> None:
    listed = ask(page, "/api/flows").document["flows"]
    assert [(one["flow"], one["batch"]) for one in listed] == [("orders", 19)]
    view = ask(page, f"/api/flows/{listed[0]['id']}").document
    assert (view["batch"], len(view["series"]["in"]), view["shows_examples"]) == (19, 20, False)
    missing = ask(page, "/api/flows/nothing")
    assert (missing.status, missing.document["error"]["class"]) == (404, "StateError")


def test_changes_are_sent_as_they_happen(page: Page, flow: WrittenFlow) -> None:
    identity, seen, changed = flow_id(page), [], threading.Event()
    token = urlsplit(page.address).query.removeprefix("token=")
    request = urllib.request.Request(
        f"http://127.0.0.1:{page.port}/api/flows/{identity}/changes", headers={"Authorization": f"Bearer {token}"}
    )
    with urllib.request.urlopen(request, timeout=60) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        while len(seen) < 2:
            line = stream.readline().decode()
            if line.startswith("data: "):
                seen.append(json.loads(line[6:])["batch"])
                if not changed.is_set():
                    flow.run(1)
                    changed.set()
    assert seen == [19, 20]


@pytest.mark.parametrize("drain", [False, True])
def test_stop_and_drain_are_asked_of_the_process_that_runs_the_flow(page: Page, flow: WrittenFlow, drain: bool) -> None:
    address = f"/api/flows/{flow_id(page)}/stop"
    body = json.dumps({"drain": drain}).encode()
    assert ask(page, address, body, Content_Type="application/json").status == 409
    with running(flow.checkpoint):
        answer = ask(page, address, body, Content_Type="application/json")
        assert answer.status == 202
        assert stop_request(flow.checkpoint) == StopRequest(drain, 600.0)
        assert ask(page, "/api/flows").document["flows"][0]["state"] == "stopping"


@pytest.mark.parametrize(
    ("body", "kind", "status"),
    [
        (b"{", "application/json", 400),
        (b'{"drain": 1}', "application/json", 400),
        (b'{"drain": true}', "text/plain", 415),
        (b"", "application/x-www-form-urlencoded", 415),
    ],
)
def test_malformed_request_stops_nothing(page: Page, flow: WrittenFlow, body: bytes, kind: str, status: int) -> None:
    with running(flow.checkpoint):
        assert ask(page, f"/api/flows/{flow_id(page)}/stop", body, Content_Type=kind).status == status
        assert ask(page, f"/api/flows/{flow_id(page)}/stop").status == 405
        assert stop_request(flow.checkpoint) is None


def test_rows_are_shown_only_if_the_page_was_started_for_it(page: Page, flow: WrittenFlow, tmp_path: Path) -> None:
    (tmp_path / "dead-letters").mkdir()
    rows = pa.table({"malformed": [HOSTILE, None], "n": ["x" * 1_000, "y"]})
    pq.write_table(rows, tmp_path / "dead-letters" / "part-0.parquet")
    refused = ask(page, f"/api/flows/{flow_id(page)}/examples")
    assert (refused.status, HOSTILE.encode() in refused.body) == (404, False)
    with open_page([str(flow.checkpoint)], port=0, examples=True) as open_for_rows:
        (side,) = ask(open_for_rows, f"/api/flows/{flow_id(open_for_rows)}/examples").document["side"]
        assert side["rows"] == [{"malformed": HOSTILE, "n": "x" * 300 + "…"}, {"malformed": None, "n": "y"}]
        (tmp_path / "dead-letters" / "part-1.parquet").write_bytes(b"not parquet")
        (side,) = ask(open_for_rows, f"/api/flows/{flow_id(open_for_rows)}/examples").document["side"]
        assert side["rows"] == []
        assert side["problem"].startswith("ArrowInvalid")


def test_two_pages_on_one_flow_have_tokens_of_their_own(page: Page, flow: WrittenFlow) -> None:
    with open_page([str(flow.checkpoint)], port=0) as other:
        assert urlsplit(page.address).query != urlsplit(other.address).query
        token = urlsplit(page.address).query.removeprefix("token=")
        assert ask(other, "/api/flows", Authorization=f"Bearer {token}").status == 401
        assert [ask(one, "/api/flows").status for one in (page, other)] == [200, 200]


def test_port_in_use_is_skipped_by_default_and_refused_if_it_was_named(flow: WrittenFlow) -> None:
    with open_page([str(flow.checkpoint)]) as first, open_page([str(flow.checkpoint)]) as second:
        assert first.port != second.port
        with pytest.raises(PlanError, match=f"Port {first.port} of 127.0.0.1 cannot be used: Address already in use"):
            open_page([str(flow.checkpoint)], port=first.port)


def test_page_listens_on_loopback_only_and_closes(flow: WrittenFlow) -> None:
    with open_page([str(flow.checkpoint)], port=0) as page:
        listening = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        addresses = [fields[1] for fields in listening if fields[1].endswith(f":{page.port:04X}") and fields[3] == "0A"]
        assert addresses == [f"0100007F:{page.port:04X}"]
    with pytest.raises(OSError), socket.create_connection(("127.0.0.1", page.port), timeout=5):
        pass


def test_serve_takes_queries_and_paths_and_shows_its_address_in_a_notebook(flow: WrittenFlow) -> None:
    with dt.serve(flow, str(flow.checkpoint), port=0) as page:
        assert len(ask(page, "/api/flows").document["flows"]) == 1
        assert page.address in repr(page)
        assert f'href="{page.address}"' in page._repr_html_()
    with pytest.raises(PlanError, match="needs a flow"):
        dt.serve()


def test_further_host_name_is_accepted(flow: WrittenFlow) -> None:
    with open_page([str(flow.checkpoint)], port=0, names=["Flows.Example"]) as page:
        assert page.address.startswith("http://flows.example:")
        assert ask(page, "/api/flows", Host="flows.example").status == 200
        assert ask(page, "/api/flows", Host="other.example").status == 421
