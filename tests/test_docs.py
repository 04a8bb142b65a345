"""The documents: links lead somewhere, and the glossary has every word. test_docs_commands.py runs their commands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from rdzv.core.member_state import diagram

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=[str(d.relative_to(ROOT)) for d in DOCUMENTS])

WORDS = (
    "run", "node", "worker", "role", "agent", "member", "slot", "leader", "operator", "incarnation", "round", "ready", "quorum",
    "unit", "path", "neighbours", "segment", "last call", "sealed", "world", "hold", "bootstrap address", "store", "waiting",
    "newcomer", "spare", "settle",
    "broken", "cause", "lost", "left", "gave up", "survivor", "straggling", "regroup", "evicted", "drain", "ban", "flap",
    "drain notice",
    "strike", "quarantine",
    "away", "heir", "check", "unhealthy", "progress", "stalled",
    "done", "closed", "head", "phase", "call", "rank table", "entry", "digest", "era", "journal", "journal file", "notice",
    "engine",
    "embedded server", "voter", "endpoint", "driver", "register", "instance", "place", "adopt", "adopted", "retold", "secret",
    "lease", "sentinel", "declared place", "linger", "outage grace", "revision", "watch", "guard", "fencing", "fence",
)  # fmt: skip


def blocks(document: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", document.read_text(), re.MULTILINE | re.DOTALL)


def test_the_example_of_the_readme_prints_what_the_readme_shows(tmp_path):
    (program,) = blocks(ROOT / "README.md", "python")
    (shown,) = blocks(ROOT / "README.md", "text")
    file = tmp_path / "example.py"
    file.write_text(program)
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, timeout=120, check=False)
    assert (done.stderr, done.returncode) == ("", 0)
    # Two threads print, so a line's end may come after the other's line.
    line = re.compile(r"(round \d+: rank \d+ of \d+), bootstrap at ([\w.]+:\d+)")
    printed, promised = sorted(line.findall(done.stdout)), sorted(line.findall(shown))
    assert len(promised) == len(shown.splitlines()) == 2
    assert [what for what, _ in printed] == [what for what, _ in promised]
    assert len({where for _, where in printed}) == 1


def test_every_variable_of_the_program_is_on_the_page():
    page = (ROOT / "docs" / "environment.md").read_text()
    pattern = r"\b(?:RDZV|SLURM|PET|TORCHX|SKYPILOT|LWS)_[A-Z0-9_]*[A-Z0-9]\b"
    names = {name for file in (ROOT / "src").rglob("*.py") for name in re.findall(pattern, file.read_text())}
    used = names - {"SLURM_PORTS", "SLURM_TOPOLOGY"}  # Names in the code.
    assert len(used) > 20
    assert {name for name in used if f"`{name}`" not in page} == set()
    assert {name for name in re.findall(r"`(RDZV_[A-Z_]+)`", page) if name not in used} == set()


def test_every_make_target_in_the_documents_exists():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {name for document in DOCUMENTS for name in re.findall(r"`make ([a-z]+)`", document.read_text())}
    assert named
    assert named <= targets


@each_document
def test_every_link_within_the_repository_leads_somewhere(document):
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", document.read_text())
    missing = [link for link in links if "://" not in link and not (document.parent / link).exists()]
    assert missing == []


@each_document
def test_every_code_block_is_closed_and_says_what_it_is(document):
    fences = re.findall(r"^ *```(.*)$", document.read_text(), re.MULTILINE)
    assert len(fences) % 2 == 0
    assert all(fences[::2])
    assert not any(fences[1::2])


def test_the_glossary_explains_each_word_once():
    explained = re.findall(r"^\*\*(.+)\*\*\n: ", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE)
    assert sorted(explained) == sorted(WORDS)


def test_the_changelog_has_a_place_for_what_comes_next_and_a_date_for_each_version():
    first, *others = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert first == "[Unreleased]"
    assert others
    assert [one for one in others if not re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", one)] == []


def test_what_the_documents_install_can_be_had_in_a_clone():
    """No page but the one about installing names the package as if it were on an index."""
    named = {document.name for document in DOCUMENTS if re.search(r"pip install '?rdzv", document.read_text())}
    assert named <= {"install.md"}


def test_the_picture_of_a_members_states_is_drawn_from_the_table(request):
    page = ROOT / "docs" / "architecture.md"
    before, rest = page.read_text().split("<!-- states -->\n")
    shown, after = rest.split("<!-- end of states -->")
    drawn = f"\n```mermaid\n{diagram().strip()}\n```\n\n"
    if request.config.getoption("--rewrite"):
        page.write_text(f"{before}<!-- states -->\n{drawn}<!-- end of states -->{after}")
    else:
        assert shown == drawn


def test_every_file_that_the_architecture_names_exists():
    text = (ROOT / "docs" / "architecture.md").read_text()
    named = set(re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.py)`", text))
    homes = (ROOT, ROOT / "src" / "rdzv")
    assert named
    assert [name for name in sorted(named) if not any((home / name).exists() for home in homes)] == []
