"""``python -m controller``: one process, one event loop, one HTTP server."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ipaddress
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import uvicorn

from controller.app import create_app
from controller.auth import read_api_token
from controller.decide import Policy
from controller.detect import Patience
from controller.service import Controller, Settings
from everstep.protocol.keys import Keys
from everstep.protocol.link import read_token
from everstep.protocol.store import Store, StoreError, StoreSettings
from everstep.protocol.store_options import add_store_options, store_settings_of

CALL_TIMEOUT_S = 1.5


class Server(uvicorn.Server):
    """Says when it serves; leaves signals to ``serve``, which has more to end than the HTTP server."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, then tell."""
        await super().startup(sockets)
        self._on_ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


def parse_args(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m controller", description="Everstep's controller.")
    add_store_options(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at")
    parser.add_argument("--port", type=int, default=8500, help="port to listen at; 0 takes any free one")
    parser.add_argument("--data-root", required=True, type=Path, help="all paths of job specs lie below it")
    parser.add_argument("--token-file", required=True, type=Path, help="token of the links to node agents")
    parser.add_argument("--api-token-file", type=Path, help="bearer token that callers of the API must show")
    parser.add_argument("--lease-ttl", type=int, default=2, help="seconds after which a silent leader is replaced")
    parser.add_argument("--settle-s", type=float, default=5.0, help="no growth so soon after the last change")
    parser.add_argument("--ready-file", type=Path, help="written when serving: {url, pid} as JSON")
    parser.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    return parser.parse_args(arguments)


def settings_of(options: argparse.Namespace) -> Settings:
    """Settings from the command line; raises ValueError that names what is wrong."""
    if not options.data_root.is_dir():
        raise ValueError(f"--data-root {options.data_root} is not a directory")
    if options.lease_ttl < 1:
        raise ValueError(f"--lease-ttl must be at least 1, not {options.lease_ttl}")
    return Settings(
        data_root=options.data_root.resolve(),
        agent_token=read_token(options.token_file),
        lease_ttl_s=options.lease_ttl,
        api_token=read_api_token(options.api_token_file) if options.api_token_file else None,
        policy=Policy(settle_s=options.settle_s, patience=Patience(listing_s=options.lease_ttl + 1.0)),
    )


async def serve(
    options: argparse.Namespace, settings: Settings, store_settings: StoreSettings, listener: socket.socket
) -> None:
    """Run until SIGTERM or SIGINT; the failure of any part is raised."""
    store = await Store.connect(store_settings)
    controller = Controller(store, Keys(store_settings.root), settings)
    server = Server(
        uvicorn.Config(create_app(controller), log_level="warning", lifespan="off", ws="none"),
        lambda: tell_ready(options.ready_file, listener),
    )
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, setattr, server, "should_exit", True)
    try:
        async with asyncio.TaskGroup() as group:
            running = group.create_task(controller.run(), name="controller")
            await server.serve(sockets=[listener])
            running.cancel()
    finally:
        await store.close()


def tell_ready(ready_file: Path | None, listener: socket.socket) -> None:
    """Log where the API is, and write it to ``ready_file`` in one go."""
    host, port = listener.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    logging.getLogger(__name__).info("serving at %s", url)
    if ready_file is not None:
        aside = ready_file.with_name(ready_file.name + ".new")
        aside.write_text(json.dumps({"url": url, "pid": os.getpid()}))
        aside.replace(ready_file)


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def _texts(error: BaseException) -> list[str]:
    if isinstance(error, BaseExceptionGroup):
        return [text for part in error.exceptions for text in _texts(part)]
    return [str(error)]


def main(arguments: list[str]) -> int:
    """Run the controller; returns the exit code."""
    options = parse_args(arguments)
    logging.basicConfig(
        level=options.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    try:
        settings = settings_of(options)
        store_settings = store_settings_of(options, call_timeout_s=CALL_TIMEOUT_S)
        listener = socket.create_server((options.host, options.port), backlog=1024)
    except (ValueError, OSError) as error:
        print(f"controller: {error}", file=sys.stderr)
        return 2
    if settings.api_token is None and not _is_loopback(listener.getsockname()[0]):
        logging.getLogger(__name__).warning("whoever reaches %s may use the API: no --api-token-file", options.host)
    refusals: list[str] = []
    try:
        asyncio.run(serve(options, settings, store_settings, listener))
    except* StoreError as refused:
        refusals = _texts(refused)
    for refusal in refusals:
        print(f"controller: etcd refuses: {refusal}", file=sys.stderr)
    return 1 if refusals else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
