"""The shape of the code: who may import whom, how long things may be, and what must not be called at all.

Such rules erode one small exception at a time, so each has a test here and each test says which line breaks it.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tokenize
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
SRC = ROOT / "src" / "rdzv"
FILES = sorted(SRC.rglob("*.py"))


class Trees(dict[Path, ast.Module]):
    """The parsed files. Each is parsed when a test first asks for it: all jobs of pytest import this module, and few run it."""

    def __missing__(self, file: Path) -> ast.Module:
        self[file] = ast.parse(file.read_text())
        return self[file]


TREES = Trees()


@cache
def nodes(tree: ast.Module) -> list[ast.AST]:
    """All nodes of a parsed file. To walk it anew for each rule would take most of the time of these tests."""
    return list(ast.walk(tree))


def in_each_file(finds: Callable[[Path], list[str]]) -> Callable[[], None]:
    """One test of all files, which fails with every line that breaks the rule: a test per file costs more than it looks at."""

    def test() -> None:
        assert [line for file in FILES for line in finds(file)] == []

    test.finds = finds
    return test


LINES_MAX = 800
LINES_WITHOUT_A_REASON_MAX = 500
WHY_SO_LONG: dict[str, str] = {
    "member/member.py": "one class: the runner of the member's machine, and the asyncio API",
    "member/presence.py": "one class: all that one key of a member watches, reads and writes",
    "testing/checkers.py": "one checker for each guarantee of safety, which are read beside each other",
}
"""Files of more than LINES_WITHOUT_A_REASON_MAX lines, and why each is one thing."""
FUNCTION_MAX = 60

BAD_STARTS = re.compile(
    r"(Who|Whoever|Whom|Whose|What|Whatever|Which|Whichever|Of|That|Those|These|Nobody|Nothing|None|Neither|Everybody|Anybody"
    r"|See|It|Its|They|Them|Their|Such|By|In|On|At|From|To|With|Without|Within|Under|Over|Until|Else|And|But|Or|Nor|Not|So|Then"
    r"|Likewise|Also|Still|Ours|Theirs)\b"
)
"""First words of a docstring that does not say what the thing is or does: a question word, a pronoun, an inverted clause."""
BAD_SENTENCES = re.compile(r"(?:^|[.;:!?] )(Who|Whoever|Of what|Of whom) [a-z]")
"""Sentences without a subject that a reader can name. A question ends with a question mark and is none."""
BAD_SHARE_MAX = 0.02

IMPORTS = {
    # package: what it may import, all of it further up in this table, so that there is no cycle.
    "printable": "",
    "errors": "printable",
    "_version": "",
    "core": "errors printable",
    "worker": "core",
    "system": "errors",
    "config": "core errors system",
    "engines": "errors",
    "engines.embedded": "engines config system errors printable",
    "engines.etcd.client": "system errors printable",
    "engines.etcd": "engines engines.etcd.client config system errors",
    "engines.quorum": "engines engines.embedded engines.etcd engines.etcd.client config system errors",
    "engines.register": "engines system errors",
    "drivers": """core engines engines.embedded engines.etcd engines.etcd.client engines.quorum engines.register config system
        errors""",
    "member": "core config engines system errors printable _version",
    "jax": "errors",
    "launch": "core member errors printable",
    "aio": "member drivers config engines system errors",
    "blocking": "aio member core config engines system errors",
    "__init__": "aio blocking member core config engines system errors _version",
    "operate": "member drivers core config engines engines.embedded engines.register system errors _version",
    "web": "operate drivers core config engines engines.embedded system errors _version",
    "cli": "web operate launch aio member drivers core config engines engines.embedded errors printable _version",
    "torchrun": "blocking member core config engines errors system",
    "torch": "torchrun aio blocking core config errors system worker",
    "torchrun.rendezvous": """torchrun blocking operate member drivers core config engines engines.etcd engines.register system
        errors""",
    "testing": "operate member core config engines engines.embedded engines.register system errors",
    "__main__": "cli",
}
"""The architecture, as who may import whom. A package is a folder; a module of the top level is one by itself.

    __main__   cli   torchrun.rendezvous   torch   testing          commands, torch's names, workers that stay, the simulator
     worker                                                         for training programs: needs the core only
                          torchrun                                  torch's launcher
                           web                                      metrics and a page about runs
                         operate                                    what people do with a run from outside
                    blocking    aio    launch                       the public API; the workers of `rdzv run`
                  member     drivers                                one member; the driver for an endpoint
                    engines.quorum                                  an etcd cluster that the job runs by itself
         engines.embedded  engines.etcd  engines.register           three engines
                     engines   config                               the port and the reference engine; settings
                       core    system                               the rules; clock, timers, sockets
                           errors
                         printable                                  texts of others, made fit to be shown
"""
TOP_MODULES_MAX = 12

PURE = {
    "asyncio", "datetime", "logging", "multiprocessing", "os", "pathlib", "random", "secrets", "select", "selectors", "signal",
    "socket", "subprocess", "tempfile", "threading", "time", "uuid",
}  # fmt: skip
"""What `core` must not import: whatever tells it something that is not in its arguments."""

THIRD_PARTY = {"msgspec": "", "starlette": "web/", "uvicorn": "web/", "prometheus_client": "web/",
    "torch": ("torchrun/", "torch/"), "jax": "jax.py", "grpc": "engines/etcd/", "cryptography": "engines/quorum/",
    "typer": "cli/", "rich": "cli/", "typing_extensions": ("errors.py", "config/options.py")}  # fmt: skip
"""Which package may be imported in which place; '' is everywhere. `typing_extensions` is read by type checkers only."""

UNSAFE = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
WALL_CLOCK = {
    "time.time", "time.time_ns", "time.gmtime", "time.localtime", "time.ctime", "datetime.now", "datetime.utcnow",
    "datetime.today", "date.today", "utils.formatdate",
}  # fmt: skip
WAITS_ONCE = {
    "cli/completion.py", "cli/demo.py", "engines/embedded/server.py", "engines/etcd/client/diagnose.py", "operate/doctor.py",
    "system/processes.py", "torchrun/rendezvous/dynamic_rendezvous.py", "torchrun/rendezvous/etcd_rendezvous_backend.py",
}  # fmt: skip
"""Where `asyncio.wait_for` may drop a cancellation, as it does before Python 3.12: the task soon ends by itself."""
READS_IT = {"system/node.py"}
"""Where a stamp for people is made."""
SHOWS_IT = {
    "stamp": {
        "system/node.py", "member/presence.py", "member/journal_file.py", "operate/commands.py", "operate/run_viewer.py"
    },
    "http_date": {"system/node.py", "operate/doctor.py", "engines/embedded/session.py"},
}  # fmt: skip
"""Who may ask for one: to write it into the journal and its file, to tell people how old an entry is, and for the doctor."""


def package_of(module: str) -> str:
    """The package of IMPORTS that a dotted name below `rdzv` belongs to; "" is the package itself."""
    parts = module.split(".")
    while parts and ".".join(parts) not in IMPORTS:
        parts.pop()
    return ".".join(parts) or "__init__"


def own_package(file: Path) -> str:
    return package_of(".".join(file.relative_to(SRC).with_suffix("").parts))


def imports(file: Path) -> Iterator[tuple[int, str]]:
    """Every import of a file, wherever it stands, as (line, absolute dotted name)."""
    package = ["rdzv", *file.relative_to(SRC).parts[:-1]]
    for node in nodes(TREES[file]):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            start = ".".join([*base, node.module] if node.module else base)
            # `from . import x` names a module only together with x.
            for alias in node.names:
                yield node.lineno, f"{start}.{alias.name}" if start == "rdzv" or not node.module else start


def own_imports(file: Path) -> Iterator[tuple[int, str]]:
    for line, name in imports(file):
        if name.split(".")[0] == "rdzv":
            yield line, package_of(name.removeprefix("rdzv").lstrip("."))


def where(file: Path, line: int) -> str:
    return f"{file.relative_to(ROOT)}:{line}"


def test_the_files_are_found():
    assert {"errors.py", "settings.py"} <= {file.name for file in FILES}


def test_the_table_of_imports_has_no_cycle():
    seen = set()
    for package, allowed in IMPORTS.items():
        assert set(allowed.split()) <= seen, f"{package} may import only what stands above it"
        seen.add(package)


@in_each_file
def test_a_package_imports_only_what_the_table_allows(file):
    mine = own_package(file)
    allowed = {mine, *IMPORTS[mine].split()}
    return [f"{where(file, line)} imports {package}" for line, package in own_imports(file) if package not in allowed]


def test_the_table_allows_nothing_that_is_not_needed():
    needed = {package: set() for package in IMPORTS}
    for file in FILES:
        needed[own_package(file)] |= {package for _, package in own_imports(file)} - {own_package(file)}
    assert {package: sorted(names) for package, names in needed.items()} == {
        package: sorted(allowed.split()) for package, allowed in IMPORTS.items()
    }


def test_the_top_of_the_package_is_small():
    assert len(list(SRC.glob("*.py"))) <= TOP_MODULES_MAX


def test_every_package_says_what_belongs_there():
    for folder in {file.parent for file in FILES} - {SRC}:
        tree = TREES[folder / "__init__.py"]
        assert ast.get_docstring(tree), folder


def test_no_class_name_is_defined_twice():
    # These modules bear torch's names, whatever others are called.
    ours = [file for file in FILES if file.parent != SRC / "torchrun" / "rendezvous"]
    places = {}
    for file in ours:
        for node in nodes(TREES[file]):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(where(file, node.lineno))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


@in_each_file
def test_the_core_is_pure(file):
    if own_package(file) != "core":
        return []
    return [f"{where(file, line)} imports {name}" for line, name in imports(file) if name.split(".")[0] in PURE]


@in_each_file
def test_other_packages_are_imported_only_where_they_belong(file):
    inside = file.relative_to(SRC).as_posix()
    wrong = []
    for line, name in imports(file):
        top = name.split(".")[0]
        if top in sys.stdlib_module_names or top == "rdzv":
            continue
        if top not in THIRD_PARTY or not inside.startswith(THIRD_PARTY[top]):
            wrong.append(f"{where(file, line)} imports {top}")
    return wrong


@in_each_file
def test_nothing_is_read_that_could_run_code(file):
    wrong = [f"{where(file, line)} imports {name}" for line, name in imports(file) if name.split(".")[0] in UNSAFE]
    wrong += [
        f"{where(file, node.lineno)} calls {node.func.id}"
        for node in nodes(TREES[file])
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"eval", "exec"}
    ]
    return wrong


@in_each_file
def test_no_task_that_goes_on_can_miss_its_cancellation(file):
    if file.relative_to(SRC).as_posix() in WAITS_ONCE:
        return []
    return [
        f"{where(file, node.lineno)} uses asyncio.wait_for: use in_time of system/timers.py"
        for node in nodes(TREES[file])
        if isinstance(node, ast.Attribute) and node.attr == "wait_for" and getattr(node.value, "id", "") == "asyncio"
    ]


DESCRIBES_ITS_KINDS = {"core/wire.py"}
"""Files that convert only to kinds for which they have made decoders when they were imported."""


@in_each_file
def test_every_decoder_is_made_when_its_module_is_imported(file):
    """msgspec (0.22) describes a struct when a decoder first needs it, and keeps the description before it is whole.

    A second thread, or a child that is forked meanwhile, would use half of it and die by SIGSEGV.
    """
    converts = set() if file.relative_to(SRC).as_posix() in DESCRIBES_ITS_KINDS else {"msgspec.convert"}
    late = {"msgspec.json.Decoder", "msgspec.msgpack.Decoder", *converts}
    typed = {"msgspec.json.decode", "msgspec.msgpack.decode"}
    return [
        f"{where(file, call.lineno)} calls {name} in a function: make a decoder beside the struct, or at the top of the module"
        for function in nodes(TREES[file])
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for call in ast.walk(function)
        if isinstance(call, ast.Call)
        and ((name := ast.unparse(call.func)) in late or (name in typed and any(word.arg == "type" for word in call.keywords)))
    ]


@in_each_file
def test_no_wall_clock_is_read(file):
    inside = file.relative_to(SRC).as_posix()
    wrong = []
    for node in nodes(TREES[file]):
        if isinstance(node, ast.Attribute):
            owner = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
            names = [f"{owner}.{node.attr}"]
        elif isinstance(node, ast.ImportFrom):
            module = (node.module or "").rpartition(".")[2]
            names = [f"{module}.{alias.name}" for alias in node.names]
        else:
            continue
        if inside not in READS_IT:
            wrong += [f"{where(file, node.lineno)} uses {name}" for name in names if name in WALL_CLOCK]
        for name in names:
            owner, _, stamp = name.partition(".")
            if owner == "node" and inside not in SHOWS_IT.get(stamp, {inside}):
                wrong.append(f"{where(file, node.lineno)} uses {name}")
    return wrong


@in_each_file
def test_no_file_is_too_long_to_be_read_at_once(file):
    lines = len(file.read_text().splitlines())
    most = LINES_MAX if file.relative_to(SRC).as_posix() in WHY_SO_LONG else LINES_WITHOUT_A_REASON_MAX
    return [f"{where(file, lines)} is the last line, and {most} may be"] if lines > most else []


@in_each_file
def test_no_function_is_too_long_to_be_seen_at_once(file):
    return [
        f"{where(file, node.lineno)} {node.name} has {node.end_lineno - node.lineno + 1} lines"
        for node in nodes(TREES[file])
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno - node.lineno >= FUNCTION_MAX
    ]


@in_each_file
def test_a_module_says_what_lives_in_it(file):
    is_empty = not TREES[file].body
    return [] if is_empty or ast.get_docstring(TREES[file]) else [where(file, 1)]


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Every docstring of a file, those below an assignment too, with its line."""
    for node in nodes(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for before, here in zip([None, *body], body, strict=False):
            text = getattr(getattr(here, "value", None), "value", None)
            documented = before is None or isinstance(before, (ast.Assign, ast.AnnAssign))
            if documented and isinstance(here, ast.Expr) and isinstance(text, str):
                yield here.lineno, text


def comments(file: Path) -> Iterator[tuple[int, str]]:
    with file.open("rb") as source:
        for token in tokenize.tokenize(source.readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string.removeprefix("#").strip()


def test_docstrings_and_comments_are_plain_english():
    total, bad = 0, []
    for file in FILES:
        for line, text in docstrings(TREES[file]):
            total += 1
            if BAD_STARTS.match(text.strip()) or BAD_SENTENCES.search(text):
                bad.append(f"{where(file, line)} {text.strip().splitlines()[0]}")
        bad += [f"{where(file, line)} {text}" for line, text in comments(file) if BAD_SENTENCES.search(text)]
    assert total > 1_000
    assert len(bad) <= BAD_SHARE_MAX * total, "\n".join(bad)


def test_no_module_is_a_drawer_for_leftovers():
    drawers = {"utils", "util", "helpers", "common", "misc", "manager"}
    # These modules bear torch's names, whatever they are.
    ours = [file for file in FILES if file.parent != SRC / "torchrun" / "rendezvous"]
    assert [where(file, 1) for file in ours if drawers & {file.stem, *file.relative_to(SRC).parts[:-1]}] == []


def test_the_name_of_every_test_is_a_sentence():
    vague = []
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name.startswith("test_"):
                words = node.name.split("_")[1:]
                if len(words) < 3 and not ast.get_docstring(node):
                    vague.append(f"{where(file, node.lineno)} {node.name}")
    assert vague == []


# ---- importing the package


def python(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.strip()


def test_importing_the_package_brings_in_msgspec_and_the_standard_library_only():
    program = """if True:
        import sys
        before = set(sys.modules)
        import rdzv
        tops = {name.split(".")[0] for name in set(sys.modules) - before}
        print(*sorted(tops - set(sys.stdlib_module_names) - {"rdzv", "msgspec"}))
    """
    assert python(program) == ""


# ---- the tests above can fail


def test_a_forbidden_import_would_be_found(monkeypatch):
    module = sys.modules[__name__]
    bad = SRC / "core" / "bad.py"
    source = "import os\nfrom ..drivers import memory\nfrom .. import cli\nimport torch\nfrom rdzv.testing import loop\n"
    monkeypatch.setitem(TREES, bad, ast.parse(source))
    assert list(imports(bad)) == [
        (1, "os"), (2, "rdzv.drivers"), (3, "rdzv.cli"), (4, "torch"), (5, "rdzv.testing")
    ]  # fmt: skip
    assert list(own_imports(bad)) == [(2, "drivers"), (3, "cli"), (5, "testing")]
    for check in (
        module.test_the_core_is_pure,
        module.test_a_package_imports_only_what_the_table_allows,
        module.test_other_packages_are_imported_only_where_they_belong,
    ):
        assert check.finds(bad)


def test_a_forbidden_call_would_be_found(monkeypatch):
    module = sys.modules[__name__]
    bad = SRC / "bad.py"
    for source in (
        "import time\ntime.time()",
        "import datetime\ndatetime.datetime.now()",
        "from time import time",
        "from .system.node import http_date",
    ):
        monkeypatch.setitem(TREES, bad, ast.parse(source))
        assert module.test_no_wall_clock_is_read.finds(bad)
    for call in ("json.decode(b'', type=Kind)", "msgpack.Decoder(Kind)", "convert({}, Kind)"):
        monkeypatch.setitem(TREES, bad, ast.parse(f"def read():\n    return msgspec.{call}"))
        assert module.test_every_decoder_is_made_when_its_module_is_imported.finds(bad)
    for source in ("import pickle", "eval('1')"):
        monkeypatch.setitem(TREES, bad, ast.parse(source))
        assert module.test_nothing_is_read_that_could_run_code.finds(bad)
