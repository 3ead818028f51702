"""The agent's door: token, verdicts, limits."""

from __future__ import annotations

import asyncio
import socket
import time
from pathlib import Path

import pytest

from everstep.protocol.link import LinkError, Verdict, hold, probe, read_frame, read_token, write_frame
from tests.coroutines import in_event_loop
from worker.endpoint import Endpoint

TOKEN = "the right token of this test"


@in_event_loop
async def test_alive_refused_and_other_incarnation() -> None:
    endpoint = Endpoint("a", "first", TOKEN)
    port = await endpoint.start("127.0.0.1")
    assert await probe("127.0.0.1", port, TOKEN, 1.0) is Verdict.ALIVE
    assert await probe("127.0.0.1", port, TOKEN, 1.0, incarnation="first") is Verdict.ALIVE
    assert await probe("127.0.0.1", port, TOKEN, 1.0, incarnation="second") is Verdict.REFUSED
    await endpoint.close()
    assert await probe("127.0.0.1", port, TOKEN, 1.0) is Verdict.REFUSED


@in_event_loop
async def test_listens_on_the_given_address_alone() -> None:
    endpoint = Endpoint("a", "first", TOKEN)
    port = await endpoint.start("127.0.0.1")
    assert await probe("127.0.0.2", port, TOKEN, 1.0) is Verdict.REFUSED
    await endpoint.close()


@in_event_loop
async def test_listener_that_says_nothing_is_silent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        began = time.monotonic()
        assert await probe("127.0.0.1", listener.getsockname()[1], TOKEN, 0.2) is Verdict.SILENT
        assert time.monotonic() - began < 0.5


@in_event_loop
async def test_wrong_token_is_refused_and_closed() -> None:
    endpoint = Endpoint("a", "first", TOKEN)
    port = await endpoint.start("127.0.0.1")
    for wrong in ("", TOKEN[:-1], TOKEN + "x"):
        with pytest.raises(LinkError, match="wrong token"):
            await probe("127.0.0.1", port, wrong, 1.0)
    for first in ({"op": "ping"}, {"op": "hello"}, {"op": "hello", "token": 7}):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        await write_frame(writer, first)
        answer = await read_frame(reader)
        assert answer is not None and answer.header["ok"] is False
        assert await read_frame(reader) is None
        writer.close()
    await endpoint.close()


@pytest.mark.parametrize(
    "data",
    [
        (1 << 31).to_bytes(4, "big"),
        (5).to_bytes(4, "big") + b"hello",
        (2).to_bytes(4, "big") + b"[]",
        (18).to_bytes(4, "big") + b'{"payload_bytes":1}'[:18],
        (20).to_bytes(4, "big") + b'{"payload_bytes":-1}',
        (19).to_bytes(4, "big") + b'{"payload_bytes":9}' + b"123456789",
    ],
)
@in_event_loop
async def test_what_is_no_frame_is_closed(data: bytes) -> None:
    endpoint = Endpoint("a", "first", TOKEN)
    port = await endpoint.start("127.0.0.1")
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    assert await asyncio.wait_for(reader.read(), 1.0) == b""
    writer.close()
    assert await probe("127.0.0.1", port, TOKEN, 1.0) is Verdict.ALIVE
    await endpoint.close()


@in_event_loop
async def test_ping_and_unknown_op() -> None:
    endpoint = Endpoint("a", "first", TOKEN)
    port = await endpoint.start("127.0.0.1")
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answers = []
    for header in ({"op": "hello", "token": TOKEN}, {"op": "ping"}, {"op": "dance"}):
        await write_frame(writer, header)
        frame = await read_frame(reader)
        assert frame is not None
        answers.append(frame.header)
    assert answers == [
        {"ok": True, "node": "a", "incarnation": "first"},
        {"ok": True},
        {"ok": False, "error": "unknown op 'dance'"},
    ]
    await write_frame(writer, {"op": "ping"}, b"bytes that nobody asked for")
    assert await read_frame(reader) is None
    writer.close()
    await endpoint.close()


@in_event_loop
async def test_holder_hears_of_the_end() -> None:
    endpoint = Endpoint("a", "first", TOKEN)
    port = await endpoint.start("127.0.0.1")
    holder = asyncio.create_task(hold("127.0.0.1", port, TOKEN))
    done, _ = await asyncio.wait({holder}, timeout=0.2)
    assert not done
    await endpoint.close()
    await asyncio.wait_for(holder, 1.0)
    with pytest.raises(ConnectionRefusedError):
        await hold("127.0.0.1", port, TOKEN)


def test_token_file_must_be_private_and_long_enough(tmp_path: Path) -> None:
    path = tmp_path / "token"
    with pytest.raises(ValueError, match="No such file"):
        read_token(path)
    path.write_text(f"{TOKEN}\n")
    path.chmod(0o640)
    with pytest.raises(ValueError, match="others may read it"):
        read_token(path)
    path.chmod(0o600)
    assert read_token(path) == TOKEN
    path.write_text("short")
    with pytest.raises(ValueError, match="fewer than 16"):
        read_token(path)
