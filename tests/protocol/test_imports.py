"""Every module imports as it is installed, with no environment variable to help it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
PACKAGES = ("everstep", "engine", "worker", "controller")

IMPORT_ALL = f"""
import importlib, pkgutil
count = 0
for name in {PACKAGES}:
    package = importlib.import_module(name)
    for module in pkgutil.walk_packages(package.__path__, name + "."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
            count += 1
print(count)
"""

TALK_TO_ETCD = """
import asyncio, pathlib, sys
from everstep.protocol.etcd_server import PrivateEtcd
from everstep.protocol.store import Snapshot, Store, StoreSettings
server = PrivateEtcd(pathlib.Path(sys.argv[1]) / "etcd")
server.start()
async def main():
    store = await Store.connect(StoreSettings((server.endpoint,)))
    watch = store.watch("/a/")
    assert isinstance(await anext(watch), Snapshot)
    lease = await store.lease(2)
    await store.put("/a/x", b"1", lease=lease.id)
    assert (await anext(watch)).item.value == b"1"
    await lease.close()
    assert (await anext(watch)).item is None
    assert await store.get("/a/x") is None
    await store.close()
asyncio.run(main())
server.stop()
print("talked")
"""


def clean_run(python: str, code: str, *arguments: str) -> str:
    environment = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    done = subprocess.run(
        [python, "-c", code, *arguments], env=environment, cwd="/", capture_output=True, text=True, timeout=170
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.strip()


def test_the_protocol_needs_no_torch() -> None:
    code = (
        "import importlib, pkgutil, sys, everstep.protocol as p\n"
        "for m in pkgutil.iter_modules(p.__path__, 'everstep.protocol.'): importlib.import_module(m.name)\n"
        "print([name for name in ('torch', 'numpy', 'fastapi') if name in sys.modules])"
    )
    assert clean_run(sys.executable, code) == "[]"


def test_every_module_imports() -> None:
    assert int(clean_run(sys.executable, IMPORT_ALL)) > 20


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("protobuf", ["as declared", "newest"])
def test_a_new_environment_with_what_we_declare(tmp_path: Path, protobuf: str) -> None:
    """Only what ``pyproject.toml`` names, in the newest versions it allows: import all of it, talk to an etcd."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    install = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    source = tmp_path / "source"  # a copy: building leaves things behind
    for name in PACKAGES:
        shutil.copytree(PROJECT / name, source / name)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(PROJECT / name, source / name)
    subprocess.run([*install, str(source)], check=True)
    if protobuf == "newest":
        subprocess.run([*install, "--upgrade", "protobuf"], check=True)
    assert int(clean_run(python, IMPORT_ALL)) > 20
    assert clean_run(python, TALK_TO_ETCD, str(tmp_path)) == "talked"
