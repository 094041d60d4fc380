"""Runs every Python and shell block of the README and the manual as a reader would type it, with small settings.

The blocks of a page run in order, in one process, one namespace and one folder; the commands of the README run on a
pseudo-terminal of 80 columns. A comment on the line before a block
changes how it is run. Semicolons separate several directives:

- ``<!-- test: skip, REASON -->``: do not run the block;
- ``<!-- test: replace A with B -->``: replace a part of the text, for example to run fewer steps;
- ``<!-- test: first COMMAND -->``: first run a command that the reader has run elsewhere;
- ``<!-- test: file PATH -->``: write the block to a file, as the page says, instead of running it.

``outputs/…`` stands for the newest run, ``outputs/sweeps/…`` for the newest sweep.
"""

import re
import shlex
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from pseudo_terminal import on_a_terminal, too_wide

import rlox
from rlox.algorithms import ALGORITHMS
from rlox.buffers import BUFFERS
from rlox_cli.config.presets import choice_names, read_presets

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(
    r"(?:^<!-- test: (?P<how>.*?)\s*-->\n)?^```(?P<language>bash|python|yaml)\n(?P<text>.*?)^```$", re.M | re.S
)
# Defaults for commands that do not set these.
SMALL = {"total_timesteps": "600", "eval.n_points": "1", "eval.n_episodes": "2", "logger": "none"}
# Smaller settings for families with slow updates.
SMALLER = {
    "off-policy": {"total_timesteps": "200", "algo.learning_starts": "100"},
    "offline": {"total_timesteps": "100"},
    "world model": {"total_timesteps": "208", "algo.learning_starts": "200"},
}
MOST_STEPS = 1_536


class Block(NamedTuple):
    """A block of a page and the directives for running it."""

    line: int
    language: str
    text: str
    how: list[tuple[str, str]]  # verb and argument of each directive


def blocks_of(page: Path) -> list[Block]:
    found, content = [], page.read_text()
    for match in BLOCK.finditer(content):
        text = match["text"]
        how = [
            tuple(part.split(" ", 1)) for part in re.split(r"; (?=skip|replace|first|file)", match["how"] or "") if part
        ]
        for verb, rest in how:
            if verb == "replace":
                old, new = (part.replace("\\n", "\n") for part in rest.split(" with ", 1))
                assert old in text, f"{page.name}: {old!r} is to be replaced in a block that does not hold it"
                text = text.replace(old, new)
        found.append(Block(content.count("\n", 0, match.start("text")) + 1, match["language"], text, how))
    return found


def newest(pattern: str) -> str:
    paths = [path.parent for path in Path("outputs").rglob(pattern)]
    return str(max(paths, key=lambda path: (path / pattern).stat().st_mtime))


def words_of(command: str) -> list[str]:
    """The words of a command line, with small settings if it trains."""
    words = shlex.split(command, comments=True)
    words = [re.sub("outputs/sweeps/…", lambda _: newest("sweep.jsonl"), word) for word in words]
    words = [re.sub("outputs/…", lambda _: newest("metrics.jsonl"), word) for word in words]
    if words[1] != "train":
        return words
    typed = dict(word.split("=", 1) for word in words if "=" in word)
    families = {**dict.fromkeys(("dqn", "sac", "td3"), "off-policy"), "dreamer": "world model"}
    algo = typed.get("algo", "")
    family = families.get(read_presets().get(algo, algo), "offline" if "dataset" in typed else "")
    small = SMALL | SMALLER.get(family, {})
    if "total_timesteps" in typed:
        most = int(small["total_timesteps"]) if family else MOST_STEPS
        steps = min(int(float(typed["total_timesteps"])), most)
        words = [f"total_timesteps={steps}" if word.startswith("total_timesteps=") else word for word in words]
    if "resume" not in typed:
        words += [f"{key}={value}" for key, value in small.items() if key not in typed]
    return words


@pytest.fixture
def own_tables():
    """Remove everything that a page registers before the next page runs."""
    tables, modules = (ALGORITHMS, BUFFERS), set(sys.modules)
    before = [dict(table) for table in tables]
    yield
    for table, entries in zip(tables, before, strict=True):
        table.clear()
        table.update(entries)
    for name in set(sys.modules) - modules:
        if name.startswith("my_"):
            del sys.modules[name]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_blocks_run(page, command, tmp_path, monkeypatch, own_tables):
    monkeypatch.syspath_prepend(tmp_path)
    namespace = {"__name__": "__main__"}

    def shell(text):
        for line in text.replace("\\\n", " ").splitlines():
            if not line.split("#")[0].strip():
                continue
            program, *words = words_of(line)
            assert program == "rlox", f"{page.name}: this test runs only rlox, got {line!r}; say why it is left out"
            if page.name == "README.md":  # as its reader sees it
                code, lines = on_a_terminal(80, *words, cwd=tmp_path)
                error = "\n".join(lines)
                assert "Traceback" not in error
                assert too_wide(lines, 80) == []
            else:
                code, _, error = command(*words)
            assert not code, f"{page.name}: {line}\n{error}"

    for block in blocks_of(page):
        how = dict(block.how)
        if "skip," in how:
            assert how["skip,"], "say why it is left out"
            continue
        for verb, rest in block.how:
            if verb == "first":
                shell(rest)
        if "file" in how:
            path = tmp_path / how["file"]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
        elif block.language == "python":
            lines = "\n" * (block.line - 1) + block.text  # so that tracebacks have the line numbers of the page
            exec(compile(lines, str(page), "exec"), namespace)
        elif block.language == "bash":
            shell(block.text)
        else:
            pytest.fail(f"{page.name}, line {block.line}: a yaml block must be a file")


def test_few_blocks_are_skipped():
    blocks = [block for page in PAGES for block in blocks_of(page)]
    reasons = [(block, reason) for block in blocks for verb, reason in block.how if verb == "skip,"]
    # A reason may name another test that runs the block.
    elsewhere = [found[0] for _, reason in reasons if (found := re.findall(r"tests/[\w/]+\.py", reason))]
    assert all((ROOT / path).is_file() for path in elsewhere)
    assert len(blocks) > 70
    assert len(reasons) - len(elsewhere) <= 11
    assert all(block.language == "bash" for block, reason in reasons if "tests/" not in reason)


def test_pages_with_hand_written_loops_set_one_thread():
    texts = {
        page.name: "".join(block.text for block in blocks_of(page) if block.language == "python") for page in PAGES
    }
    loops = {name: text for name, text in texts.items() if "optimizer.step()" in text}
    assert loops.keys() >= {"README.md", "loops.md"}
    for name, text in loops.items():
        assert "torch.set_num_threads(1)" in text.partition("optimizer.step()")[0], name


def test_every_algorithm_has_a_page():
    assert {path.stem for path in (ROOT / "docs" / "algorithms").glob("*.md")} == {
        "index",
        "best_of_n",
        *choice_names(),
    }


def test_every_public_name_is_in_the_reference():
    text = "\n".join(path.read_text() for path in (ROOT / "docs" / "reference").glob("*.rst"))
    listed = re.findall(r"^\.\. auto\w+:: rlox\.(\w+)$", text, re.MULTILINE)
    assert sorted(set(listed)) == sorted(set(rlox.__all__) - {"__version__"})


def test_statements_about_bits_are_about_cpus():
    """Sums on a GPU depend on the order of its threads."""
    pages = {name: (ROOT / name).read_text() for name in ("README.md", "docs/guides/runs.md", "docs/guides/resume.md")}
    for name, text in pages.items():
        for sentence in re.findall(r"[^.]*same seed gives the same run[^.]*\.", text):
            assert "CPU" in sentence, name
        assert re.search(r"on a\s+GPU", text, re.IGNORECASE), name
    assert re.search(r"several\s+GPUs have only been simulated", pages["README.md"])
    assert "Exact figures in\nthis manual are from an Intel Xeon" in pages["docs/guides/runs.md"]


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200
