"""What an editor shows for YAML of rlox, asked of the language server that editors use."""

import shutil
from pathlib import Path

import pytest
from language_server import LanguageServer

ROOT = Path(__file__).parents[1]
PROGRAM = shutil.which("yaml-language-server")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PROGRAM is None, reason="needs `npm install -g yaml-language-server`"),
]


@pytest.fixture
def open_folder(tmp_path):
    """Start a server for a folder."""
    servers = []

    def start(folder):
        servers.append(LanguageServer(PROGRAM, folder))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def test_keys_are_completed_and_unknown_ones_marked_in_a_copied_file(open_folder, command, tmp_path):
    assert not command("cp", "experiment/ppo-smoke", "mine")[0]
    server, path = open_folder(tmp_path / "mine"), tmp_path / "mine/experiment/ppo-smoke.yaml"
    lines = path.read_text().splitlines()
    at, edited = len(lines), path.with_name("edited.yaml")
    server.open(edited, "\n".join([*lines, "algo:", "  gama: 0.9", "  gamma: 3", "  clip_", "total_timestep: 5"]))
    known = server.completions(edited, at + 3, 7)
    assert known["clip_eps"].startswith("the probability ratio is clipped")
    assert "learning_starts" not in known  # a key of other algorithms
    marks = server.diagnostics(edited)
    assert "gama is not allowed" in marks[at + 1]
    assert "maximum of 1" in marks[at + 2]
    assert "total_timestep is not allowed" in marks[at + 4]


def test_shipped_files_are_not_marked(open_folder):
    server, paths = open_folder(ROOT), sorted((ROOT / "conf").rglob("*.yaml"))
    for path in paths:
        server.open(path, path.read_text())
    assert {path.name: marks for path in paths if (marks := server.diagnostics(path))} == {}
