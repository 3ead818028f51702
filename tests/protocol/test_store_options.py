"""How programs are told to reach etcd: flags in, settings out, nothing secret on a command line."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from everstep.protocol.store_options import PASSWORD_VARIABLE, add_store_options, store_settings_of
from everstep.protocol.store_settings import StoreSettings


def settings_of(*arguments: str, **environment: str) -> StoreSettings:
    parser = argparse.ArgumentParser()
    add_store_options(parser)
    return store_settings_of(parser.parse_args(arguments), environment=environment)


def secret(path: Path, text: str = "s3cret\n", mode: int = 0o600) -> str:
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_only_endpoints() -> None:
    settings = settings_of("--etcd", "10.0.0.1:2379,[::1]:2380", **{PASSWORD_VARIABLE: "of somebody else"})
    assert settings == StoreSettings(("10.0.0.1:2379", "[::1]:2380"))


def test_a_user_with_a_password_from_a_file_or_the_environment(tmp_path: Path) -> None:
    user = ("--etcd", "e:1", "--root", "/r", "--etcd-username", "me")
    from_file = settings_of(*user, "--etcd-password-file", secret(tmp_path / "password"), **{PASSWORD_VARIABLE: "no"})
    assert from_file == StoreSettings(("e:1",), root="/r", username="me", password="s3cret")
    assert settings_of(*user, **{PASSWORD_VARIABLE: "s3cret"}) == from_file
    assert "s3cret" not in repr(from_file)


def test_tls(tmp_path: Path) -> None:
    ca, cert, key = (secret(tmp_path / name) for name in ("ca", "cert", "key"))
    settings = settings_of("--etcd", "e:1", "--etcd-ca-file", ca, "--etcd-cert-file", cert, "--etcd-key-file", key)
    assert (settings.ca_file, settings.cert_file, settings.key_file) == (ca, cert, key)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--etcd", "localhost"), "--etcd"),
        (("--etcd", "http://localhost:2379"), "--etcd"),
        (("--etcd", "e:1,"), "--etcd"),
        (("--etcd", "e:1", "--etcd-username", "me"), PASSWORD_VARIABLE),
        (("--etcd", "e:1", "--etcd-password-file", "{good}"), "username"),
        (("--etcd", "e:1", "--etcd-username", "me", "--etcd-password-file", "{open}"), "others may read it"),
        (("--etcd", "e:1", "--etcd-username", "me", "--etcd-password-file", "{missing}"), "--etcd-password-file"),
        (("--etcd", "e:1", "--etcd-ca-file", "{missing}"), "ca_file"),
        (("--etcd", "e:1", "--etcd-cert-file", "{good}"), "cert_file"),
        (("--etcd", "e:1", "--etcd-cert-file", "{good}", "--etcd-key-file", "{good}"), "ca_file"),
    ],
)
def test_what_cannot_work_is_named(tmp_path: Path, arguments: tuple[str, ...], named: str) -> None:
    files = {
        "good": secret(tmp_path / "good"),
        "open": secret(tmp_path / "open", mode=0o644),
        "missing": str(tmp_path / "missing"),
    }
    with pytest.raises(ValueError, match=named):
        settings_of(*(argument.format(**files) for argument in arguments))


def test_reading_them_takes_no_grpc() -> None:
    """The agent forks its guardian after this, while it is small and has one thread."""
    code = "import sys, worker.settings; assert not [name for name in sys.modules if name.split('.')[0] == 'grpc']"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
