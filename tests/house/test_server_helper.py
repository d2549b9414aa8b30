"""The helper that starts engines' servers: they are ready when it says so, and never outlive the tests."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from engines import Server, executable, free_ports, module

TESTS = Path(__file__).parents[1]

ECHO = """
import socket, sys
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
print("serving at last", flush=True)
while True:
    client, _ = server.accept()
    with client:
        client.sendall(client.recv(100))
"""

ORPHAN = """
import os, signal, sys
from engines import Server
server = Server([sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"], ready="up")
server.start()
print(server.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def echo_server() -> tuple[Server, int]:
    (port,) = free_ports(1)
    return Server([sys.executable, "-c", ECHO, str(port)], ready="serving at last"), port


def echoes(port: int) -> bool:
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(b"hello")
        return client.recv(100) == b"hello"


def test_a_server_is_ready_killed_and_back_on_the_same_port() -> None:
    server, port = echo_server()
    with server:
        assert echoes(port)
        first = server.pid

        server.kill()
        assert not server.running
        with pytest.raises(ConnectionRefusedError):
            echoes(port)

        server.start()
        assert echoes(port)
        assert server.pid != first
    assert not server.running


def test_a_server_ends_with_its_block_whatever_happens() -> None:
    server, _ = echo_server()
    with pytest.raises(ZeroDivisionError), server:
        raise ZeroDivisionError

    assert not server.running


def test_a_server_that_dies_before_it_is_ready_tells_why() -> None:
    server = Server([sys.executable, "-c", "raise SystemExit('the port is taken')"], ready="never")

    with pytest.raises(RuntimeError, match="the port is taken"):
        server.start()


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux to see a process end that is no child")
def test_a_server_dies_with_the_process_that_started_it() -> None:
    executable("setpriv")
    child = subprocess.Popen(
        [sys.executable, "-c", ORPHAN], env=os.environ | {"PYTHONPATH": str(TESTS)}, stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    with child.stdout:
        pid = int(child.stdout.readline())
    assert child.wait() == -signal.SIGKILL

    assert ended(pid)


def ended(pid: int) -> bool:
    """Whether the process ends, or has ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [])[0])
    finally:
        os.close(descriptor)


def test_free_ports_are_different() -> None:
    assert len(set(free_ports(50))) == 50


def test_what_is_missing_skips_with_a_reason() -> None:
    with pytest.raises(pytest.skip.Exception, match="no_such_server is not installed; scripts/"):
        executable("no_such_server")
    with pytest.raises(pytest.skip.Exception, match="no_such_client cannot be imported"):
        module("no_such_client")
