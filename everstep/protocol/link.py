"""The door of a node agent: framed JSON over TCP, opened by a shared token. The client's side and the framing.

A frame is a 4-byte big-endian length, a JSON object of that length, and, when the object has ``payload_bytes``, that
many raw bytes. The first frame of a connection is ``{"op": "hello", "token": ...}``; the agent answers with its name
and incarnation, or says what is wrong and closes.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import ssl
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from everstep.protocol.secret_file import read_secret

MAX_HEADER_BYTES = 64 * 1024
MAX_PAYLOAD_BYTES = 64 * 1024 * 1024
MIN_TOKEN_LENGTH = 16


class LinkError(Exception):
    """The other side is there but will not talk to us: wrong token, or not a frame of ours."""


class Verdict(Enum):
    """What a probe of an agent found."""

    ALIVE = "alive"
    REFUSED = "refused"
    """Nothing listens at that address any more: the agent is dead."""
    SILENT = "silent"
    """No answer in time: dead, frozen or cut off; the lease will tell."""


@dataclass(frozen=True)
class Frame:
    """One message and the raw bytes that came with it."""

    header: dict[str, Any]
    payload: bytes = b""


def read_token(path: Path) -> str:
    """The shared token. Raises ValueError when the file is missing, open to others, or the token is too short."""
    token = read_secret(path, "token file")
    if len(token) < MIN_TOKEN_LENGTH:
        raise ValueError(f"token file {path}: the token has fewer than {MIN_TOKEN_LENGTH} characters")
    return token


def same_token(ours: str, theirs: object) -> bool:
    """Compare in a time that does not depend on where the two differ."""
    return isinstance(theirs, str) and hmac.compare_digest(ours.encode(), theirs.encode())


async def read_frame(reader: asyncio.StreamReader, *, max_payload_bytes: int = MAX_PAYLOAD_BYTES) -> Frame | None:
    """The next frame; None at end of file. Raises LinkError for what is not a frame or is too large."""
    try:
        length = int.from_bytes(await reader.readexactly(4), "big")
        if length > MAX_HEADER_BYTES:
            raise LinkError(f"a frame header of {length} bytes is above the limit of {MAX_HEADER_BYTES}")
        header = _parse(await reader.readexactly(length))
        size = header.get("payload_bytes", 0)
        if not isinstance(size, int) or not 0 <= size <= max_payload_bytes:
            raise LinkError(f"a payload of {size} bytes is above the limit of {max_payload_bytes}")
        return Frame(header, await reader.readexactly(size))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


async def write_frame(writer: asyncio.StreamWriter, header: dict[str, Any], payload: bytes = b"") -> None:
    """Send one frame. Raises ConnectionError."""
    if payload:
        header = {**header, "payload_bytes": len(payload)}
    data = json.dumps(header).encode()
    writer.write(len(data).to_bytes(4, "big") + data + payload)
    await writer.drain()


async def probe(
    host: str,
    port: int,
    token: str,
    timeout_s: float,
    *,
    incarnation: str | None = None,
    ssl_context: ssl.SSLContext | None = None,
) -> Verdict:
    """Is an agent alive at this address? Answers within ``timeout_s``.

    With ``incarnation`` another incarnation at the address counts as REFUSED: the one that was asked for is dead.
    Raises LinkError when it refuses the token.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while True:
                try:
                    _, writer, answer = await _open(host, port, token, ssl_context)
                except ConnectionRefusedError:
                    return Verdict.REFUSED
                except OSError:
                    # Reset or no route: an agent in the middle of dying refuses a moment later.
                    await asyncio.sleep(0.01)
                    continue
                writer.close()
                same = incarnation is None or answer.get("incarnation") == incarnation
                return Verdict.ALIVE if same else Verdict.REFUSED
    return Verdict.SILENT


async def hold(
    host: str, port: int, token: str, *, timeout_s: float = 2.0, ssl_context: ssl.SSLContext | None = None
) -> None:
    """Connect, then return when the agent closes the line: it has ended (``probe`` tells whether it is dead).

    Raises OSError (TimeoutError too) when no connection comes about within ``timeout_s``, LinkError when it refuses us.
    """
    async with asyncio.timeout(timeout_s):
        reader, writer, _ = await _open(host, port, token, ssl_context)
    try:
        while await read_frame(reader, max_payload_bytes=0) is not None:
            pass
    finally:
        writer.close()


async def _open(
    host: str, port: int, token: str, ssl_context: ssl.SSLContext | None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, dict[str, Any]]:
    reader, writer = await asyncio.open_connection(host, port, ssl=ssl_context)
    try:
        await write_frame(writer, {"op": "hello", "token": token})
        frame = await read_frame(reader, max_payload_bytes=0)
        if frame is None:
            raise ConnectionResetError(f"{host}:{port} closed the connection")
        if not frame.header.get("ok"):
            raise LinkError(f"{host}:{port}: {frame.header.get('error')}")
    except BaseException:
        writer.close()
        raise
    return reader, writer, frame.header


def _parse(data: bytes) -> dict[str, Any]:
    try:
        header = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise LinkError("a frame header is not JSON") from error
    if not isinstance(header, dict):
        raise LinkError("a frame header is not a JSON object")
    return header
