"""The pickle that DCP writes as the index of a checkpoint, read as plain values.

Invariant: reading runs no code and makes no object of the file's choice. Only the few instructions of protocols 4 and 5
that an index needs are carried out; a class that the file names is noted by its name, never looked up or called.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from titanlite.checkpoint.open_files import shown
from titanlite.config.errors import Damage


@dataclass(frozen=True)
class Global:
    """A name that the pickle mentions."""

    name: str


@dataclass(eq=False)
class Object:
    """What the pickle would make by calling `kind`."""

    kind: str
    args: tuple[Any, ...]
    state: Any = None


class Table:
    """A dictionary before its keys are looked at."""

    def __init__(self) -> None:
        self.pairs: list[tuple[Any, Any]] = []


def read_pickle(raw: bytes, names: Collection[tuple[str, str]]) -> Any:
    """The value that a pickle describes, of numbers, texts, lists and tuples, and of the classes above.

    Args:
        names: module and name of each class that it may mention.

    Raises:
        Damage: it is truncated, or has an instruction or a name that no index has.
    """
    try:
        return _run(raw, names)
    except (IndexError, struct.error):
        raise Damage("truncated") from None
    except UnicodeDecodeError:
        raise Damage("text that is none") from None


_INT32, _UINT32 = struct.Struct("<i").unpack_from, struct.Struct("<I").unpack_from


def _run(raw: bytes, names: Collection[tuple[str, str]]) -> Any:
    """The loop over the instructions. What takes its value from the bytes, and what comes most often, is done here: an
    index of thousands of ranks has a hundred million instructions, and a call of a function costs as much as ten."""
    stack = _Stack(names)
    push, remember, mark = stack.values.append, stack.memo.append, stack.marks.append
    values, memo = stack.values, stack.memo
    at = 0
    while True:
        code = raw[at]
        at += 1
        if code == 0x94:  # MEMOIZE
            remember(values[-1])
        elif code == 0x68:  # BINGET
            push(memo[raw[at]])
            at += 1
        elif code == 0x6A:  # LONG_BINGET
            push(memo[_UINT32(raw, at)[0]])
            at += 4
        elif code == 0x4B:  # BININT1
            push(raw[at])
            at += 1
        elif code == 0x28:  # MARK
            mark(len(values))
        elif code in _ON_THE_STACK:
            _ON_THE_STACK[code](stack)
        elif code == 0x4D:  # BININT2
            push(raw[at] | raw[at + 1] << 8)
            at += 2
        elif code == 0x4A:  # BININT
            push(_INT32(raw, at)[0])
            at += 4
        elif code in (0x8A, 0x8C, 0x58):  # LONG1, SHORT_BINUNICODE, BINUNICODE: a length, and so many bytes
            start = at + (4 if code == 0x58 else 1)
            at = start + (_UINT32(raw, at)[0] if code == 0x58 else raw[at])
            if at > len(raw):
                raise IndexError
            push(int.from_bytes(raw[start:at], "little", signed=True) if code == 0x8A else raw[start:at].decode())
        elif code == 0x95:  # FRAME
            at += 8
        elif code == 0x80:  # PROTO
            if raw[at] not in (4, 5):
                raise Damage(f"a pickle of protocol {raw[at]}")
            at += 1
        elif code == 0x2E:  # STOP
            if len(values) != 1 or at != len(raw):
                raise Damage("something before or behind the index")
            return values[0]
        else:
            raise Damage(f"the instruction {code:#04x}, which has no place in a checkpoint")


class _Stack:
    """The values that instructions work on."""

    def __init__(self, names: Collection[tuple[str, str]]) -> None:
        self.names = names
        self.values: list[Any] = []
        self.marks: list[int] = []  # numbers of values
        self.memo: list[Any] = []

    def since_mark(self) -> list[Any]:
        start = self.marks.pop()
        items = self.values[start:]
        if start > len(self.values):
            raise IndexError
        del self.values[start:]
        return items

    def tuple_of(self, count: int) -> None:
        if len(self.values) < count:
            raise IndexError
        self.values[-count:] = [tuple(self.values[-count:])]

    def call(self) -> None:
        args, kind = self.values.pop(), self.values.pop()
        if not isinstance(kind, Global) or not isinstance(args, tuple):
            raise Damage("a call of something else than a class")
        self.values.append(Object(kind.name, args))

    def build(self) -> None:
        state, target = self.values.pop(), self.values[-1]
        if not isinstance(target, Object) or target.state is not None:
            raise Damage("attributes for something else than a new object")
        target.state = state

    def set_items(self, items: list[Any]) -> None:
        table = self.values[-1]
        if not isinstance(table, Table) or len(items) % 2:
            raise Damage("entries for something else than a table")
        table.pairs.extend(zip(items[::2], items[1::2], strict=True))

    def append(self, items: list[Any]) -> None:
        target = self.values[-1]
        if not isinstance(target, list):
            raise Damage("entries for something else than a list")
        target.extend(items)

    def mention(self) -> None:
        name, module = self.values.pop(), self.values.pop()
        if not isinstance(name, str) or not isinstance(module, str) or (module, name) not in self.names:
            raise Damage(f"names {shown(module)}.{shown(name)}, which has no place in a checkpoint")
        self.values.append(Global(name))


_ON_THE_STACK: dict[int, Callable[[_Stack], object]] = {
    0x4E: lambda stack: stack.values.append(None),
    0x88: lambda stack: stack.values.append(True),  # NEWTRUE
    0x89: lambda stack: stack.values.append(False),  # NEWFALSE
    0x29: lambda stack: stack.values.append(()),  # EMPTY_TUPLE
    0x85: lambda stack: stack.tuple_of(1),
    0x86: lambda stack: stack.tuple_of(2),
    0x87: lambda stack: stack.tuple_of(3),
    0x74: lambda stack: stack.values.append(tuple(stack.since_mark())),  # TUPLE
    0x5D: lambda stack: stack.values.append([]),  # EMPTY_LIST
    0x61: lambda stack: stack.append([stack.values.pop()]),  # APPEND
    0x65: lambda stack: stack.append(stack.since_mark()),  # APPENDS
    0x7D: lambda stack: stack.values.append(Table()),  # EMPTY_DICT
    0x73: lambda stack: stack.set_items([stack.values.pop(), stack.values.pop()][::-1]),  # SETITEM
    0x75: lambda stack: stack.set_items(stack.since_mark()),  # SETITEMS
    0x93: _Stack.mention,  # STACK_GLOBAL
    0x52: _Stack.call,  # REDUCE
    0x81: _Stack.call,  # NEWOBJ
    0x62: _Stack.build,  # BUILD
}
