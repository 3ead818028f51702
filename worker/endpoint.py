"""The agent's door for controller and peers: a TCP server that opens to the shared token alone."""

from __future__ import annotations

import asyncio
import contextlib
import ssl

import structlog

from everstep.protocol.link import Frame, LinkError, read_frame, same_token, write_frame

_HELLO_TIMEOUT_S = 3.0
_MAX_CONNECTIONS = 512

log = structlog.get_logger()


class Endpoint:
    """Answers ``hello`` and ``ping``. A connection that stays open tells its holder of the agent's death at once."""

    def __init__(self, node: str, incarnation: str, token: str) -> None:
        self._node = node
        self._incarnation = incarnation
        self._token = token
        self._server: asyncio.Server
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self, host: str, ssl_context: ssl.SSLContext | None = None) -> int:
        """Listen on a free port of ``host``; returns the port."""
        self._server = await asyncio.start_server(self._serve, host, 0, ssl=ssl_context)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Stop listening and hang up on everybody."""
        self._server.close()
        for writer in self._writers:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._writers) >= _MAX_CONNECTIONS:
            writer.close()
            return
        self._writers.add(writer)
        try:
            if await self._admit(reader, writer):
                while (frame := await read_frame(reader, max_payload_bytes=0)) is not None:
                    await self._answer(frame, writer)
        except LinkError as error:
            log.warning("closed a connection", peer=writer.get_extra_info("peername"), error=str(error))
        except ConnectionError:
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_HELLO_TIMEOUT_S):
                hello = await read_frame(reader, max_payload_bytes=0)
                if hello is None:
                    return False
                if hello.header.get("op") == "hello" and same_token(self._token, hello.header.get("token")):
                    await write_frame(writer, {"ok": True, "node": self._node, "incarnation": self._incarnation})
                    return True
                await write_frame(writer, {"ok": False, "error": "wrong token"})
                raise LinkError("wrong token")
        return False

    async def _answer(self, frame: Frame, writer: asyncio.StreamWriter) -> None:
        if frame.header.get("op") == "ping":
            await write_frame(writer, {"ok": True})
        else:
            await write_frame(writer, {"ok": False, "error": f"unknown op {frame.header.get('op')!r}"})
