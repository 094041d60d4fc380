"""Write AGENTS.md and llms.txt, which coding agents read, from the manual and CONTRIBUTING.md.

``python docs/summaries.py`` writes both; a test compares them with what this makes.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[1]
_SECTIONS = (
    "Set up",
    "The inner loop",
    "Add an algorithm",
    "Record what kernels stand for",
    "Generated files",
    "Style",
)
_COMMENT = re.compile(r"<!-- test: .*?-->\n", re.DOTALL)
_LINK = re.compile(r"\[([^\]]+)\]\([^)]*\)")


def agents() -> str:
    """Return AGENTS.md: how to work on this repository, and how to use rlox."""
    contributing, architecture, readme = map(_read, ("CONTRIBUTING.md", "docs/architecture.md", "README.md"))
    parts = [
        "# For coding agents",
        "Made by `python docs/summaries.py` from CONTRIBUTING.md, README.md and docs/architecture.md: edit those.",
        _wrap(_first_paragraph(readme)),
        _wrap(
            "This file is about work on the repository. `llms.txt` lists the pages about using rlox; `rlox VERB -h`, "
            "`rlox show` and `rlox ls` print what there is."
        ),
        *(f"## {name}\n\n{_section(contributing, name)}" for name in _SECTIONS),
        f"## Packages\n\n{_section(architecture, 'Packages')}",
        f"## Use rlox\n\n{_section(readme, 'Quick tour')}",
    ]
    return "\n\n".join(parts) + "\n"


def llms() -> str:
    """Return llms.txt: a summary, and a link with one sentence for each page of the manual."""
    about = _first_paragraph(_read("README.md"))
    parts = [
        "# rlox",
        f"> {about}",
        "Install: `pip install .` in a checkout. Train: `rlox train algo=ppo env=CartPole-v1`. Every key of a run has "
        "a type, a default and a meaning: `rlox show algo=ppo env=ID`. Links are relative to the repository's root.",
        f"## Start\n\n{_link('start')}",
    ]
    for caption, pages in re.findall(r":caption: (.*)\n:hidden:\n\n((?:.+\n)+?)```", _read("docs/index.md")):
        parts.append(f"## {caption}\n\n" + "\n".join(map(_link, pages.split())))
    more = [
        _link_to("README.md", "README", about),
        _link_to("CHANGELOG.md", "Changes", "What each version changes for its users."),
        _link_to("CONTRIBUTING.md", "Contributing", "How to build, test and change rlox."),
        _link_to("SECURITY.md", "Security", "What rlox promises about files and its network service, and what not."),
        _link_to("examples", "Examples", "Packages that extend rlox: an algorithm, environments, a memory, a logger."),
    ]
    return "\n\n".join([*parts, "## More\n\n" + "\n".join(more)]) + "\n"


def _read(name: str) -> str:
    return _COMMENT.sub("", (ROOT / name).read_text(encoding="utf-8"))


def _section(text: str, title: str) -> str:
    """Return what stands under a heading of the second level."""
    match = re.search(rf"^## {re.escape(title)}\n\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    if match is None:
        raise ValueError(f"summaries: there must be a section {title!r}, got none; name the new one in _SECTIONS")
    return _LINK.sub(r"\1", match[1]).rstrip()


def _first_paragraph(text: str) -> str:
    """Return the first paragraph of prose below the title, as one line."""
    body = re.sub(r"^(```|~~~).*?^\1$", "", text.partition("\n")[2], flags=re.MULTILINE | re.DOTALL)
    others = ("#", "|", "!", "<", "-", "=", "..", "    ", "[")  # headings, tables, pictures, lists, code
    paragraphs = (part.strip("\n") for part in re.split(r"\n\s*\n", body.lstrip("=\n")))
    return _LINK.sub(r"\1", _join(next((one for one in paragraphs if one and not one.startswith(others)), "")))


def _wrap(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def _join(text: str) -> str:
    return " ".join(text.split())


def _link(name: str) -> str | None:
    """Return the line of a page of the manual."""
    path = next(ROOT / "docs" / f"{name}{end}" for end in (".md", ".rst") if (ROOT / "docs" / f"{name}{end}").is_file())
    text = _read(str(path.relative_to(ROOT)))
    title = text.partition("\n")[0].lstrip("# ").strip()
    return _link_to(path.relative_to(ROOT).as_posix(), title, _first_paragraph(text))


def _link_to(path: str, title: str, about: str) -> str:
    sentence = re.split(r"(?<=[.!?:]) (?=[A-Z`])", about)[0].rstrip(":")
    return f"- [{title}]({path}){f': {sentence}' if sentence else ''}"


if __name__ == "__main__":
    for name, text in (("AGENTS.md", agents()), ("llms.txt", llms())):
        (ROOT / name).write_text(text, encoding="utf-8")
