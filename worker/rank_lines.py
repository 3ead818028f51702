"""The agent's end of its ranks' lines: who calls is checked, messages are handed on, pings and stop requests go out."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from pathlib import Path

import structlog
from pydantic import ValidationError

from engine.planning.messages import CheckpointCommitted, Hello, Ping, SaveFailed, StopRequest, from_rank
from everstep.protocol.messages import CheckpointRecord
from worker.local_rank import LocalRank

_PING_S = 0.5
_LINE_LIMIT = 1 << 20
_UNREAD_LIMIT = 64 * 1024
_FORK_ANSWER_S = 5.0

Name = tuple[str, int, int]

log = structlog.get_logger()


class RankLines:
    """A unix socket server. ``beat`` is called when a rank has news, ``committed`` when a checkpoint was published,
    ``save_failed`` with the job when a save failed.
    """

    def __init__(
        self,
        path: Path,
        beat: Callable[[], None],
        committed: Callable[[CheckpointRecord], None],
        save_failed: Callable[[str, SaveFailed], None],
        now: Callable[[], float],
    ) -> None:
        self._path = path
        self._beat = beat
        self._committed = committed
        self._save_failed = save_failed
        self._now = now
        self._expected: dict[Name, LocalRank] = {}
        self._writers: dict[Name, asyncio.StreamWriter] = {}
        self._stops: dict[Name, StopRequest] = {}
        self._server: asyncio.Server

    async def start(self) -> None:
        """Listen; the socket is for this user alone."""
        self._path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(self._path))
        # Nobody can connect before listen(), so there is no moment at which others could.
        self._path.chmod(0o600)
        self._server = await asyncio.start_unix_server(self._serve, sock=listener, limit=_LINE_LIMIT)

    def close(self) -> None:
        """Stop listening and hang up; ranks that are still there end themselves."""
        self._server.close()
        for writer in self._writers.values():
            writer.close()

    def expect(self, rank: LocalRank) -> None:
        """This rank may call from now on."""
        self._expected[_name(rank)] = rank

    def forget(self, rank: LocalRank) -> None:
        """This rank is gone."""
        self._expected.pop(_name(rank), None)
        self._stops.pop(_name(rank), None)

    def ask_to_stop(self, rank: LocalRank, request: StopRequest) -> None:
        """Send ``request`` now, or as soon as the rank calls."""
        self._stops[_name(rank)] = request
        if (writer := self._writers.get(_name(rank))) is not None:
            _send(writer, request)

    async def keep_pinging(self) -> None:
        """Tell every rank, for ever, that the agent is alive."""
        while True:
            for writer in self._writers.values():
                _send(writer, Ping())
            await asyncio.sleep(_PING_S)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            rank = await self._admit(reader, writer)
            if rank is not None:
                name = _name(rank)
                rank.line = asyncio.current_task()
                self._writers[name] = writer
                if (request := self._stops.get(name)) is not None:
                    _send(writer, request)
                try:
                    await self._listen(rank, reader)
                finally:
                    del self._writers[name]
        except (ValidationError, ValueError) as error:
            log.error("a rank sent what is not a message", error=str(error))
        except ConnectionError:
            pass
        finally:
            writer.close()

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> LocalRank | None:
        hello = from_rank.validate_json(await reader.readline())
        if not isinstance(hello, Hello):
            log.warning("a caller did not say hello first")
            return None
        rank = self._expected.get((hello.job, hello.generation, hello.rank))
        if rank is None:
            log.warning("an unknown rank called", **hello.model_dump(exclude={"kind"}))
            return None
        # The rank may be faster than the warm parent's word on its pid.
        async with asyncio.timeout(_FORK_ANSWER_S):
            await rank.forked.wait()
        if _peer_pid(writer) != rank.pid:
            log.warning("a stranger called under a rank's name", **hello.model_dump(exclude={"kind"}))
            return None
        return rank

    async def _listen(self, rank: LocalRank, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            message = from_rank.validate_json(line)
            if isinstance(message, CheckpointCommitted):
                self._committed(CheckpointRecord(job=rank.job, at=self._now(), **message.model_dump(exclude={"kind"})))
            elif isinstance(message, SaveFailed):
                self._save_failed(rank.job, message)
            elif rank.take(message, self._now()):
                self._beat()


def _send(writer: asyncio.StreamWriter, message: Ping | StopRequest) -> None:
    # A stopped rank does not read; pings that it has not read yet serve it as well as new ones.
    if isinstance(message, StopRequest) or writer.transport.get_write_buffer_size() < _UNREAD_LIMIT:
        writer.write(message.model_dump_json().encode() + b"\n")


def _peer_pid(writer: asyncio.StreamWriter) -> int:
    credentials = writer.get_extra_info("socket").getsockopt(
        socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
    )
    return int(struct.unpack("3i", credentials)[0])


def _name(rank: LocalRank) -> Name:
    return rank.job, rank.generation, rank.rank
