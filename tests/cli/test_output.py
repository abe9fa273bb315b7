"""What every command does with an error: one line on standard error, the names in it whole."""

import pytest

from pageweaver_sglang.cli import main


@pytest.mark.parametrize(
    "command",
    [
        ("ab", "--model", "{}", "--out", "{}"),
        ("bench", "{}"),
        ("fuzz", "--device", "cpu", "--calls", "1", "--json", "{}/report.json"),
        ("demo", "--workload", "{}"),
        ("inspect", "{}"),
        ("capture", "--dir", "{}", "--on"),
        ("switch", "off", "--dir", "{}"),
        ("make-workload", "{}/small.npz"),
    ],
    ids=lambda command: command[0],
)
def test_a_long_name_stays_whole(command, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "60")
    file = tmp_path / "no workload of that name, but one [red]with spaces.npz"
    if command[0] in ("ab", "capture", "fuzz", "make-workload", "switch"):
        file.write_text("a file where a folder is meant")
    assert main([word.format(file) for word in command]) == 2
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert line.startswith(f"pageweaver {command[0]}: ")
    assert str(file) in line
    assert str(file) not in out
