"""Servers on this machine that answer, do not, answer slowly, go away, or are none."""

import socket
import ssl
import threading
from contextlib import suppress
from itertools import islice
from pathlib import Path
from time import sleep

import pytest

from latfit.errors import BadInput, WrongUsage
from latfit.metrics.server import Reading, Server, Unanswered
from tests.stand_in import one_after_another, serving, steady

STEPS = steady(10.0, 4, 0.02)


def test_readings_come_one_after_another_and_failures_between_them() -> None:
    texts = [STEPS.text(1.0), "", STEPS.text(2.0)]
    with serving(one_after_another(texts)) as url:
        found = list(islice(Server(url).readings(0.05, 600.0), 3))
    assert [type(each) for each in found] == [Reading, Unanswered, Reading]
    assert str(found[1]) == "answers 503 Service Unavailable"
    first, last = found[0], found[2]
    assert isinstance(first, Reading)
    assert isinstance(last, Reading)
    assert last.t_s - first.t_s > 0.05
    assert last.text == texts[2].encode()


def test_trtllm_serve_publishes_at_another_place() -> None:
    def answer(path: str) -> tuple[int, bytes]:
        return (200, b"[]") if path == "/metrics" else (200, b"trtllm_num_requests_running 3\n")

    with serving(answer) as url:
        assert Server(url.removeprefix("http://")).first().state.running == 3


def test_settings_that_a_server_tells() -> None:
    pages = {"/get_server_info": '{"internal_states": [{"max_running_requests": 48}], "chunked_prefill_size": 4096}'}
    with serving(one_after_another([], pages)) as url:
        assert Server(url).settings() == {"max_num_seqs": 48, "max_num_batched_tokens": 4096}
    beyond = dict.fromkeys(pages, f'{{"max_num_seqs": {"9" * 400}}}')
    for answers in ({}, beyond):
        with serving(one_after_another([], answers)) as url:
            assert Server(url).settings() == {}


def test_a_server_that_answers_too_slowly_is_not_waited_for() -> None:
    def answer(path: str) -> tuple[int, bytes]:
        sleep(0.5)
        return 200, b"x"

    with serving(answer) as url, pytest.raises(BadInput, match=r"does not answer within 0.1 s"):
        Server(url, timeout_s=0.1).first()


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_server_that_drips_is_not_waited_for(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte of the body comes in time, the whole does not."""
    certificate = Path(__file__).parents[2] / "stand_in.pem"
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    stopped = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def drip() -> None:
            connection, _ = listening.accept()
            if scheme == "https":
                context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
                context.load_cert_chain(certificate)
                connection = context.wrap_socket(connection, server_side=True)
            with connection, suppress(OSError):
                connection.recv(1000)
                connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n")
                while not stopped.wait(0.05):
                    connection.sendall(b"1")

        thread = threading.Thread(target=drip)
        thread.start()
        port = listening.getsockname()[1]
        with pytest.raises(BadInput, match=r"does not answer within 0.4 s"):
            Server(f"{scheme}://localhost:{port}/metrics", timeout_s=0.4).first()
        stopped.set()
        thread.join()


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_are_not_followed(status: int) -> None:
    asked: list[str] = []

    def elsewhere(path: str) -> tuple[int, bytes]:
        asked.append(path)
        return 200, STEPS.text(1.0).encode()

    with (
        serving(elsewhere) as other,
        serving(lambda path: (status, b""), {"Location": f"{other}/metrics"}) as url,
    ):
        server = Server(url)
        with pytest.raises(BadInput, match=f"answers {status} "):
            server.first()
        assert server.settings() == {}
    assert asked == []


def test_what_is_no_server_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    with pytest.raises(BadInput, match=r"cannot be reached .*refused"):
        Server(f"127.0.0.1:{port}").first()
    with (
        serving(lambda path: (200, b"<html></html>")) as url,
        pytest.raises(BadInput, match="holds no metrics of vLLM"),
    ):
        Server(url).first()


@pytest.mark.parametrize(
    "url", ["", "file:///etc/passwd", "ftp://host", "http://", "http://host:99999", "http://host:x", "me:mine@host:1"]
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(WrongUsage, match="no address of a server") as error:
        Server(url)
    assert "mine" not in error.value.found
