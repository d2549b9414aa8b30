"""Client of the metadata service: calls with a deadline, retried only if that is safe."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

import msgspec

from asynchicache.backends.hf3fs.metadata import messages as m
from asynchicache.errors import ConfigError, StorageError, StorageFormatError
from asynchicache.failure_log import FailureLog
from asynchicache.ports import Port

if TYPE_CHECKING:
    import httpx

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer", bound=m.MetadataMessage)

_FIRST_PAUSE = 0.05
_NO_ANSWER = (msgspec.MsgspecError, UnicodeDecodeError)
"""What decoding raises of a stranger's words."""
_START = "start one: python -m asynchicache.backends.hf3fs.metadata --dir DIR"


class UnansweredError(StorageError):
    """Raised when a call gets no answer, or one that is not from this service."""


class MetadataClient:
    """Connections to one service, for any number of namespaces.

    Args:
        url: `http://host:port`.
        port: randomness of the pauses between attempts.
        seconds: deadline of a call, all attempts together.
        attempts: maximum attempts of a repeatable call when the connection fails.

    Raises:
        ConfigError: the URL is invalid.
        StorageError: the HTTP client is not installed.
    """

    def __init__(self, url: str, port: Port, *, seconds: float = 5.0, attempts: int = 3) -> None:
        self.url = _checked_url(url)
        self._port = port
        self._seconds = seconds
        self._attempts = attempts
        self._http = _http_client(self.url, seconds)
        self._failures = FailureLog(logger)

    async def open(self, name: str, slots: int, frame_bytes: int) -> m.Opened:
        """
        Raises:
            StorageFormatError: the namespace has frames of another size.
            StorageError: the service does not answer, or refuses.
        """
        try:
            return await self.call("/v1/open", m.Open(name, slots, frame_bytes), m.Opened)
        except UnansweredError as error:
            raise StorageError(f"no metadata service for hf3fs at {self.url}: {error}; {_START}") from error

    async def call(
        self, path: str, message: m.MetadataMessage, answer: type[Answer], *, repeat: bool = True
    ) -> Answer:
        """
        Args:
            path: path of the call.
            message: the message to send.
            answer: type of the expected answer.
            repeat: whether to send the call again if it is unknown whether it arrived.

        Raises:
            StorageError: the service does not answer, refuses, or sends an invalid answer.
        """
        body = msgspec.json.encode(message)
        try:
            async with asyncio.timeout(self._seconds):
                return await self._attempt(path, body, answer, self._attempts if repeat else 1)
        except TimeoutError:
            raise UnansweredError(f"{path}: no answer in {self._seconds} s") from None

    async def aclose(self) -> None:
        """Close the connections. Idempotent."""
        await self._http.aclose()

    async def _attempt(self, path: str, body: bytes, answer: type[Answer], attempts: int) -> Answer:
        import httpx

        pause = _FIRST_PAUSE
        while True:
            attempts -= 1
            try:
                return _understood(await self._http.post(path, content=body), answer)
            except httpx.RequestError as error:
                if attempts < 1:
                    raise UnansweredError(f"{path}: {error!r}") from error
                message, level = "%s%s: %r; trying again", logging.INFO
                self._failures.warning(type(error), message, self.url, path, error, level=level)
            await asyncio.sleep(pause * (0.5 + self._port.random.random()))
            pause *= 2


class MetadataNamespace:
    """One pool's pages in the service.

    Args:
        client: the service.
        opened: the service's answer when the namespace was opened.
        name: name of the namespace.
        frame_bytes: size of one slot.
    """

    def __init__(self, client: MetadataClient, opened: m.Opened, name: str, frame_bytes: int) -> None:
        self.name = name
        self.slots = opened.slots
        self.lease_seconds = opened.lease_seconds
        self._client = client
        self._frame_bytes = frame_bytes
        self._path = f"/v1/namespaces/{opened.handle}"
        self._finished: list[int] = []

    async def exists(self, keys: Sequence[str]) -> list[bool]:
        """Whether each page exists.

        Raises:
            StorageError: the service does not answer, or sends an invalid answer. All calls raise it.
        """
        found = await self._client.call(
            f"{self._path}/exists", m.Ask(list(keys), self._ended_reads()), m.Present
        )
        return _one_each(found.present, keys)

    async def locate(self, keys: Sequence[str]) -> m.Located:
        """Locate pages, with a read lease on their slots until `end_read`."""
        located = await self._client.call(
            f"{self._path}/locate", m.Ask(list(keys), self._ended_reads()), m.Located
        )
        _one_each(located.places, keys)
        await self._check_range(located.places)
        return located

    def end_read(self, located: m.Located) -> None:
        """End a read. The next call reports it to the service."""
        if located.lease and len(self._finished) < m.MAX_KEYS:
            self._finished.append(located.lease)

    async def reserve(self, token: str, keys: Sequence[str]) -> m.Reserved:
        """Reserve a slot for each key that does not exist, while there is room. Safe to repeat."""
        reserved = await self._client.call(
            f"{self._path}/reserve", m.Reserve(token, list(keys), self._ended_reads()), m.Reserved
        )
        _one_each(reserved.existed, keys)
        places = [place.slot for place in _one_each(reserved.places, keys) if place is not None]
        if len(set(places)) != len(places):
            raise StorageError(f"{self.name}: one slot was reserved for two pages")
        await self._check_range(reserved.places)
        return reserved

    async def confirm(self, claims: Sequence[m.Claim]) -> list[m.Verdict]:
        """Make written pages visible. Safe to repeat."""
        confirmed = await self._client.call(f"{self._path}/confirm", m.Confirm(list(claims)), m.Confirmed)
        return _one_each(confirmed.verdicts, claims)

    async def release(self, places: Sequence[m.SlotVersion]) -> None:
        """Release slots that were reserved but not written. Safe to repeat."""
        await self._client.call(f"{self._path}/release", m.Release(list(places)), m.Counted)

    async def forget(self, claims: Sequence[m.Claim]) -> list[bool]:
        """Drop damaged pages. Not repeated, because the second answer would differ."""
        dropped = await self._client.call(
            f"{self._path}/forget", m.Forget(list(claims)), m.Dropped, repeat=False
        )
        return _one_each(dropped.dropped, claims)

    async def delete(self, keys: Sequence[str]) -> list[bool]:
        """Drop pages by name. Not repeated, because it could drop a page that was stored again in between."""
        dropped = await self._client.call(
            f"{self._path}/delete", m.Ask(list(keys), self._ended_reads()), m.Dropped, repeat=False
        )
        return _one_each(dropped.dropped, keys)

    async def touch(self, keys: Sequence[str]) -> None:
        """Count pages as used now, the last one most recently. Safe to repeat."""
        await self._client.call(f"{self._path}/touch", m.Ask(list(keys), self._ended_reads()), m.Counted)

    async def clear(self) -> int:
        """Drop every page of this namespace; return their number."""
        return (await self._client.call(f"{self._path}/clear", m.Clear(), m.Counted, repeat=False)).count

    def _ended_reads(self) -> list[int]:
        """Take the ended reads. They are sent once; if the call fails, the service lets the leases expire."""
        finished, self._finished = self._finished, []
        return finished

    async def _check_range(self, places: Sequence[m.SlotVersion | None]) -> None:
        highest = max((place.slot for place in places if place is not None), default=-1)
        if highest >= self.slots:  # another client has enlarged the namespace
            self.slots = (await self._client.open(self.name, self.slots, self._frame_bytes)).slots
        if highest >= self.slots:
            raise StorageError(f"{self.name}: slot {highest} of {self.slots}")


Item = TypeVar("Item")


def _one_each(answers: list[Item], keys: Sequence[object]) -> list[Item]:
    if len(answers) != len(keys):
        raise StorageError(f"{len(answers)} answers for {len(keys)} keys")
    return answers


def _understood(response: httpx.Response, answer: type[Answer]) -> Answer:
    if response.status_code == 200:
        try:
            return msgspec.json.decode(response.content, type=answer)
        except _NO_ANSWER as error:
            raise UnansweredError(f"{response.url}: this is no metadata service of hf3fs: {error}") from error
    try:
        words = msgspec.json.decode(response.content, type=m.Refusal).error
    except _NO_ANSWER as error:
        raise UnansweredError(f"{response.url}: status {response.status_code}") from error
    kind = StorageFormatError if response.status_code == 409 else StorageError
    raise kind(f"{response.url}: {words}")


def _checked_url(url: str) -> str:
    try:
        parts = urlsplit(url)
        good = (
            parts.scheme in ("http", "https") and parts.hostname and parts.port and not parts.path.strip("/")
        )
    except ValueError:  # the port is not a number
        good = False
    if not good:
        raise ConfigError(f"storage backend 'hf3fs': option metadata={url!r} must be http://host:port")
    return url.rstrip("/")


def _http_client(url: str, seconds: float) -> httpx.AsyncClient:
    try:
        import httpx
    except ImportError as error:
        raise StorageError("storage 'hf3fs' needs httpx: pip install 'asynchicache[hf3fs]'") from error
    # For plain HTTP, skip loading certificates, which takes as long as a hundred calls.
    secure = url.startswith("https")
    context = ssl.create_default_context() if secure else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    return httpx.AsyncClient(base_url=url, verify=context, timeout=seconds, trust_env=False)
