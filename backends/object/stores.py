"""Create obstore stores, and summarise their errors in one line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import obstore
from obstore.exceptions import (
    BaseError,
    NotSupportedError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnknownConfigurationKeyError,
)
from obstore.store import ObjectStore, from_url

from asynchicache.backends.object.credentials import provider_of
from asynchicache.backends.object.options import ObjectOptions
from asynchicache.errors import ConfigError, StorageError

FAILURES = (BaseError, OSError)
"""What a request raises; `FileNotFoundError`, an OSError, where there is no such object."""

_METADATA = ("169.254.169.254", "latest/api/token", "computemetadata", "metadata/identity", "&resource=")
"""Of the machine's metadata service, which obstore asks for want of credentials, and only clouds have."""
_REFUSED = ("401 unauthorized", "403 forbidden")
"""Of a listing; that of another request has a class of its own."""
_NO_BUCKET = ("nosuchbucket", "containernotfound")
_NO_CREDENTIALS = ("credential", "token request")
_FULL = ("507 insufficient storage", "quotaexceeded", "quota exceeded", "storagefull", "capacityexceeded")
"""Status and codes of S3-compatible servers."""
_BUSY = ("status code: 503", "status code: 429", "slowdown", "serverbusy")
"""Status and codes of stores that ask for fewer requests. obstore does not tell us their `Retry-After`."""
_ANSWERED = "non-2xx status code: "
"""Where obstore names the status that a store answered; it says nothing like it of a broken connection."""
_CODE = re.compile("<Code>([A-Za-z]+)</Code>")
"""Where all three clouds say in one word what is wrong."""
_CERTIFICATE = re.compile(r"InvalidCertificate\(\s*(?:Other\(\s*(?:OtherError\(\s*)?)?([A-Za-z]+)")
"""Where the TLS library says what it has against a certificate."""
_ADDRESSES = ("endpoint", "base_url")
"""In the names of settings that may say `http://`; so does the Azure emulator's."""
_LONGEST_CONNECT = timedelta(seconds=5)
_FIRST_PAUSE = timedelta(milliseconds=50)
_LONGEST_PAUSE = timedelta(seconds=1)


def make_store(options: ObjectOptions) -> ObjectStore:
    """Create the store of the user's URL, without a request.

    Raises:
        ConfigError: a setting is unknown or missing.
        StorageError: the location cannot be used.
    """
    try:
        if options.scheme == "memory":
            return from_url(options.url)
        if options.scheme == "file":
            return from_url(options.url, mkdir=True)
        return _remote(options)
    except UnknownConfigurationKeyError as error:
        raise ConfigError(f"storage backend 'object': option config: {summary(error)}") from error
    except FAILURES as error:
        raise StorageError(f"{options.url} cannot be used: {summary(error)}") from error


def _remote(options: ObjectOptions) -> ObjectStore:
    patience = timedelta(seconds=options.timeout_seconds)
    client: dict[str, Any] = {
        "timeout": patience,
        "connect_timeout": min(patience, _LONGEST_CONNECT),
        "allow_http": allows_http(options.config),
    }
    if options.ca_file is not None:
        client["root_certificate"] = Path(options.ca_file).read_text("utf-8", "replace")
    settings: dict[str, Any] = {
        "config": options.config,
        "client_options": client,
        "retry_config": {
            "max_retries": options.retries,
            "retry_timeout": patience,  # after this nothing is tried again
            "backoff": {"init_backoff": _FIRST_PAUSE, "max_backoff": _LONGEST_PAUSE, "base": 2},
        },
    }
    provider = provider_of(options)
    if provider is not None:
        settings["credential_provider"] = provider
    return from_url(options.url, **settings)


def allows_http(config: Mapping[str, str]) -> bool:
    """Whether requests may go without TLS: the settings name such an address, or none. obstore takes it from
    the environment then, but not `AWS_ALLOW_HTTP`, since we set timeouts."""
    addresses = [text for name, text in config.items() if any(word in name.lower() for word in _ADDRESSES)]
    return not addresses or any(text.startswith("http://") for text in addresses)


async def delete_all(store: ObjectStore, paths: Sequence[str]) -> None:
    """Delete objects. Some may be gone already, where a list of deletions ends for some kinds of stores."""
    try:
        await obstore.delete_async(store, paths)
    except FileNotFoundError:
        for path in paths:
            with suppress(FileNotFoundError):
                await obstore.delete_async(store, path)


def ignores_conditions(error: Exception) -> bool:
    """Whether a store does not know conditions of a write."""
    return isinstance(error, NotSupportedError) or "501 not implemented" in str(error).lower()


def is_throttled(error: Exception) -> bool:
    """Whether a store that works asks for fewer requests."""
    words = str(error).lower()
    return any(sign in words for sign in _BUSY)


def refuses_writes(error: Exception) -> bool:
    """Whether a store that works takes no more now: it is full, over a quota, or busy."""
    words = str(error).lower()
    return is_throttled(error) or any(sign in words for sign in _FULL)


def refuses(error: Exception) -> bool:
    """Whether a store that has room and time answered that it does not do this."""
    return _ANSWERED in str(error) and not refuses_writes(error)


def summary(error: Exception) -> str:
    """The first line of what obstore says, and the server's own word; the rest is for obstore's authors."""
    text = str(error) or type(error).__name__
    first = text.splitlines()[0].partition(": <?xml")[0]
    code = _CODE.search(text)
    untrusted = _CERTIFICATE.search(text)
    if untrusted:
        return f"{first}: invalid certificate, {untrusted[1]}"
    return f"{first}: {code[1]}" if code else first


def advice(error: Exception) -> str:
    """Advice about a failure of the first request."""
    text, everything = summary(error), str(error).lower()

    def says(signs: Iterable[str]) -> bool:
        return any(sign in everything for sign in signs)

    if _CERTIFICATE.search(str(error)):
        return f"its certificate is not trusted: name the authority that signed it in option ca_file ({text})"
    missing = f"no credentials were found: name them in option config, or as the cloud's tools do ({text})"
    if says(_METADATA):  # first, since some networks refuse requests to it
        return missing
    if isinstance(error, PermissionDeniedError | UnauthenticatedError) or says(_REFUSED):
        return f"the credentials are wrong, or may not do this ({text})"
    if isinstance(error, FileNotFoundError) or says(_NO_BUCKET):
        return f"there is no such bucket or container ({text})"
    return missing if says(_NO_CREDENTIALS) else text
