"""All errors of the library, grouped by cause.

A cache failure is a miss with a reason (`types.MissReason`), never an exception. Errors are raised for
misuse by the caller, a full pool, or a storage or device that cannot be opened.
"""

from typing import Self


class CacheError(Exception):
    """Base class of all errors of this library."""


# Misuse by the caller.


class UsageError(CacheError):
    """Raised when the library is used in a way that makes no sense."""


class ConfigError(UsageError, ValueError):
    """Raised when an option has an invalid value; names the option, the value and the rule."""


class InvalidTokensError(UsageError, ValueError):
    """Raised when token ids are empty, negative, or not integers of at most 63 bits."""


class UnsupportedModelError(UsageError, ValueError):
    """Raised when a model has a kind of layer or cache that pools cannot describe; names it."""


class RequestStateError(UsageError, RuntimeError):
    """Raised when a request is used twice, out of order, or after it was closed."""


class UnknownPoolError(UsageError, KeyError):
    """Raised when a model has no such pool; names those that it has."""

    __str__ = CacheError.__str__  # that of KeyError shows quotes around the message


class ClosedError(UsageError, RuntimeError):
    """Raised when a closed cache, engine or reactor is used."""


# Capacity, device and network.


class CapacityError(CacheError, MemoryError):
    """Raised when a pool lacks free slots or memory now; says how much is needed and what is free."""


class BusyError(CapacityError):
    """Raised when the queue of waiting requests is full; the same request can be served later."""


class DeviceError(CacheError, RuntimeError):
    """Raised when a device failed. The failure is permanent; pages it touched are quarantined."""


class CallRefusedError(DeviceError):
    """Raised for a call that the driver refused. Nothing of it runs, and the device is well."""


class TransferError(CacheError, RuntimeError):
    """Raised to waiters of a transfer that failed or was abandoned."""


class CopyEndedError(TransferError):
    """Reported for a copy that failed and has ended: nothing writes to its pages any more. It fails alone."""


class DeadlockError(CacheError, RuntimeError):
    """Raised when a run in virtual time is stuck or never ends; lists the waiting tasks."""


class AuditError(TransferError):
    """Reported for a transfer that brought other bytes to the device than had left it."""


class RankError(CacheError):
    """Raised when ranks cannot form a group, or cannot go on as one; names the rank and the rule."""


class RankLostError(RankError):
    """Raised when a rank does not answer in time, or its connection ends. The group goes on cold."""


class RankProtocolError(RankError):
    """Raised when a rank sends what does not fit the log: damaged, out of order, or not understood."""


class WireFormatError(CacheError, ValueError):
    """Raised when bytes from a network violate their format; says where."""


# Storage.


class StorageError(CacheError, OSError):
    """Raised when storage cannot be opened; once open, its failures are misses."""


class StorageFormatError(StorageError, ValueError):
    """Raised when a storage location holds foreign data, or data of another format."""

    @classmethod
    def of_version(cls, where: object, found: int, known: int, other: str) -> Self:
        """The error for pages of another format version.

        Args:
            where: the location.
            found: its version.
            known: the version that this release reads.
            other: what to give instead, e.g. `folder`.
        """
        cure = "update asynchicache" if found > known else "open it with an older asynchicache, or remove it"
        return cls(
            f"{where} has format {found}; this version reads format {known}: {cure}, or give another {other}"
        )


class StorageLockedError(StorageError, BlockingIOError):
    """Raised when another writer holds the storage location."""


# Bugs of the library.


class InternalError(CacheError, AssertionError):
    """Raised when an invariant of the library is broken: a bug to report, never a mistake of the caller."""


class LeaseWarning(ResourceWarning):
    """Warned when a lease is dropped without being closed."""
