"""How a connection is made: reach the server, log in, choose the database, tell it our name."""

from __future__ import annotations

import socket
from functools import partial

from asynchicache.backends.redis.connection import RedisConnection, SocketAddress
from asynchicache.backends.redis.options import RedisOptions, ServerAddress
from asynchicache.backends.redis.resp import ErrorReply, command
from asynchicache.errors import StorageError
from asynchicache.ports import Port

CLIENT_NAME = b"asynchicache"


async def look_up(server: ServerAddress, port: Port) -> list[SocketAddress]:
    """The addresses of a server. A caller that is cancelled does not wait for the name service.

    Raises:
        OSError: its name is unknown.
    """
    if server.path:
        return [SocketAddress(socket.AF_UNIX, server.path)]
    ask = partial(socket.getaddrinfo, server.host, server.port, type=socket.SOCK_STREAM)
    return [SocketAddress(family, address) for family, _, _, _, address in await port.run_blocking(ask)]


def dial(connection: RedisConnection, options: RedisOptions, addresses: list[SocketAddress]) -> None:
    """Connect and log in; this blocks.

    Raises:
        OSError: the server cannot be reached.
        StorageError: it refuses the login; says why.
    """
    connection.connect(addresses)
    if options.server.tls:
        connection.start_tls(options.server.host, options.ca_file)
    commands = [command(b"CLIENT", b"SETNAME", CLIENT_NAME)]
    if options.database:  # users whose rights do not cover it can use the first one
        commands.insert(0, command(b"SELECT", b"%d" % options.database))
    if options.password is not None:
        words = (options.username, options.password) if options.username else (options.password,)
        commands.insert(0, command(b"AUTH", *(word.encode() for word in words)))
    *replies, _ = connection.ask(*commands)  # a server may forbid names: that does no harm
    for reply in replies:
        if isinstance(reply, ErrorReply):
            raise StorageError(f"{options.server} does not let us in: {reply.text}")
