"""The base class of storage backends' options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Self, TypeAlias

from msgspec import Meta

from asynchicache.errors import ConfigError
from asynchicache.options import Options, did_you_mean, shown

NamespaceName: TypeAlias = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,64}\Z")]
"""Prefix of every key of a backend."""


class BackendOptions(Options, frozen=True):
    """Base class of a backend's options; error messages name the backend and hide passwords.

    Attributes:
        backend: the backend's name.
    """

    backend: ClassVar[str]

    @classmethod
    def of(cls, given: Mapping[str, object]) -> Self:
        """Parse the options in `given`; None stands for the default.

        Raises:
            ConfigError: an option is missing, unknown or invalid; the message names it.
        """
        return cls.read({name: value for name, value in given.items() if value is not None})

    @classmethod
    def refused(cls, name: str, value: object, rule: str) -> ConfigError:
        return ConfigError(f"storage backend {cls.backend!r}: option {name}={shown(name, value)} {rule}")

    @classmethod
    def missing(cls, name: str, rule: str) -> ConfigError:
        return ConfigError(f"storage backend {cls.backend!r}: option {name} is missing; it {rule}")

    @classmethod
    def unknown(cls, name: str, known: Sequence[str]) -> ConfigError:
        advice = did_you_mean(name, known)
        return ConfigError(f"storage backend {cls.backend!r} has no option {name!r}; {advice}")
