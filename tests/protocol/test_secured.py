"""Etcd with users and passwords, and etcd behind TLS with client certificates."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from etcd3aio._protobuf import AuthEnableRequest, AuthUserAddRequest, AuthUserGrantRoleRequest

from everstep.protocol.etcd_server import PrivateEtcd, find_etcd
from everstep.protocol.ports import free_port
from everstep.protocol.processes import spawn, terminate
from everstep.protocol.store import Snapshot, Store, StoreError, StoreSettings, StoreUnavailable
from tests.coroutines import in_event_loop, until


async def enable_passwords(endpoint: str) -> None:
    admin = (await Store.connect(StoreSettings((endpoint,))))._connection
    for name in ("root", "plain"):
        await admin.call(lambda e: e.auth.UserAdd, AuthUserAddRequest(name=name, password="secret"))
    await admin.call(lambda e: e.auth.UserGrantRole, AuthUserGrantRoleRequest(user="root", role="root"))
    await admin.call(lambda e: e.auth.AuthEnable, AuthEnableRequest())
    await admin.close()


@in_event_loop
async def test_user_and_password(breakable_etcd: PrivateEtcd) -> None:
    await enable_passwords(breakable_etcd.endpoint)
    endpoints = (breakable_etcd.endpoint,)
    store = await Store.connect(StoreSettings(endpoints, call_timeout_s=1.0, username="root", password="secret"))
    lease = await store.lease(2)
    await store.put("/a/x", b"1", lease=lease.id)
    watch = store.watch("/a/")
    first = await anext(watch)
    assert isinstance(first, Snapshot)
    assert [item.value for item in first.items] == [b"1"]
    change = asyncio.ensure_future(anext(watch))

    # The tokens are gone after a restart, the users are not.
    breakable_etcd.process.kill()
    breakable_etcd.process.wait()
    breakable_etcd.start()

    async def put() -> bool:
        try:
            await store.put("/a/x", b"2", lease=lease.id)
        except StoreUnavailable:
            return False
        return True

    await until(put, 5.0)
    told = await asyncio.wait_for(change, 5.0)
    assert told.key == "/a/x"
    await asyncio.sleep(2.5)
    assert await store.get("/a/x") is not None  # so the lease is being kept

    for user, password, said in ((None, None, "user name is empty"), ("root", "wrong", "authentication failed")):
        stranger = await Store.connect(StoreSettings(endpoints, username=user, password=password))
        with pytest.raises(StoreError, match=said) as refused:
            await stranger.get("/a/x")
        assert not isinstance(refused.value, StoreUnavailable)
        await stranger.close()
    plain = await Store.connect(StoreSettings(endpoints, username="plain", password="secret"))
    with pytest.raises(StoreError, match="permission denied"):
        await plain.put("/a/x", b"3")
    with pytest.raises(StoreError, match="permission denied"):
        await anext(plain.watch("/a/"))
    await plain.close()
    await lease.close()
    await watch.aclose()  # type: ignore[attr-defined]
    await store.close()


def certificates(directory: Path) -> None:
    """ca.pem, a server's and a client's certificate (server.pem, client.pem) with their keys."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=directory, check=True, capture_output=True)

    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl("req", "-x509", *curve, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=test", "-days", "2")
    (directory / "names").write_text("subjectAltName=IP:127.0.0.1\n")
    for name in ("server", "client"):
        openssl("req", *curve, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        signed_by = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "names")
        openssl("x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.pem", *signed_by)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")
def test_tls_with_client_certificates(tmp_path: Path) -> None:
    certificates(tmp_path)
    port, peer = free_port(), f"http://127.0.0.1:{free_port()}"
    url = f"https://127.0.0.1:{port}"
    settings = {
        "data-dir": tmp_path / "data",
        "listen-client-urls": url,
        "advertise-client-urls": url,
        "listen-peer-urls": peer,
        "initial-advertise-peer-urls": peer,
        "initial-cluster": f"default={peer}",
        "cert-file": tmp_path / "server.pem",
        "key-file": tmp_path / "server.key",
        "trusted-ca-file": tmp_path / "ca.pem",
        "client-cert-auth": "true",
    }
    command = [str(find_etcd()), *(f"--{name}={value}" for name, value in settings.items())]
    server = spawn(command, log_path=tmp_path / "etcd.log")

    @in_event_loop
    async def talk() -> None:
        files = {
            "ca_file": str(tmp_path / "ca.pem"),
            "cert_file": str(tmp_path / "client.pem"),
            "key_file": str(tmp_path / "client.key"),
        }
        address = f"127.0.0.1:{port}"
        store = await Store.connect(StoreSettings((address,), **files))

        async def put() -> bool:
            try:
                await store.put("/a", b"1")
            except StoreUnavailable:
                return False
            return True

        await until(put, 20.0)
        snapshot = await anext(store.watch("/a"))
        assert isinstance(snapshot, Snapshot)
        assert [item.value for item in snapshot.items] == [b"1"]
        await store.close()
        for refused in (
            StoreSettings((address,)),  # no TLS
            StoreSettings((address,), ca_file=files["ca_file"]),  # no certificate of its own
            StoreSettings((address,), **{**files, "ca_file": files["cert_file"]}),  # does not trust this server
        ):
            stranger = await Store.connect(refused)
            began = time.monotonic()
            with pytest.raises(StoreUnavailable):
                await stranger.get("/a")
            assert time.monotonic() - began < 4.0
            await stranger.close()

    try:
        talk()
    finally:
        terminate(server, 1.0)
