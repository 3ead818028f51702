"""The options that tell a program how to reach etcd, the same for every program. No gRPC here."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path

from everstep.protocol.secret_file import read_secret
from everstep.protocol.store_settings import StoreSettings, tls_of, user_of

PASSWORD_VARIABLE = "EVERSTEP_ETCD_PASSWORD"
"""Environment variable that holds the password when no file does. Command lines are for all to see."""


def add_store_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--etcd``, ``--root`` and those for a user and TLS."""
    group = parser.add_argument_group("etcd")
    group.add_argument("--etcd", required=True, metavar="HOST:PORT[,HOST:PORT...]", help="endpoints of etcd")
    group.add_argument("--root", default="/everstep", help="the cluster's prefix of all keys")
    group.add_argument("--etcd-username", metavar="NAME", help="user; the password comes from the file or variable")
    group.add_argument(
        "--etcd-password-file", type=Path, metavar="FILE", help=f"mode 0600; without it {PASSWORD_VARIABLE} is read"
    )
    group.add_argument("--etcd-ca-file", metavar="FILE", help="who must have signed etcd's certificate; asks for TLS")
    group.add_argument("--etcd-cert-file", metavar="FILE", help="our certificate, where etcd wants one")
    group.add_argument("--etcd-key-file", metavar="FILE", help="the key of our certificate")


def store_settings_of(
    options: argparse.Namespace, *, call_timeout_s: float = 3.0, environment: Mapping[str, str] = os.environ
) -> StoreSettings:
    """Settings from the parsed options; raises ValueError that names the option at fault."""
    endpoints = tuple(options.etcd.split(","))
    for endpoint in endpoints:
        host, _, port = endpoint.rpartition(":")
        if not host or "/" in host or not port.isdecimal():
            raise ValueError(f"--etcd: {endpoint!r} is not HOST:PORT")
    password = None
    if options.etcd_password_file is not None:
        password = read_secret(options.etcd_password_file, "--etcd-password-file")
    elif options.etcd_username is not None:
        password = environment.get(PASSWORD_VARIABLE)
        if password is None:
            raise ValueError(f"--etcd-username: give --etcd-password-file or set {PASSWORD_VARIABLE}")
    settings = StoreSettings(
        endpoints,
        root=options.root,
        call_timeout_s=call_timeout_s,
        username=options.etcd_username,
        password=password,
        ca_file=options.etcd_ca_file,
        cert_file=options.etcd_cert_file,
        key_file=options.etcd_key_file,
    )
    try:
        user_of(settings)
        tls_of(settings)
    except ValueError as error:
        raise ValueError(f"etcd: {error}") from error
    return settings
