"""A TCP proxy that tests cut, freeze, strand and heal: a network fault between two programs that both stay alive."""

from __future__ import annotations

import asyncio
import contextlib


class TcpProxy:
    """Forwards connections from a loopback port of its own to ``target`` (HOST:PORT)."""

    def __init__(self, target: str) -> None:
        self._host, port = target.rsplit(":", 1)
        self._port = int(port)
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._stranded: set[asyncio.StreamWriter] = set()
        self._passing = asyncio.Event()
        self._passing.set()
        self._cut = False

    async def __aenter__(self) -> TcpProxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()

    @property
    def endpoint(self) -> str:
        """HOST:PORT to connect to instead of the target."""
        assert self._server is not None
        host, port = self._server.sockets[0].getsockname()
        return f"{host}:{port}"

    def cut(self) -> None:
        """Reset all connections and refuse new ones."""
        self._cut = True
        for writer in self._writers:
            writer.transport.abort()

    def freeze(self) -> None:
        """Let connections stand, but pass nothing on."""
        self._passing.clear()

    def strand(self) -> None:
        """Swallow for ever whatever comes over the connections that stand now; new ones pass."""
        self._stranded |= self._writers

    def heal(self) -> None:
        """Everything passes again."""
        self._cut = False
        self._passing.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._cut:
            writer.transport.abort()
            return
        self._writers.add(writer)
        try:
            far_reader, far_writer = await asyncio.open_connection(self._host, self._port)
        except OSError:
            writer.transport.abort()
            return
        self._writers.add(far_writer)
        try:
            await asyncio.gather(self._pump(reader, far_writer), self._pump(far_reader, writer))
        finally:
            self._writers -= {writer, far_writer}

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                await self._passing.wait()
                if writer in self._stranded:
                    continue
                writer.write(data)
                await writer.drain()
        writer.close()
