"""`pageweaver capture`: the line that starts a server, the control file, what the processes did."""

import json
import re
import shlex

import pytest

import pageweaver_sglang as pw
from pageweaver_sglang.capture.control import Control, read_control, write_json
from pageweaver_sglang.cli import main


def run(capsys, *arguments):
    code = main(["capture", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


ALL = "--layers 3,7 --chunks 0 --every 5 --max-mb 10 --max-calls 20 --max-seconds 30 --activations"
SETTINGS = {
    "capture_layers": "3,7",
    "capture_chunks": 0,
    "capture_every": 5,
    "capture_max_mb": 10,
    "capture_max_calls": 20,
    "capture_max_seconds": 30,
    "capture_activations": True,
}


def test_the_printed_line_means_the_options(capsys, tmp_path):
    folder = tmp_path / "with space"
    code, shown, _ = run(capsys, "--dir", folder, *ALL.split())
    assert code == 0
    (line,) = [line for line in shown.splitlines() if "sglang.launch_server" in line]
    words = shlex.split(line)
    env = dict(word.split("=", 1) for word in words if re.match(r"PAGEWEAVER_\w+=", word))
    assert pw.load_config(env=env) == pw.Config(capture_dir=str(folder), **SETTINGS)
    assert words[-2:] == ["--attention-backend", "pageweaver"]
    assert not folder.exists(), "only --on and --off write"


def test_on_and_off(capsys, tmp_path):
    folder = tmp_path / "calls"
    code, shown, _ = run(capsys, "--dir", folder, "--on", *ALL.split())
    assert code == 0
    assert "No server has used this folder yet" in shown
    assert read_control(folder) == Control(True, SETTINGS)
    shown = " ".join(run(capsys, "--dir", folder)[1].split())
    assert shown.count("control.json says on and goes before these settings") == 1
    assert run(capsys, "--dir", folder, "--off")[0] == 0
    assert read_control(folder) == Control(False, {})
    assert "says off" in run(capsys, "--dir", folder)[1]


def test_status(capsys, tmp_path):
    assert "No process has recorded" in run(capsys, "--dir", tmp_path, "--status")[1]
    write_json(
        tmp_path / "state-rank1-pid5.json",
        {"rank": 1, "pid": 5, "recording": False, "ended": "2 calls", "calls": 2, "mb": 1.5}
        | {"dropped": {"queue full": 3}, "indices_only": {"sink": 1}},
    )
    write_json(tmp_path / "state-rank0-pid4.json", {"rank": 0, "pid": 4, "recording": True, "calls": 7, "mb": 0.5})
    code, shown, _ = run(capsys, "--dir", tmp_path, "--status")
    assert code == 0
    for words in ("recording", "ended: 2 calls", "3 queue full", "1 sink", "1.5"):
        assert words in shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--layers x", "--layers: got 'x'; allowed: layer ids such as 3,7, or null (all)"),
        ("--every 0 --on", "--every: got '0'; allowed: an integer >= 1"),
        ("--max-mb 1.5", "--max-mb: got '1.5'; allowed: an integer >= 1"),
        ("--max-calls {", "--max-calls: got '{'"),
        ("--off --activations", "--off: takes no other option than --dir"),
        ("--status --every 3", "--status: takes no other option than --dir"),
        ("--status", "no such folder"),
    ],
)
def test_wrong_options(capsys, tmp_path, options, message):
    code, _, errors = run(capsys, "--dir", tmp_path / "none", *options.split())
    assert code == 2
    assert message in errors
    assert not (tmp_path / "none").exists()


def test_a_folder_that_cannot_be(capsys, tmp_path):
    (tmp_path / "file").touch()
    for action in ("--on", "--off"):
        code, _, errors = run(capsys, "--dir", tmp_path / "file" / "inside", action)
        assert code == 2
        assert f"pageweaver capture: {tmp_path / 'file'}" in errors
        assert "Errno" not in errors
    (tmp_path / "control.json").write_text("{")
    code, _, errors = run(capsys, "--dir", tmp_path)
    assert code == 2
    assert "control.json: cannot be read" in errors


def test_the_control_file_is_plain_json(capsys, tmp_path):
    run(capsys, "--dir", tmp_path, "--on", "--layers", "3")
    assert json.loads((tmp_path / "control.json").read_text()) == {"enabled": True, "settings": {"capture_layers": 3}}
