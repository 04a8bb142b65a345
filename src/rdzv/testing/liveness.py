"""The values that a suspended coroutine can still read: its live variables, and the values on its stack.

A variable that is written before it is read again, or never read again, decides nothing. The coroutines of a member keep many
of these: the last batch of a watch, the first list of a leader. States that differ in nothing else behave alike. The position
in a loop is on the stack only, and decides a lot.
"""

from __future__ import annotations

import dis
import functools
import gc
import sys
import types
from typing import Any

IS_KNOWN = sys.version_info[:2] == (3, 11)
"""Instructions and frames differ between versions of Python. In others all variables count, and no stack is seen."""
_WRITES = ("STORE_FAST", "DELETE_FAST")
_LEAVES = frozenset({"RETURN_VALUE", "RAISE_VARARGS", "RERAISE", "JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT"})
"""Instructions after which the next one is not executed."""


def readable(suspended: Any, code: types.CodeType, frame: types.FrameType) -> tuple[dict[str, Any], list[object]]:
    """Return the live variables and the stack of a coroutine or generator that does not run."""
    variables = frame.f_locals
    if not IS_KNOWN:
        return variables, []
    live = _live_before(code)[frame.f_lasti] | {*code.co_cellvars, *code.co_freevars}
    # Of the frame, the collector sees function, code, variables that have a value, and the stack, in this order.
    held = gc.get_referents(suspended)
    first = [at for at, one in enumerate(held) if one is code][1] + 1
    plain = [name for name in code.co_varnames if name in variables and name not in code.co_cellvars]
    stack = held[first + len(plain) + len(code.co_cellvars) + len(code.co_freevars) :]
    return {name: value for name, value in variables.items() if name in live}, stack


@functools.lru_cache(maxsize=1_000)
def _live_before(code: types.CodeType) -> dict[int, frozenset[str]]:
    """Return for each instruction the variables that may be read from there on before they are written."""
    listing = dis.Bytecode(code)
    instructions = list(listing)
    handlers = [(entry.start, entry.end, entry.target) for entry in listing.exception_entries]  # type: ignore[attr-defined]
    live: dict[int, frozenset[str]] = {one.offset: frozenset() for one in instructions}
    changed = True
    while changed:
        changed, after = False, frozenset[str]()
        for one in reversed(instructions):
            found = frozenset() if one.opname in _LEAVES else after
            if one.opcode in dis.hasjrel:
                found |= live[one.argval]
            if one.opname in _WRITES:
                found -= {one.argval}
            elif one.opname == "LOAD_FAST":
                found |= {one.argval}
            # An exception may strike before the instruction has done anything.
            found = found.union(*(live[target] for start, end, target in handlers if start <= one.offset < end))
            changed = changed or found != live[one.offset]
            live[one.offset] = after = found
    return live


