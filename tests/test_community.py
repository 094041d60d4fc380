"""Files around the code: generated ones are fresh, and those that name files, commands or versions are right."""

import importlib.util
import re
from pathlib import Path

import pytest
import yaml

import rlox

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def summaries():
    spec = importlib.util.spec_from_file_location("summaries", ROOT / "docs" / "summaries.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_summaries_for_agents_are_fresh(summaries):
    """If this fails: python docs/summaries.py"""
    assert (ROOT / "AGENTS.md").read_text() == summaries.agents()
    assert (ROOT / "llms.txt").read_text() == summaries.llms()


def test_llms_txt_lists_every_page():
    text = (ROOT / "llms.txt").read_text()
    assert re.match(r"# rlox\n\n> .+\n\n", text)  # the form that llmstxt.org describes
    links = re.findall(r"^- \[[^\]]+\]\(([^)]+)\): .*\w.*$", text, re.MULTILINE)
    assert all((ROOT / link).exists() for link in links)
    pages = {path.relative_to(ROOT).as_posix() for end in ("md", "rst") for path in (ROOT / "docs").rglob(f"*.{end}")}
    assert pages - {*links} == {"docs/index.md"}


def test_summaries_notice_a_section_that_was_renamed(summaries):
    with pytest.raises(ValueError, match="there must be a section 'Nothing'"):
        summaries._section("# A\n\n## B\n\ntext\n", "Nothing")


@pytest.mark.parametrize("path", sorted((ROOT / ".github").rglob("*.yml")), ids=lambda path: path.name)
def test_files_of_github_are_yaml_of_the_right_form(path):
    data = yaml.safe_load(path.read_text())
    if path.parent.name == "workflows":
        assert data["permissions"] == {"contents": "read"}  # a job asks for more where it needs it
        for job in data["jobs"].values():
            assert job["runs-on"]
            assert any(step.get("uses", "").startswith("actions/") or "run" in step for step in job["steps"])
    elif path.parent.name == "ISSUE_TEMPLATE" and path.stem != "config":
        assert {"name", "description", "body"} <= data.keys()
        ids = [part["id"] for part in data["body"]]
        assert len(ids) == len({*ids})
        assert all(part["attributes"]["label"] for part in data["body"])
    elif path.stem == "dependabot":
        assert data["version"] == 2
        pinned = re.findall(r"^([\w-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
        (pip,) = (one for one in data["updates"] if one["package-ecosystem"] == "pip")
        assert {one["dependency-name"] for one in pip["ignore"]} == {*pinned}


# The first versions on Node 24: runners have had no Node 20 since September 2026, and what needs it does not start.
NODE_24 = {
    "actions/checkout": 5,
    "actions/deploy-pages": 5,
    "actions/download-artifact": 7,
    "actions/setup-python": 6,
    "actions/upload-artifact": 6,
    "actions/upload-pages-artifact": 5,
}


@pytest.mark.parametrize("path", sorted((ROOT / ".github/workflows").glob("*.yml")), ids=lambda path: path.name)
def test_workflows_use_actions_that_runners_can_start(path):
    used = re.findall(r"uses: ([\w/-]+)@v(\d+)", path.read_text())
    assert used
    for action, major in used:
        assert int(major) >= NODE_24[action], action


def test_the_citation_is_of_this_version():
    data = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert data["version"] == rlox.__version__
    assert (
        str(data["date-released"])
        == re.search(
            rf"^## {re.escape(rlox.__version__)} \((.*)\)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
        )[1]
    )
    assert {"cff-version", "message", "title", "authors", "license"} <= data.keys()


def test_every_version_in_the_changelog_has_a_date_and_kinds():
    text = (ROOT / "CHANGELOG.md").read_text()
    heads = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert heads[0] == "Unreleased"
    assert all(re.fullmatch(r"\d+\.\d+\.\d+ \(\d{4}-\d\d-\d\d\)", head) for head in heads[1:])
    versions = [tuple(map(int, head.split()[0].split("."))) for head in heads[1:]]
    assert versions == sorted(versions, reverse=True)
    kinds = {*re.findall(r"^### (.*)$", text, re.MULTILINE)}
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed"}
    assert {"Added", "Changed", "Fixed"} <= kinds


@pytest.mark.parametrize("name", ["SECURITY.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "docs/releasing.md"])
def test_what_these_pages_name_exists(name):
    text = (ROOT / name).read_text()
    for path in re.findall(r"`((?:docs|tests|conf|rlox|rlox_cli|\.ci|\.github|examples|benchmarks)/[\w./-]*)`", text):
        assert (ROOT / path).exists(), path
    assert not re.search(r"[\w.]+@[\w-]+\.\w+", text)  # no address that nobody reads
