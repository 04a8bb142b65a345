"""What mkdocs does not do by itself: pages for the API, pages for the files that documents link to, and pictures for Mermaid.

The documents stay as they are: links between them are relative, so viewers of the repository follow them, too. A link that
leaves docs/, such as `../examples/elastic_ddp.py`, leads on the site to a page with that file.
"""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
API = {
    "rdzv": "The names of `rdzv`, for programs without an event loop.",
    "rdzv.aio": "The same for programs with an event loop.",
    "rdzv.worker": "For training processes.",
    "rdzv.errors": "All exceptions. [errors.md](../errors.md) says what to do about each.",
    "rdzv.torch": "Training processes that stay when a node is lost: [stay.md](../stay.md).",
    "rdzv.jax": "JAX under `rdzv run`: [jax.md](../jax.md).",
    "rdzv.engines.etcd.server": "A real etcd for tests and single machines.",
}
"""The public modules, and a sentence about each."""
PUBLIC = ROOT / "tests" / "typing" / "public_api.txt"
"""Every public name with its signature, a line each. A test keeps it."""
OWN_PAGE = {"rdzv": ("Rendezvous", "World", "Store")}
"""Names with a page of their own."""
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".json": "json", ".sbatch": "bash", "": "text", ".toml": "toml"}
SEARCH_BOOST = {"Project": 0.25, "": 0.25}
"""How much the pages of a section count in a search: a reader wants to do something more often than to read its history."""
API_BOOST = 0.5
"""How much the pages of the API count: a word that is also the name of a method is explained on another page."""
LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


# ---- the API


def names_of(module: str) -> dict[str, str]:
    """Return the public names of a module, each with the path where it is defined, without importing anything."""
    path = ROOT / "src" / Path(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    tree = ast.parse(file.read_text())
    names: list[str] = []
    found: dict[str, str] = {}
    base = module.split(".") if path.is_dir() else module.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            names = ast.literal_eval(node.value)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = node.value.id  # As `World = AsyncWorld`.
        elif isinstance(node, ast.ImportFrom) and node.level:
            start = ".".join([*base[: len(base) - node.level + 1], *(node.module or "").split(".")]).strip(".")
            found |= {alias.name: f"{start}.{alias.name}" for alias in node.names}
        elif isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            found.setdefault(node.name, f"{module}.{node.name}")
    own = {name: found.get(name, f"{module}.{name}") for name in names}
    return {name: found.get(where, where) for name, where in own.items() if not name.startswith("_")}


def api_pages() -> dict[str, str]:
    """Return the pages of the API: one per public module, and one for each of the main classes."""
    pages: dict[str, str] = {}
    for module, sentence in API.items():
        names = {name: where for name, where in names_of(module).items() if name not in ("aio", "errors")}
        apart = OWN_PAGE.get(module, ())
        for name in apart:
            pages[f"api/{module}.{name}.md"] = f"# {module}.{name}\n\n{directive(module, name, names[name])}"
        rest = [name for name in names if name not in apart]
        links = "".join(f"- [{module}.{name}]({module}.{name}.md)\n" for name in apart)
        body = "\n".join(directive(module, name, names[name]) for name in rest)
        pages[f"api/{module}.md"] = f"# {module}\n\n{sentence}\n\n{links}\n{body}"
    return pages


def members_of(name: str) -> list[str]:
    """Return the public methods and fields of a class, given with its module."""
    return re.findall(rf"^{re.escape(name)}\.(\w+)", PUBLIC.read_text(), re.MULTILINE)


def directive(module: str, name: str, where: str) -> str:
    """Return the lines that show one name under its public path, with its public members."""
    shown = {"show_root_heading": "false", "show_root_toc_entry": "false", "heading_level": "3"}
    if members := members_of(f"{module}.{name}"):
        shown |= {"members": f"[{', '.join(members)}]", "show_if_no_docstring": "true"}
    options = "".join(f"      {option}: {value}\n" for option, value in shown.items())
    return f"## {module}.{name} {{ #{module}.{name} }}\n\n::: {where}\n    options:\n{options}"


def metrics_page() -> str:
    """Return the part of observe.md about metrics as a page of the reference."""
    page = (ROOT / "docs" / "observe.md").read_text()
    (section,) = re.findall(r"^## Metrics\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    return f"# Metrics\n\nThis is a part of [Metrics and the page](observe.md).\n{section}"


# ---- files outside of docs/


def text_page(target: Path) -> str:
    """Return a page with a file, or with the list of a folder's files."""
    name = target.relative_to(ROOT).as_posix()
    if target.is_dir():
        files = sorted(one for one in target.rglob("*") if one.is_file() and "__pycache__" not in one.parts)
        listed = [f"## {one.relative_to(target).as_posix()}\n\n{listing(one)}" for one in files]
        return f"# {name}\n\n" + "\n".join(listed)
    return f"# {name}\n\n{listing(target)}"


def listing(file: Path) -> str:
    """Return a file as a block of code."""
    text = file.read_text().rstrip("\n")
    fence = "`" * 4
    return f"{fence}{LANGUAGES.get(file.suffix, 'text')}\n{text}\n{fence}\n"


def outside(source: str, link: str) -> Path | None:
    """Return the file outside of docs/ that a page's link leads to, if it does."""
    if "://" in link or link.startswith(("/", "mailto:")):
        return None
    target = Path(posixpath.normpath((ROOT / "docs" / posixpath.dirname(source) / link).as_posix()))
    inside = target.is_relative_to(ROOT / "docs")
    return target if not inside and target.is_relative_to(ROOT) and target.exists() else None


def place_of(target: Path) -> str:
    """Return where the site has a file that is outside of docs/."""
    name = target.relative_to(ROOT).as_posix()
    if name == "README.md":
        return "index.md"
    if target.suffix in (".md", ".svg", ".png"):
        return name
    return f"files/{name}.md"


def linked(files: Files) -> dict[str, Path]:
    """Return all files outside of docs/ that documents lead to, by their place on the site."""
    found: dict[str, Path] = {}
    found |= {place_of(ROOT / name): ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")}
    waiting = [Path(str(file.abs_src_path)) for file in files.documentation_pages() if file.abs_src_path]
    waiting += found.values()
    while waiting:
        path = waiting.pop()
        source = posixpath.relpath(path.as_posix(), (ROOT / "docs").as_posix())
        for _, link, _ in LINK.findall(FENCE.sub("", path.read_text())):
            target = outside(source, link)
            if target is not None and place_of(target) not in found:
                found[place_of(target)] = target
                if target.suffix == ".md":
                    waiting.append(target)
    return found


ORIGIN: dict[str, str] = {}
"""Where a page's text comes from, as a path relative to docs/: links in it are relative to that."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the pages of the API into the navigation, where its place is marked."""
    pages = [{Path(place).stem: place} for place in api_pages()]

    def fill(entry: Any) -> Any:
        if isinstance(entry, dict):
            return {title: fill(value) for title, value in entry.items()}
        if isinstance(entry, list):
            return [filled for one in entry for filled in (pages if one == "API_PAGES" else [fill(one)])]
        return entry

    config.nav = fill(config.nav)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/."""
    for place, text in api_pages().items():
        files.append(File.generated(config, place, content=text))
    files.append(File.generated(config, "metrics.md", content=metrics_page()))
    for place, target in linked(files).items():
        ORIGIN[place] = f"../{target.relative_to(ROOT).as_posix()}"
        if target.suffix == ".md":
            files.append(File.generated(config, place, content=target.read_text()))
        elif target.suffix in (".svg", ".png"):
            files.append(File.generated(config, place, abs_src_path=str(target)))
        else:
            page = File.generated(config, place, content=text_page(target))
            page.inclusion = page.inclusion.NOT_IN_NAV
            files.append(page)
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Lead links to where the site has their files, show the picture of the states instead of its source, rank the page."""
    here = page.file.src_uri
    source = ORIGIN.get(here, here)
    section = page.ancestors[-1].title if page.ancestors else ""
    boost = API_BOOST if here.startswith("api/") else SEARCH_BOOST.get(section, 1)
    page.meta.setdefault("search", {"boost": boost})

    def lead(match: re.Match[str]) -> str:
        before, link, after = match.groups()
        target = outside(source, link)
        if target is not None:
            place = place_of(target)
        elif source != here and "://" not in link and not link.startswith("mailto:"):
            # A link of README.md into docs/.
            place = posixpath.normpath(posixpath.join(posixpath.dirname(source), link)).removeprefix("../docs/")
        else:
            return match[0]
        return f"{before}{posixpath.relpath(place, posixpath.dirname(here) or '.')}{after}"

    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    led = "".join(part if part.startswith("```") else LINK.sub(lead, part) for part in parts)
    picture = "![The states of a member](pictures/member.svg)"
    return re.sub(r"^```mermaid\n.*?^```$", picture, led, flags=re.MULTILINE | re.DOTALL)
