"""How a connection is made: reach the server, log in, choose the database, say who we are."""

from __future__ import annotations

import socket
from functools import partial

from asynchicache.backends.redis.connection import Connection
from asynchicache.backends.redis.options import RedisOptions
from asynchicache.backends.redis.resp import ErrorReply, command
from asynchicache.backends.redis.sender import Sender
from asynchicache.backends.redis.wires import Wire, connect_socket, connect_tls, try_addresses
from asynchicache.errors import StorageError
from asynchicache.ports import Port

CLIENT_NAME = b"asynchicache"


async def dial(options: RedisOptions, port: Port, sender: Sender) -> Connection:
    """A connection that is logged in.

    Raises:
        OSError: the server cannot be reached.
        StorageError: it does not let us in; says why.
    """
    connection = Connection(await _connect(options, port, sender))
    try:
        await _log_in(connection, options)
    except BaseException:
        connection.close()
        raise
    return connection


async def _connect(options: RedisOptions, port: Port, sender: Sender) -> Wire:
    server = options.server
    if server.path:
        return await connect_socket(socket.AF_UNIX, server.path, sender)
    if server.tls:
        return await connect_tls(server.host, server.port, options.ca_file, sender)
    look_up = partial(socket.getaddrinfo, server.host, server.port, type=socket.SOCK_STREAM)
    found = await port.run_blocking(look_up)
    return await try_addresses([(family, address) for family, _, _, _, address in found], sender)


async def _log_in(connection: Connection, options: RedisOptions) -> None:
    commands = [command(b"SELECT", b"%d" % options.database), command(b"CLIENT", b"SETNAME", CLIENT_NAME)]
    if options.password is not None:
        words = (options.username, options.password) if options.username else (options.password,)
        commands.insert(0, command(b"AUTH", *(word.encode() for word in words)))
    *replies, _ = await connection.ask(*commands)  # a server that forbids names is none the worse
    for reply in replies:
        if isinstance(reply, ErrorReply):
            raise StorageError(f"{options.server} does not let us in: {reply.text}")
