"""Bytes that a release wrote, kept as files: every frame, every stored record, and what each means.

    python tests/support/golden.py tests/golden/<version>

writes them, at each release and with its code; they are never written again. Today's code must read them with the same
meaning, and must write the same bytes for it, because members of two versions meet in one run.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import inspect

from rdzv.core import keys, wire, worker_messages
from rdzv.core.model import Call, CauseKind, Phase
from rdzv.engines.embedded import frames
from rdzv.engines.embedded.features import WelcomeWithFeatures, welcome_decoder
from rdzv.engines.port import Item, Order
from rdzv.engines.quorum.agreement import HostRecord, Offer
from rdzv.engines.register import document
from rdzv.member import store_calls
from rdzv.member.journal_file import JournalHeader, JournalLine


class Format(NamedTuple):
    """A kind of bytes that one version writes and another may read."""

    kinds: tuple[type, ...]
    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]
    samples: tuple[Any, ...] = ()
    """Values to write; empty: made from the kinds."""


def frame_format(decoder: Any, *kinds: type) -> Format:
    """Return the format of a frame; `kinds` are those of the peer, if it knows others than the decoder."""
    return Format(
        kinds or getattr(decoder.type, "__args__", (decoder.type,)),
        lambda frame: frames.encode(as_welcome(frame))[frames.SIZE_BYTES :],
        lambda data: frames.decode(decoder, memoryview(data)),
    )


def as_welcome(frame: Any) -> Any:
    """Return a welcome of a server without features as such a server sends it."""
    if isinstance(frame, WelcomeWithFeatures) and frame.features is None:
        return frames.Welcome(*(getattr(frame, name) for name in frames.Welcome.__struct_fields__))
    return frame


def record_format(kind: type[Any]) -> Format:
    return Format((kind,), wire.encode, lambda data: wire.decode(kind, data))


def json_format(kind: type[Any]) -> Format:
    return Format((kind,), msgspec.json.encode, msgspec.json.Decoder(kind).decode)


ITEM = Item("k", b"\x00\xff", 4, 9, 7)
IN_A_REGISTER = document.Document(
    instance="one life", serial=3, writer="a", revision=9, items=[Item("j", b"", 2, 2), ITEM],
    leases={7: document.StoredLease(10.0, 2), 8: document.StoredLease(4.5, document.ELSEWHERE)},
    log=[document._Logged(8, "gone", False), document._Logged(8, "k", Item("k", b"old", 4, 8)), document._Logged(9, "k", True)],
    forgotten=3,
)  # fmt: skip

FORMATS = {
    "frame, the client's first": frame_format(frames.first_decoder),
    "frame, the client's proof": frame_format(frames.proof_decoder),
    "frame, the client's hello": frame_format(frames.hello_decoder),
    "frame, a request": frame_format(frames.request_decoder),
    "frame, the server's challenge": frame_format(frames.challenge_decoder),
    "frame, the server's proof": frame_format(frames.proven_decoder),
    "frame, the server's welcome": frame_format(welcome_decoder, frames.Welcome, frames.Rejected),
    "frame, the server's runs": frame_format(frames.runs_decoder),
    "frame, an answer": frame_format(frames.answer_decoder),
    **{f"record, {kind.__struct_config__.tag}": record_format(kind) for kind in wire.SIZES_MAX},
    "record, mark of the store": Format((store_calls._Mark,), store_calls._encode, store_calls._decode),
    "register": Format((document.Document,), document.encode, document.decode, (IN_A_REGISTER,)),
    "journal file, header": json_format(JournalHeader),
    "journal file, line": json_format(JournalLine),
    "quorum, offer": json_format(Offer),
    "quorum, host's record": json_format(HostRecord),
    "worker channel, hello": json_format(worker_messages.WorkerHello),
}


class Golden(msgspec.Struct):
    """One line of a file: bytes in hexadecimal, and their meaning."""

    format: str
    bytes: str
    meaning: Any


# ---- samples: one with as little as possible, one with a value of its own in every field


def samples_of(kind: type) -> Iterator[Any]:
    for full in (False, True):
        yield Sampler(full=full).of(inspect.type_info(kind))


class Sampler:
    """Makes a value of any type. No two numbers or texts in it are equal, so that no field can be taken for another."""

    def __init__(self, *, full: bool) -> None:
        self._full = full
        self._count = 0

    def of(self, kind: inspect.Type) -> Any:
        self._count += 1
        match kind:
            case inspect.StructType():
                return kind.cls(**{one.name: self.of(one.type) for one in kind.fields if self._full or one.required})
            case inspect.UnionType():
                return self.of(next(one for one in kind.types if not isinstance(one, inspect.NoneType)))
            case inspect.VarTupleType() | inspect.ListType():
                item = kind.item_type
                variants = item.types if isinstance(item, inspect.UnionType) and self._full else (item,) if self._full else ()
                made = [self.of(one) for one in variants]
                return made if isinstance(kind, inspect.ListType) else tuple(made)
            case inspect.DictType():
                return {self.of(kind.key_type): self.of(kind.value_type)} if self._full else {}
            case inspect.EnumType():
                return list(kind.cls)[-1]
            case inspect.BytesType():
                return bytes(range(kind.min_length or 3))
        plain: dict[type, Callable[[], Any]] = {
            inspect.BoolType: lambda: True,
            inspect.FloatType: lambda: self._count + 0.5,
            inspect.IntType: lambda: self._count,
            inspect.StrType: lambda: f"text{self._count}",
        }
        return plain[type(kind)]()


# ---- meaning


def meaning_of(value: Any) -> Any:
    """Return a value as JSON has it: a struct as its fields, by their place or by their name, as on the wire."""
    if isinstance(value, msgspec.Struct):
        config = value.__struct_config__
        tag = [] if config.tag is None else [config.tag]
        if config.array_like:
            return [*tag, *(meaning_of(getattr(value, name)) for name in value.__struct_fields__)]
        return {"type": config.tag} | {name: meaning_of(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Mapping):
        return {str(name): meaning_of(one) for name, one in value.items()}
    return [meaning_of(one) for one in value] if isinstance(value, list | tuple) else value


def differences(then: Any, now: Any, where: str = "it") -> Iterator[str]:
    """Yield how a meaning differs from the one of the release.

    Today's code may have more fields, and what they hold for bytes that do not have them is their default by definition.
    """
    if isinstance(then, dict) and isinstance(now, dict):
        for name, one in then.items():
            yield from differences(one, now[name], f"{where}.{name}") if name in now else [f"{where}.{name} is gone"]
    elif isinstance(then, list) and isinstance(now, list) and len(now) >= len(then):
        for number, one in enumerate(then):
            yield from differences(one, now[number], f"{where}[{number}]")
    elif then != now or type(then) is not type(now):
        yield f"{where} was {then!r} and is {now!r}"


# ---- files


def read(path: Path) -> list[Golden]:
    return [msgspec.json.decode(line, type=Golden) for line in path.read_bytes().splitlines()]


def names() -> dict[str, Any]:
    """Return what both versions must spell alike: first bytes, values of enums, and the keys of a run, quoted where needed."""
    made = keys.Keys("job/7 a")
    named = {
        "member": made.member("m"), "progress_of": made.progress_of("m"), "table": made.table("t"),
        "entry": made.entry("t", "m"), "ask": made.ask("m"),
        "ban": made.ban("a/b"), "kv": made.kv("t"), "journal_entry": made.journal_entry(259),
    }  # fmt: skip
    return {
        "first bytes": {"connection": frames.PREAMBLE.decode(), "register": document.MAGIC.decode()},
        "enums": {kind.__name__: {one.name: one.value for one in kind} for kind in (Phase, Call, CauseKind, Order)},
        "keys": vars(made) | named,
    }


def main(folder: Path) -> None:
    folder.mkdir()
    lines = [
        msgspec.json.encode(Golden(name, one.encode(sample).hex(), meaning_of(sample)))
        for name, one in FORMATS.items() for sample in one.samples or [made for kind in one.kinds for made in samples_of(kind)]
    ]  # fmt: skip
    (folder / "bytes.jsonl").write_bytes(b"\n".join(dict.fromkeys(lines)) + b"\n")
    (folder / "names.json").write_text(json.dumps(names(), indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
