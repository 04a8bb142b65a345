"""The tables of docs/torchrun.md say what the code does. `--rewrite` writes them anew."""

from __future__ import annotations

import re
from pathlib import Path

from rdzv.config.settings import DEFAULTS, TABLE, _plain
from rdzv.torchrun.conf import KEYS, OWN, SYNONYMS, TORCH

DOCUMENT = Path(__file__).parents[2] / "docs" / "torchrun.md"
OURS = "| key | default | meaning |\n|---|---|---|\n"
THEIRS = "| torch's key | here |\n|---|---|\n"


def default(key):
    value = "auto" if key in OWN else _plain(DEFAULTS[key])
    return "" if value in ("", "None") else f"`{value}`"


def rows(head):
    if head == OURS:
        names = [name for name in KEYS if name in TABLE or name in OWN]
        return [f"| `{name}` | {default(name)} | {(TABLE.get(name) or OWN[name]).meaning} |" for name in names]
    same = [f"| `{theirs}` | `{ours}` |" for theirs, ours in SYNONYMS.items()]
    return same + [f"| `{name}` | {setting.meaning} |" for name, setting in TORCH.items()]


def test_every_key_of_rdzv_conf_is_documented_with_its_default_and_meaning(request):
    text = DOCUMENT.read_text()
    for head in (OURS, THEIRS):
        wanted = "".join(f"{row}\n" for row in rows(head))
        found = re.search(re.escape(head) + r"((?:\|.*\n)*)", text)
        assert found, f"there is no table that begins {head!r}"
        if request.config.getoption("--rewrite"):
            text = text.replace(found[0], head + wanted)
            DOCUMENT.write_text(text)
        else:
            assert found[1] == wanted


def test_every_key_is_in_one_of_the_tables():
    documented = {row.split("`")[1] for head in (OURS, THEIRS) for row in rows(head)}
    assert documented == set(KEYS)
