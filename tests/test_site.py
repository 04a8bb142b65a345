"""The documentation site: it is built once, strictly, and then looked at. The pictures are drawn from the code's own tables."""

from __future__ import annotations

import functools
import html.parser
import http.server
import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
import urllib.parse
from pathlib import Path

import pytest

from rdzv.core.model import Phase
from support import browser as browsers
from support.once import made_once

pytest.importorskip("mkdocs", reason="mkdocs is not installed: the extra `docs` brings it")
ROOT = Path(__file__).parents[1]
API = ROOT / "tests" / "typing" / "public_api.txt"
HOSTS = re.compile(r"^(?:https?:)?//")
FIRST = 5
"""Results of a search that a reader sees without scrolling."""


class Links(html.parser.HTMLParser):
    """The links, the anchors and the loaded files of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.anchors |= {given.get("id") or "", given.get("name") or ""} - {""}
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        elif tag in ("script", "img", "iframe") and given.get("src"):
            self.loaded.append(given["src"])
        elif tag == "link" and given.get("rel") in ("stylesheet", "icon", "preload") and given.get("href"):
            self.loaded.append(given["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of a site that was built without a network: every proxy leads nowhere."""
    return made_once(tmp_path_factory, "site", build)


def build(folder):
    nowhere = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environ = {**os.environ, **nowhere, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def pages(site):
    return {page: Links(page.read_text()) for page in site.rglob("*.html")}


def test_every_link_leads_somewhere(site, pages):
    broken = []
    for page, found in pages.items():
        for link in found.links:
            path, _, anchor = urllib.parse.unquote(link).partition("#")
            if HOSTS.match(path) or path.startswith(("mailto:", "javascript:")) or page.name == "404.html":
                continue
            target = (page.parent / path).resolve() if path else page
            target = target / "index.html" if target.is_dir() else target
            there = target.exists() and (not anchor or target not in pages or anchor in pages[target].anchors)
            if not there and not anchor.startswith("__"):
                broken.append((page.relative_to(site).as_posix(), link))
    assert broken == []


def test_nothing_is_loaded_from_elsewhere(site, pages):
    assert {one for found in pages.values() for one in found.loaded if HOSTS.match(one)} == set()
    styles = "".join(file.read_text() for file in site.rglob("*.css"))
    assert re.findall(r"url\(['\"]?(?:https?:)?//[^)]+", styles) == []
    assert not [page for page in pages if 'class="mermaid"' in page.read_text()], "its script would come from elsewhere"


def test_every_document_is_in_the_navigation(site):
    start = (site / "index.html").read_text()
    names = {file.stem for file in (ROOT / "docs").glob("*.md")} | {"CHANGELOG", "CONTRIBUTING", "metrics"}
    assert {name for name in names if f'href="{name}.html"' not in start} == set()


def test_every_public_name_has_its_place(pages):
    anchors = {anchor for found in pages.values() for anchor in found.anchors}
    names = set(re.findall(r"^(rdzv(?:\.[a-z_]+)*\.[A-Za-z]\w*)", API.read_text(), re.MULTILINE)) - {"rdzv.aio", "rdzv.errors"}
    assert len(names) > 50
    assert names - anchors == set()


def test_every_public_member_is_shown(pages):
    """And no other: a method for other parts of rdzv is not on the list. An anchor names the class by its own name."""
    anchors = {".".join(anchor.split(".")[-2:]) for found in pages.values() for anchor in found.anchors}
    members = set(re.findall(r"^rdzv[\w.]*\.([A-Z]\w*\.[A-Za-z]\w*)", API.read_text(), re.MULTILINE))
    assert {"Store.check", "LiveWorld.check", "MemberStatus.state", "CauseKind.LOST", "JoinTimeout.present"} <= members
    assert members - anchors == set()
    assert {"AsyncRendezvous.join", "AsyncStore.check", "AsyncWorld.rank"} <= anchors
    assert not {"AsyncRendezvous.keep_out", "AsyncStore.finish", "AsyncWorld.moved_to"} & anchors


def test_the_main_methods_are_on_their_pages(site):
    assert "How long a call waits if it does not say" in (site / "api" / "rdzv.Store.html").read_text()
    assert "A number above those of all earlier rounds" in (site / "api" / "rdzv.World.html").read_text()
    shown = (site / "api" / "rdzv.Rendezvous.html").read_text()
    assert all(f"{name}</span>" in shown or f">{name}<" in shown for name in ("join", "leave", "wait_changed", "status"))
    assert "moved_to" not in (site / "api" / "rdzv.aio.html").read_text()


@pytest.mark.parametrize(
    ("word", "place"),
    [
        ("JoinTimeout", "errors.html#rdzv-e05-jointimeout"),
        ("JoinTimeout", "api/rdzv.errors.html#rdzv.errors.JoinTimeout"),
        ("linger", "settings.html"),
        ("Slurm", "slurm.html"),
        ("RDZV_TOKEN", "environment.html"),
        ("last_call", "settings.html"),
        ("rdzv_restart_seconds", "metrics.html"),
    ],
)
def test_a_search_finds_its_place(site, word, place):
    index = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    found = [one["location"] for one in index if word.lower() in (one["title"] + one["text"]).lower()]
    assert place in {location.partition("#")[0] for location in found} | set(found)


@pytest.fixture(scope="module")
def served(site):
    """The address of the site, on loopback. Its search does not work from a file."""
    handler = functools.partial(QuietHandler, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join(60)


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_words):
        pass


@pytest.fixture(scope="module")
def chromium():
    reason = browsers.why_not("chromium", "chromium-driver", chromium_driver="chromedriver")
    if reason:
        pytest.skip(f"NOT TESTED in a browser: {reason}")
    with browsers.browser() as driver:
        browsers.look(driver, 1300, 900)
        yield driver


@pytest.mark.parametrize(
    ("word", "place"),
    [
        ("JoinTimeout", "errors.html#rdzv-e05-jointimeout"),
        ("linger", "settings.html"),
        ("Slurm", "slurm.html"),
        ("alert", "walkthrough.html#5-set-an-alert"),
        ("kill", "walkthrough.html#2-kill-one"),
        ("journal", "torchrun.html#the-journal-that-stays"),
    ],
)
def test_a_reader_who_searches_is_shown_the_place_among_the_first(served, chromium, word, place):
    chromium.get(f"{served}/index.html")
    field = chromium.find_element("css selector", ".md-search__input")
    field.click()
    field.send_keys(word)

    def shown():
        links = chromium.execute_script("return [...document.querySelectorAll('.md-search-result__link')].map(a => a.href)")
        return [re.sub(r"\?h=[^#]*", "", link.removeprefix(f"{served}/")) for link in links]  # The words to highlight.

    browsers.until(lambda: place in shown()[:FIRST], f"{place} among {FIRST} results of {word!r}")


# ---- the pictures


def tool(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["phases.svg", "join.svg", "loss.svg", "member.svg"])
def test_a_picture_is_drawn_from_the_code(name, request):
    drawn, file = tool("pictures").PICTURES[name](), ROOT / "docs" / "pictures" / name
    if request.config.getoption("--rewrite"):
        file.write_text(drawn)
    else:
        assert file.read_text() == drawn, "run `make pictures` and look at the result"


def test_the_pictures_tell_what_happens():
    pictures = tool("pictures")
    assert {phase.value for phase in Phase} <= set(re.findall(r">(\w+)</text>", pictures.phases()))
    changes = {("open", "sealed"), ("sealed", "broken"), ("broken", "sealed"), ("sealed", "closed")}
    assert changes <= set(pictures.phase_changes())
    assert "round 1 broken: b lost" in pictures.PICTURES["loss.svg"]()
    assert "last call over" in pictures.PICTURES["join.svg"]()


def test_the_recording_of_the_demo_is_of_a_whole_run():
    shown = (ROOT / "docs" / "pictures" / "demo.svg").read_text()
    told = ("node0 starts", "all 4 agree on round 1", "node1 is killed", "node1 lost", "all 3 agree on round 2")
    for words in (*told, "all 4 agree on round 3"):
        assert words in shown
    assert "://" not in shown.replace("http://www.w3.org/2000/svg", "")
