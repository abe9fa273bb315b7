"""`pageweaver inspect`: files, folders and names; table, JSON, pictures; files that can't be read."""

import json

import pytest
from rich.console import Console

from pageweaver_sglang import inspection_plots
from pageweaver_sglang.cli import inspect, main
from pageweaver_sglang.synthetic import Recipe, make_workload


@pytest.fixture
def folder(tmp_path):
    """Two calls as a server records them, one in a subfolder, and a file that is half written."""
    for layer, place in ((3, tmp_path), (4, tmp_path), (5, tmp_path / "sub")):
        place.mkdir(exist_ok=True)
        workload = make_workload(Recipe(requests=((256, 9000),), types=3, seed=layer))
        object.__setattr__(workload, "layer", layer)
        workload.save(place / f"layer00{layer}.npz")
    (tmp_path / ".layer006.npz").write_bytes(b"half")
    (tmp_path / "state-rank0.json").write_text("{}")
    return tmp_path


def run(capsys, *arguments):
    code = main(["inspect", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, " ".join(captured.out.split()), " ".join(captured.err.split())


def test_a_folder(capsys, folder):
    report = folder / "reports" / "report.json"
    code, shown, errors = run(capsys, folder, "--json", report)
    assert (code, errors) == (0, "")
    assert "layer003: In the original order a visited page serves" in shown
    assert "together: In the original order" in shown
    content = json.loads(report.read_text())
    assert [one["layer"] for one in content["files"]] == [3, 4]
    assert content["together"]["layer"] is None
    assert content["together"]["edges"] == sum(one["edges"] for one in content["files"])
    assert content["files"][0]["requests"] == [[256, 9000]]
    assert 0 < content["files"][0]["neighbour_overlap"] < 1
    assert set(content["files"][0]["orders"]) == {"original", "w64", "w128"}
    assert content["thresholds"]["good_saving"] == 0.08


def test_many_calls_are_explained_by_layer(capsys, folder):
    workload = make_workload(Recipe(requests=((64, 900),)))
    for number in range(10):
        object.__setattr__(workload, "layer", number % 2)
        workload.save(folder / "sub" / f"call{number}.npz")
    (folder / "sub" / "layer005.npz").unlink()
    report = folder / "report.json"
    code, shown, _ = run(capsys, folder / "sub", "--json", report)
    assert code == 0
    assert "layer 0 together: " in shown
    assert "layer 1 together: " in shown
    assert "call3: " not in shown
    layers = json.loads(report.read_text())["layers"]
    assert layers["0"]["tokens"] == layers["1"]["tokens"] == 5 * 64


@pytest.mark.parametrize("width", [80, 100, 120])
def test_no_figure_is_cut_in_a_terminal(monkeypatch, capsys, folder, width):
    monkeypatch.setattr(inspect, "make_console", lambda: Console(width=width))
    code, shown, _ = run(capsys, folder, "ctx64k_a")
    assert code == 0
    assert "…" not in shown
    assert "│ 103,496 │ 11.0% │ 12.1% │" in shown
    assert ("│ 49,152 + 15,272 │" in shown) == (width == 120)


def test_json_alone(capsys, folder):
    assert main(["inspect", str(folder / "layer003.npz"), "--json", "-"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["failures"] == []
    assert content["files"][0]["verdict"]
    assert content["files"][0]["explanation"]


def test_each_file_once_and_recorded_names(capsys, folder):
    code, shown, _ = run(capsys, folder / "layer003.npz", folder, "packed")
    assert code == 0
    assert shown.count("layer003:") == 1
    assert "packed: In the original order" in shown
    assert "34,190" in shown


def test_what_cannot_be_read_is_named_and_the_rest_shown(capsys, folder):
    (folder / "layer004.npz").write_bytes(b"broken")
    code, shown, errors = run(capsys, folder, "nothing-of-that-name")
    assert code == 1
    assert "layer003:" in shown
    assert "layer004.npz: cannot be read" in errors
    assert "no workload 'nothing-of-that-name'" in errors


def test_nothing_to_read(capsys, tmp_path):
    code, shown, errors = run(capsys, tmp_path)
    assert (code, shown) == (2, "")
    assert "has no .npz files" in errors


@pytest.mark.skipif(inspection_plots.why_not() is not None, reason="needs matplotlib")
def test_pictures(capsys, folder):
    (folder / "sub" / "layer005.npz").rename(folder / "sub" / "layer003.npz")
    plots = folder / "plots"
    code, shown, _ = run(capsys, folder, folder / "sub", "--plots", plots)
    assert code == 0
    names = {f"{folder.name}-layer003.png", "sub-layer003.png", "layer004.png"}
    assert {path.name for path in plots.iterdir()} == names
    assert "layer004.png" in shown
    code, _, errors = run(capsys, folder, "--plots", plots, "--head", "1")
    assert code == 1
    assert "--head must be in 0..0, got 1" in errors


def test_without_matplotlib(capsys, folder, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, _, errors = run(capsys, folder, "--plots", folder / "plots")
    assert code == 2
    assert "matplotlib, which is not installed: pip install 'pageweaver-sglang[plots]'" in errors
    assert not (folder / "plots").exists()


def test_a_report_that_cannot_be_written(capsys, folder):
    code, _, errors = run(capsys, folder / "layer003.npz", "--json", folder / "layer004.npz" / "report.json")
    assert code == 1
    assert "cannot be written" in errors
