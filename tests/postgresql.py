"""A PostgreSQL server of the tests' own."""

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


def _binaries() -> Path | None:
    folders = [Path(found).resolve().parent for found in [shutil.which("pg_ctl")] if found]
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((folder for folder in folders if (folder / "initdb").exists() and (folder / "pg_ctl").exists()), None)


@contextlib.contextmanager
def server(address: str = "127.0.0.1") -> Iterator[str]:
    """The URL of a fresh, empty database; skips the test where PostgreSQL's server is not installed.

    Args:
        address: Where it listens; whoever reaches it may log in.
    """
    binaries = _binaries()
    if binaries is None:
        pytest.skip("PostgreSQL's server is not installed (Debian: apt-get install postgresql)")
    as_user = {}
    if os.getuid() == 0:  # the server refuses to run as root
        import pwd

        try:
            pwd.getpwnam("postgres")
        except KeyError:
            pytest.skip("PostgreSQL refuses to run as root, and there is no user postgres")
        as_user = {"user": "postgres", "group": "postgres", "extra_groups": []}
    folder = Path(tempfile.mkdtemp(prefix="sfumato-postgresql-"))  # pytest's own folders admit nobody else
    if as_user:
        shutil.chown(folder, "postgres", "postgres")
    with socket.socket() as free:
        free.bind((address, 0))
        port = free.getsockname()[1]

    def run(*command: str) -> None:
        subprocess.run(
            [str(binaries / command[0]), *command[1:]], check=True, cwd=folder, stdout=subprocess.DEVNULL, **as_user
        )

    data = str(folder / "data")
    run("initdb", "-D", data, "-U", "tester", "--auth=trust", "--no-sync")
    with (folder / "data" / "pg_hba.conf").open("a", encoding="ascii") as rules:
        rules.write("host all all samenet trust\n")
    run(
        "pg_ctl",
        "-D",
        data,
        "-w",
        "-l",
        str(folder / "log"),
        "-o",
        f"-p {port} -c listen_addresses={address} -k {folder}",
        "start",
    )
    try:
        yield f"postgresql://tester@{address}:{port}/postgres"
    finally:
        run("pg_ctl", "-D", data, "-m", "immediate", "stop")
        shutil.rmtree(folder)
