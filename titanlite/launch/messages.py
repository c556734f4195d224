"""The messages between launchers. Each is one line of JSON.

Invariant: a received line has a limited length, and its fields are checked. Nothing is unpickled, and no text contains
control characters of a terminal.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter

from titanlite.config.errors import one_line

LONGEST_LINE = 4096  # bytes

Name = Annotated[str, Field(max_length=300), AfterValidator(one_line)]  # of a node, for messages
Reason = Annotated[str, Field(max_length=2000), AfterValidator(one_line)]  # it names up to four nodes
Count = Annotated[int, Field(ge=0, lt=2**31)]


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class Join(_Message):
    """A node is ready to start workers.

    `rank` is its NODE_RANK. `port` is above 0 on the host's node only: its first worker listens there for the others.
    Nodes with different `world` do not belong to one run.
    """

    kind: Literal["join"] = "join"
    rank: Count | None
    name: Name
    port: Count
    world: Name


class Spare(_Message):
    """The run has all its nodes. This one waits until another one is lost."""

    kind: Literal["spare"] = "spare"


class Start(_Message):
    """A generation of workers starts. The receiver is node `node` of `nodes`, and the first worker listens at
    `port`."""

    kind: Literal["start"] = "start"
    node: Count
    nodes: Count
    port: Count


class Regroup(_Message):
    """Stop the workers and join again, because another node has `joined`, or the workers of a node have failed."""

    kind: Literal["regroup"] = "regroup"
    joined: bool


class Lost(_Message):
    """A node of this generation is lost: it left without a message."""

    kind: Literal["lost"] = "lost"
    name: Name


class Closed(_Message):
    """A node has ended the run with exit code `code`."""

    kind: Literal["closed"] = "closed"
    name: Name
    code: Count
    reason: Reason = ""


class Failed(_Message):
    """The workers of this node failed. It asks whether all other nodes are there."""

    kind: Literal["failed"] = "failed"


class RollCall(_Message):
    """The host asks whether this node is there."""

    kind: Literal["roll call"] = "roll call"


class Present(_Message):
    """From a node: it is there. From the host: all nodes are there."""

    kind: Literal["present"] = "present"


Message = Join | Spare | Start | Regroup | Lost | Closed | Failed | RollCall | Present
_LINE: TypeAdapter[Message] = TypeAdapter(Annotated[Message, Field(discriminator="kind")])


def encode(message: Message) -> bytes:
    """One line of JSON."""
    return message.model_dump_json().encode() + b"\n"


def decode(line: bytes) -> Message:
    """The message of a line.

    Raises:
        ValueError: the line is no message.
    """
    return _LINE.validate_json(line)
