"""Names of objects, which say what pages are in them. Pure.

An object holds consecutive pages of a group (`hashing.PlacedPage`), each as a header and the page without
padding. Its name has a part of every page's digest, so one list of a group's folder tells where its pages
are, with no index that could be wrong. Whether a page is the one that is wanted, its header says.
"""

from __future__ import annotations

import re
from base64 import urlsafe_b64encode
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import NamedTuple, Self

from asynchicache.hashing import DIGEST_BYTES, NAMESPACE_BYTES, ObjectKey

LABEL = "label.json"
"""Name of a pool's label in its folder, beside its pages."""

_ID_BYTES = 6  # two pages of one place and group are taken for each other once in 10^14
_ID_LETTERS = 8
_FILE_LETTERS = 192  # of a name's part; folders allow 255
_GROUP_LETTERS = 2 * (NAMESPACE_BYTES + 16)
_NAME = re.compile(
    rf"(?P<group>[0-9a-f]{{{_GROUP_LETTERS}}})/(?P<place>[0-9]{{2}})(?P<first>[\w-]{{{_ID_LETTERS}}})"
    r"/(?P<count>[0-9]{2})(?P<renewed>-?)(\.(?P<others>[\w/-]+))?",
    re.ASCII,
)
_ALONE = re.compile(rf"[0-9a-f]{{{2 * DIGEST_BYTES}}}")
_CLAIMS = ".claim"
"""Name of the folder of a group's claims. Stores list it before the group's pages."""
_CLAIM = re.compile(
    rf"[0-9a-f]{{{_GROUP_LETTERS}}}/{re.escape(_CLAIMS)}/[0-9]{{2}}[\w-]{{{_ID_LETTERS}}}", re.ASCII
)


class StoredObject(NamedTuple):
    """One object.

    Attributes:
        path: its name below the prefix.
        group: the name of its pages' group.
        place: the place of its first page in the group.
        ids: of its pages, `page_id`, joined.
        size: bytes.
        renewed: `-` in every other name that it gets, see `other_name`.
        modified: when it was stored; None where no list said so.
    """

    path: str
    group: str
    place: int
    ids: str
    size: int
    renewed: str = ""
    modified: datetime | None = None

    @classmethod
    def of(cls, folder: str, path: str, size: int, modified: datetime | None = None) -> Self | None:
        """The object of that name in a pool's folder; None if the name is not ours."""
        name = path.removeprefix(f"{folder}/")
        if _ALONE.fullmatch(name):
            digest = bytes.fromhex(name)
            return cls(path, group_name(digest), 0, page_id(digest), size, "", modified)
        found = _NAME.fullmatch(name)
        if found is None:
            return None
        ids = found["first"] + (found["others"] or "").replace("/", "")
        made = cls.named(folder, found["group"], int(found["place"]), ids, size, found["renewed"])
        return made._replace(modified=modified) if made.path == path else None

    @classmethod
    def named(cls, folder: str, group: str, place: int, ids: str, size: int, renewed: str = "") -> Self:
        """The object of some pages in a pool's folder."""
        others = ids[_ID_LETTERS:]
        parts = [others[at : at + _FILE_LETTERS] for at in range(0, len(others), _FILE_LETTERS)]
        count = f"{len(ids) // _ID_LETTERS:02}{renewed}"
        name = ".".join([count, "/".join(parts)]) if parts else count
        path = f"{beginning(folder, group, place, ids[:_ID_LETTERS])}/{name}"
        return cls(path, group, place, ids, size, renewed)

    @property
    def pages(self) -> int:
        """The number of its pages."""
        return len(self.ids) // _ID_LETTERS

    def each(self) -> Iterator[tuple[str, int, str]]:
        """Its pages, by group, place and `page_id`."""
        for index in range(self.pages):
            at = index * _ID_LETTERS
            yield self.group, self.place + index, self.ids[at : at + _ID_LETTERS]

    def find(self, place: int, one: str) -> int | None:
        """The index of a page, given its place and `page_id`; None if it is not in the object."""
        index = place - self.place
        at = index * _ID_LETTERS
        return index if index >= 0 and self.ids[at : at + _ID_LETTERS] == one else None

    def has_whole(self, index: int, frame_bytes: int) -> bool:
        """Whether the object is long enough for a page of this index, and not too long for its pages."""
        return (index + 1) * frame_bytes <= self.size <= self.pages * frame_bytes

    def other_name(self, folder: str) -> Self:
        """The object under another name: stores copy no object onto itself."""
        return self.named(folder, self.group, self.place, self.ids, self.size, "" if self.renewed else "-")

    def part(self, folder: str, first: int, stop: int, frame_bytes: int) -> Self:
        """The object of some of its pages."""
        ids = self.ids[first * _ID_LETTERS : stop * _ID_LETTERS]
        return self.named(folder, self.group, self.place + first, ids, (stop - first) * frame_bytes)


def pool_folder(key: ObjectKey) -> str:
    """The folder of a key's pool."""
    return key.text().rpartition(".")[0]


def group_name(group: bytes) -> str:
    """A group in names: its namespace, and 16 bytes of its digest."""
    return group.hex()[:_GROUP_LETTERS]


def page_id(digest: bytes) -> str:
    """A page in names of objects."""
    return urlsafe_b64encode(digest[NAMESPACE_BYTES : NAMESPACE_BYTES + _ID_BYTES]).decode()


def beginning(folder: str, group: str, place: int, one: str) -> str:
    """The folder of the objects that begin with a page."""
    return f"{folder}/{group}/{place:02}{one}"


def claim_name(folder: str, key: ObjectKey) -> str:
    """The claim of pages of a group, of which this is the first one."""
    return f"{folder}/{group_name(key.group)}/{_CLAIMS}/{key.place:02}{page_id(key.digest)}"


def is_claim(folder: str, path: str) -> bool:
    """Whether that is the name of a claim in a pool's folder."""
    return _CLAIM.fullmatch(path.removeprefix(f"{folder}/")) is not None


def object_of(folder: str, keys: Sequence[ObjectKey], size: int) -> StoredObject:
    """The object of consecutive pages of one group."""
    ids = "".join(page_id(key.digest) for key in keys)
    return StoredObject.named(folder, group_name(keys[0].group), keys[0].place, ids, size)


def object_alone(folder: str, key: ObjectKey, size: int) -> StoredObject:
    """The object of a page that has one of its own, by its digest alone."""
    digest = key.digest
    return StoredObject(f"{folder}/{digest.hex()}", group_name(digest), 0, page_id(digest), size)


def longest_name(key: ObjectKey, object_pages: int) -> str:
    """The longest name of an object of that many pages, in the pool of a key."""
    if object_pages == 1:
        return object_alone(pool_folder(key), key, 0).path
    return object_of(pool_folder(key), [key] * (object_pages + 1), 0).path
