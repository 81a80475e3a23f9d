"""What any process may write into a segment, its writer or not: notes in the file's first block.

Owns their place and their form. Who acts on them is its writer; must not know headers or payloads.

    half a block + 8   8 bytes by which a process asks for all of it to be forgotten
    then, to its end   u64 marks: slots, counted from 1, that a process found damaged
"""

import os
from typing import Final

import numpy as np

BLOCK_BYTES: Final = 4096
NOTES_AT: Final = BLOCK_BYTES // 2 + 8
_DELETED_AT: Final = NOTES_AT
_DELETED: Final = b"forget:!"
_MARKS_AT: Final = _DELETED_AT + len(_DELETED)
_MARKS: Final = (BLOCK_BYTES - _MARKS_AT) // 8


class SegmentNotes:
    """Of the open file ``fd``, which its segment closes. Where it is not ``writable``, nothing is
    written."""

    def __init__(self, fd: int, slots: int, *, writable: bool) -> None:
        self._fd = fd
        self._slots = slots
        self._writable = writable

    def mark_deleted(self) -> None:
        """Ask whoever writes it to delete it; from now on nobody serves what it holds."""
        if self._writable:
            os.pwrite(self._fd, _DELETED, _DELETED_AT)

    def is_marked_deleted(self) -> bool:
        return os.pread(self._fd, len(_DELETED), _DELETED_AT) == _DELETED

    def mark(self, slot: int) -> None:
        """Report to its writer that a page is damaged. A second mark may take the place of this
        one."""
        if self._writable:
            os.pwrite(self._fd, (slot + 1).to_bytes(8, "little"), _MARKS_AT + slot % _MARKS * 8)

    def marks(self) -> list[int]:
        """Slots that others marked."""
        table = np.frombuffer(os.pread(self._fd, _MARKS * 8, _MARKS_AT), np.uint64)
        slots = table[(table > 0) & (table <= self._slots)]
        return [slot - 1 for slot in slots.tolist()]

    def unmark(self, slot: int) -> None:
        os.pwrite(self._fd, bytes(8), _MARKS_AT + slot % _MARKS * 8)
