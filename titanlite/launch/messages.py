"""What launchers say to one another: one line of JSON a message.

Invariant: what arrives is a line of bounded length whose fields are checked. Nothing is unpickled, and no text can
command a terminal.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter

from titanlite.config.errors import one_line

LONGEST_LINE = 4096  # bytes

Name = Annotated[str, Field(max_length=300), AfterValidator(one_line)]  # of a node, for messages
Reason = Annotated[str, Field(max_length=2000), AfterValidator(one_line)]  # names four of them
Count = Annotated[int, Field(ge=0, lt=2**31)]


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class Join(_Message):
    """A node that is ready to start workers. `rank` is its NODE_RANK; `port`, above 0 on the host's node alone, is
    where its first worker listens for those of the others. Nodes whose `world` differs do not belong together."""

    kind: Literal["join"] = "join"
    rank: Count | None
    name: Name
    port: Count
    world: Name


class Spare(_Message):
    """The run has all its nodes: this one waits until another one is lost."""

    kind: Literal["spare"] = "spare"


class Start(_Message):
    """A generation of workers starts: here on node `node` of `nodes`, whose first worker listens at `port`."""

    kind: Literal["start"] = "start"
    node: Count
    nodes: Count
    port: Count


class Regroup(_Message):
    """Stop the workers and join again: another node has `joined`, or the workers of one have failed."""

    kind: Literal["regroup"] = "regroup"
    joined: bool


class Lost(_Message):
    """A node of this generation is gone without a word."""

    kind: Literal["lost"] = "lost"
    name: Name


class Closed(_Message):
    """A node has ended the run with exit code `code`."""

    kind: Literal["closed"] = "closed"
    name: Name
    code: Count
    reason: Reason = ""


class Failed(_Message):
    """The workers of this node failed: are all other nodes there, or was one lost?"""

    kind: Literal["failed"] = "failed"


class RollCall(_Message):
    """The host wants to know whether this node is there."""

    kind: Literal["roll call"] = "roll call"


class Present(_Message):
    """It is. From the host: all are."""

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
