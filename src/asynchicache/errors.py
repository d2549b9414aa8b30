"""Every error the library raises, by whose fault it is.

A cache failure is a miss with a reason (`types.MissReason`), never an exception; what is raised is
misuse by the caller, a full pool, or a storage or device that cannot be opened at all.
"""

__all__ = [
    "AuditError",
    "BusyError",
    "CacheError",
    "CapacityError",
    "ClosedError",
    "ConfigError",
    "DeadlockError",
    "DeviceError",
    "InternalError",
    "InvalidTokensError",
    "LeaseWarning",
    "RequestStateError",
    "StorageError",
    "StorageFormatError",
    "StorageLockedError",
    "TransferError",
    "UnsupportedModelError",
    "UsageError",
    "WireFormatError",
]


class CacheError(Exception):
    """The root of every error of this library."""


# The caller's fault.


class UsageError(CacheError):
    """Raised when the library is asked for something that it cannot mean."""


class ConfigError(UsageError, ValueError):
    """Raised when an option has a value outside its rule; names the option, the value, the rule."""


class InvalidTokensError(UsageError, ValueError):
    """Raised when token ids are empty, negative, or not integers of at most 63 bits."""


class UnsupportedModelError(UsageError, ValueError):
    """Raised when a model has a kind of layer or cache that no pool describes; names it."""


class RequestStateError(UsageError, RuntimeError):
    """Raised when a request is used twice, out of order, or after it was closed."""


class ClosedError(UsageError, RuntimeError):
    """Raised when a closed cache, engine or reactor is used."""


# Nobody's fault, or the machine's.


class CapacityError(CacheError, MemoryError):
    """Raised when a pool cannot hold what is asked now; says how much is needed and what is free."""


class BusyError(CapacityError):
    """Raised when as many requests wait as may; the same request can be served later."""


class DeviceError(CacheError, RuntimeError):
    """Raised when a device failed; it is sticky, and the pages it touched are quarantined."""


class TransferError(CacheError, RuntimeError):
    """Raised to waiters of a transfer that failed or was given up."""


class DeadlockError(CacheError, RuntimeError):
    """Raised when a run in virtual time can never go on, or never ends; lists the tasks that wait."""


class AuditError(TransferError):
    """Told of a transfer that brought other bytes to the device than had left it."""


class WireFormatError(CacheError, ValueError):
    """Raised when bytes that came over a network are not what their format allows; says where."""


# The storage's fault.


class StorageError(CacheError, OSError):
    """Raised when storage cannot be opened; once open, its failures are misses."""


class StorageFormatError(StorageError, ValueError):
    """Raised when a storage location holds something foreign, or data of a newer format."""


class StorageLockedError(StorageError, BlockingIOError):
    """Raised when another writer holds the storage location."""


# Ours.


class InternalError(CacheError, AssertionError):
    """Raised when an invariant of the library is broken: a bug to report, never the caller's fault."""


class LeaseWarning(ResourceWarning):
    """Warned when a lease is dropped without being closed."""
