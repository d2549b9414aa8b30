"""Deadlines of a rank group."""

from __future__ import annotations

from typing import ClassVar

from asynchicache.options import Options, Seconds


class RankLimits(Options, frozen=True):
    """Deadlines of a rank group, in seconds.

    Attributes:
        joining: how long the leader waits for all followers, and for each step of the handshake. Default: 60.
        heartbeat: how often each side says that it is alive. Default: 1.
        silence: how long a rank may be silent before it counts as lost. Default: 10.
        copy_seconds: how long a follower may take for a copy, including the wait for its step. Default: 60.
        storage_seconds: how long a follower may take for a storage call. Its own storage limits end calls
            earlier; this bound is for a follower that hangs. Default: 120.
    """

    subject: ClassVar[str] = "rank limit "

    joining: Seconds = 60.0
    heartbeat: Seconds = 1.0
    silence: Seconds = 10.0
    copy_seconds: Seconds = 60.0
    storage_seconds: Seconds = 120.0
