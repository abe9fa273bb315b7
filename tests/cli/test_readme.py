"""What README.md says is true: settings, commands, links, and the table it points to."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from pageweaver_sglang import Config
from pageweaver_sglang.cli import main, parser
from pageweaver_sglang.config import RESERVED_ENV

from . import load_script

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
DOCUMENTS = ["README.md", "CONTRIBUTING.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]


def settings_rows():
    block = README.split("<!-- settings", 1)[1].split("<!-- /settings -->", 1)[0]
    rows = [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in block.splitlines()[1:] if line]
    assert rows[0] == ["setting", "variable", "default", "allowed", "meaning"]
    return rows[2:]


def test_settings_table_is_the_configuration():
    expected = [
        [name, f"PAGEWEAVER_{name.upper()}", field.default, field.description]
        for name, field in Config.model_fields.items()
    ]
    found = [
        [name, variable, yaml.safe_load(default), allowed] for name, variable, default, allowed, _ in settings_rows()
    ]
    assert found == expected
    assert all(meaning for *_, meaning in settings_rows())


def test_no_unknown_variable_is_named():
    known = {row[1] for row in settings_rows()} | set(RESERVED_ENV)
    for document in DOCUMENTS:
        assert set(re.findall(r"PAGEWEAVER_[A-Z_]+", (ROOT / document).read_text())) <= known, document


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_and_paths_exist(document):
    text = (ROOT / document).read_text()
    folder = (ROOT / document).parent
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if "://" not in target:
            assert (folder / target).exists(), target
    for path in re.findall(r"(?<![\w/])(?:scripts|tests|kernels|docs|configs|pageweaver_sglang)/[\w./-]*\w", text):
        assert (ROOT / path).exists(), path


def test_the_two_commands():
    commands = re.findall(r"^    (\./scripts/\S+)", README, flags=re.MULTILINE)
    assert commands == ["./scripts/demo.sh", "./scripts/test.sh"]
    for command in commands:
        assert (ROOT / command).stat().st_mode & 0o111
        subprocess.run(["bash", "-n", str(ROOT / command)], check=True)


def test_commands_are_understood():
    for line in re.findall(r"pageweaver (doctor|demo[^\n`]*)", README):
        parser().parse_args(line.split())
    build = subprocess.run(
        [sys.executable, "-m", "pageweaver_sglang.build", "--help"], cwd=ROOT, capture_output=True, check=False
    )
    assert build.returncode == 0


def test_results_table(tmp_path, capsys):
    report = tmp_path / "report.json"
    assert main(["demo", "--workload", "ctx8k", "--device", "cpu", "--groups", "1", "--json", str(report)]) == 0
    results_table = load_script("results_table")
    text = results_table.markdown(json.loads(report.read_text()))
    assert "| original | 8 | 22,567 | 40,384 |" in text
    assert "left out by --device cpu" in text
    run = {"cache": "cold", "mode": "graph", "timings": {"union8": {"median_ms": 1.5, "min_ms": 1.4, "max_ms": 1.62}}}
    shown = results_table.timing_table([run], "arm", 1.0, 2, {"error": ["3.6%"]})
    assert shown.splitlines()[-1] == "| `union8` | 1.50 (1.40-1.62) | 3.6% |"


@pytest.mark.parametrize(
    ("content", "message"), [(None, "No such file"), ("x", "not a JSON file"), ("{}", "no report")]
)
def test_results_table_of_something_else(monkeypatch, tmp_path, content, message):
    file = tmp_path / "file.json"
    if content is not None:
        file.write_text(content)
    monkeypatch.setattr("sys.argv", ["results_table.py", str(file)])
    with pytest.raises(SystemExit, match=message):
        load_script("results_table").main()


@pytest.mark.parametrize("script", ["fit_auto.py", "scaling.py --table", "results_table.py"])
def test_a_report_that_is_missing(script):
    name, *options = script.split()
    command = [sys.executable, str(ROOT / "scripts" / name), *options, "nowhere.json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 1
    assert done.stderr == f"{name}: nowhere.json: No such file or directory\n"


@pytest.mark.parametrize("script", ["tune_portable", "profile_target"])
def test_a_workload_that_is_missing(script, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", [f"{script}.py", "nowhere.npz"])
    with pytest.raises(SystemExit, match="2"):
        load_script(script).main()
    assert "error: nowhere.npz: " in capsys.readouterr().err


def test_tuning_without_triton(monkeypatch):
    """PyTorch's builds for CPUs come without it."""
    for module in [name for name in sys.modules if name.startswith("pageweaver_sglang.cuda.portable")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.delattr("pageweaver_sglang.cuda.portable", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(SystemExit, match=r"tune_portable\.py: .*triton.*bring Triton"):
        load_script("tune_portable")


def test_committed_reports_are_readable():
    """Every committed result of the demo can be printed, and says what it was measured on."""
    results_table = load_script("results_table")
    for path in sorted((ROOT / "benchmarks" / "results").rglob("*.json")):
        report = json.loads(path.read_text())
        assert {"gpus", "versions", "commit", "command"} <= set(report["environment"]), path
        if "counts" in report:
            assert results_table.markdown(report)
