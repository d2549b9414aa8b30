"""Which servers there are, and which of them has a key: one, the nodes of a cluster, or the master that
Sentinels name. redis-py finds out; all methods that ask servers block.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from redis import Redis, RedisCluster
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode
from redis.connection import AbstractConnection, ConnectionPool
from redis.exceptions import ConnectionError as LostError
from redis.exceptions import MovedError, RedisClusterException, RedisError, ResponseError
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError, Sentinel

from asynchicache.backends.redis.options import RedisOptions
from asynchicache.backends.redis.wire import ErrorReply
from asynchicache.errors import StorageError

logger = logging.getLogger(__name__)

CLIENT_NAME = "asynchicache"


class KeyShare(NamedTuple):
    """The part of a call that goes to one server.

    Attributes:
        places: numbers of keys in the call.
        asking: the server is receiving these keys from another node.
    """

    server: ConnectionPool
    places: Sequence[int]
    asking: bool = False


class Servers:
    """The servers behind a URL, as far as they are known. Any thread may use it; only one at a time may call
    `open` and `renew`."""

    def __init__(self, options: RedisOptions) -> None:
        self._options = options
        self._home: Redis | RedisCluster | None = None  # what the URL names
        self._client: Redis | RedisCluster | None = None  # or the master that it sent us to

    def open(self) -> None:
        """Find out what the URL names.

        Raises:
            StorageError: it is a Sentinel, and option `service` is missing, or the other way round; a cluster
                that has another database than 0, or several servers that are none.
            RedisError, RedisClusterException: as of redis-py.
        """
        if self._client is None:
            self._home = self._client = self._found()

    def split(self, names: Sequence[bytes], places: Sequence[int]) -> list[KeyShare]:
        """The servers that have these keys.

        Raises:
            StorageError: the cluster has no node for a key.
        """
        client = self._client
        if not isinstance(client, RedisCluster):
            return [KeyShare(_pool(client), places)] if places else []
        shares: defaultdict[ConnectionPool, list[int]] = defaultdict(list)
        try:
            for place in places:
                shares[_pool_of(client, client.get_node_from_key(names[place]))].append(place)
        except RedisClusterException as error:
            raise StorageError(f"{self._options.server}: {error}") from error
        return [KeyShare(server, found) for server, found in shares.items()]

    def all(self) -> list[ConnectionPool]:
        """Every server that takes writes."""
        client = self._client
        if isinstance(client, RedisCluster):
            return [_pool_of(client, node) for node in client.get_primaries()]
        return [_pool(client)]

    def redirected(self, redirects: Mapping[int, ErrorReply], names: Sequence[bytes]) -> list[KeyShare]:
        """Where keys are that a node of the cluster does not have, as it said."""
        client = self._client
        if not isinstance(client, RedisCluster):
            return []
        moved, asked = [], []
        for place, reply in redirects.items():
            told = MovedError(reply.text.partition(" ")[2])
            if reply.code == "MOVED":
                client.nodes_manager.move_slot(told)
                moved.append(place)
            elif node := client.get_node(told.host, told.port):
                asked.append(KeyShare(_pool_of(client, node), [place], asking=True))
        return [*self.split(names, moved), *asked]

    def renew(self, *, replica: bool) -> bool:
        """Ask anew who is there, after a server was lost, or has become a replica.

        Returns:
            Whether another attempt may reach another server.
        """
        client = self._client
        if isinstance(client, RedisCluster):
            self._renew_cluster(client)
            return True
        if self._options.service is not None:
            return True  # who connects asks the Sentinels
        master = self._master_of(client) if replica and client is not None else None
        if master is not None:
            logger.warning("%s is a replica now: pages go to its master", self._options.server)
            self._client = master
        elif client is self._home:
            return False
        else:
            self._client = self._home
        return True

    def close(self) -> None:
        for client in {self._client, self._home}:
            if client is not None:
                client.close()

    def _found(self) -> Redis | RedisCluster:
        where = self._options.server
        if self._options.service is not None:
            return self._watched(self._options.service)
        with self._first_that_answers() as probe:
            mode = _mode_of(probe)
            if mode == "cluster":
                return self._cluster(probe)
            if mode == "sentinel":
                names = ", ".join(sorted(map(str, probe.sentinel_masters())))
                raise StorageError(
                    f"{where} is a Sentinel: option service says whose master it shall name "
                    f"(it watches {names or 'none'})"
                )
        if len(where.hosts) > 1:
            raise StorageError(
                f"{where}: these are single servers: give one, or option service if they are Sentinels"
            )
        return self._single(self._addresses()[0])

    def _first_that_answers(self) -> Redis:
        *others, last = self._addresses()
        for address in others:
            probe = self._single(address, database=0)
            with suppress(LostError):
                probe.connection_pool.get_connection()
                return probe
        return self._single(last, database=0)

    def _addresses(self) -> list[dict[str, Any]]:
        hosts = [{"host": host, "port": port} for host, port in self._options.server.hosts]
        return hosts or [{"unix_socket_path": self._options.server.path}]

    def _single(self, address: Mapping[str, Any], database: int | None = None) -> Redis:
        connecting = self._connecting()
        return Redis(**address, **(connecting if database is None else connecting | {"db": database}))

    def _connecting(self) -> dict[str, Any]:
        own = {"retry": Retry(NoBackoff(), 0), "redis_connect_func": _introduce, "driver_info": None}
        return {**self._options.connecting(), **own, "db": self._options.server.database}

    def _cluster(self, probed: Redis) -> RedisCluster:
        where = self._options.server
        if where.database or not where.hosts:
            raise StorageError(f"{where} is a node of a cluster: give its host and port, and database 0")
        if not probed.execute_command("CLUSTER", "SLOTS"):  # redis-py hides why a user may not
            raise StorageError(f"{where} is a node of a cluster that has no slots yet")
        return self._new_cluster()

    def _new_cluster(self) -> RedisCluster:
        return RedisCluster(
            startup_nodes=[ClusterNode(host, port) for host, port in self._options.server.hosts],
            retry=Retry(NoBackoff(), 0),
            require_full_coverage=False,
            redis_connect_func=_tell_name,
            driver_info=None,
            **self._options.connecting(),
        )

    def _renew_cluster(self, client: RedisCluster) -> None:
        try:
            client.nodes_manager.initialize()
        except (RedisError, RedisClusterException):  # none of those that were there: perhaps all have moved
            with suppress(RedisError, RedisClusterException):
                self._client = self._new_cluster()

    def _watched(self, service: str) -> Redis:
        sentinels = Sentinel(
            self._options.server.hosts,
            sentinel_kwargs={
                **self._options.connecting_to_sentinels(),
                "retry": Retry(NoBackoff(), 0),
                "driver_info": None,
            },
            **self._connecting(),
        )
        try:
            sentinels.discover_master(service)
        except ResponseError as error:
            raise StorageError(
                f"{self._options.server} is no Sentinel, so option service={service!r} means nothing: {error}"
            ) from error
        except MasterNotFoundError as error:
            for each in sentinels.sentinels:  # who cannot be asked says why: redis-py does not
                each.ping()
            raise StorageError(f"{self._options.server}: Sentinels know no master {service!r}") from error
        client: Redis = sentinels.master_for(service)
        return client

    def _master_of(self, client: Redis) -> Redis | None:
        """The master of a server that has become a replica, if it answers. Not all users may ask."""
        with suppress(RedisError, TypeError, ValueError):
            role, host, port, *_ = client.execute_command("ROLE")
            if role == b"slave":
                master = self._single({"host": host.decode(), "port": int(port)})
                if master.execute_command("ROLE")[0] == b"master":
                    return master
        return None


def _mode_of(probe: Redis) -> str:
    """What a server is: standalone, cluster or sentinel. Every user may say HELLO; not all may ask INFO."""
    try:
        told = probe.execute_command("HELLO", 2)
    except ResponseError:  # older than Redis 6
        with suppress(ResponseError):
            return str(probe.info("server").get("redis_mode", ""))
        return ""
    facts = dict(zip(told[::2], told[1::2], strict=False)) if isinstance(told, list) else {}
    return str(facts.get(b"mode", b"").decode())


def _pool(client: Redis | RedisCluster | None) -> ConnectionPool:
    if not isinstance(client, Redis):
        raise StorageError("no server is known")
    pool: ConnectionPool = client.connection_pool
    return pool


def _pool_of(client: RedisCluster, node: ClusterNode) -> ConnectionPool:
    return _pool(client.get_redis_connection(node))


def _introduce(connection: AbstractConnection) -> None:
    connection.on_connect()
    _tell_name(connection)


def _tell_name(connection: AbstractConnection) -> None:
    """Tell the server our name. It may forbid that, which does no harm."""
    with suppress(ResponseError):
        connection.send_command("CLIENT", "SETNAME", CLIENT_NAME)
        connection.read_response()
