"""The control file and the state files of a capture folder."""

from __future__ import annotations

import pytest

import pageweaver_sglang as pw
from pageweaver_sglang.capture.control import (
    CaptureError,
    Control,
    read_control,
    read_states,
    stamp,
    write_control,
    write_json,
)


def test_round_trip(tmp_path):
    assert read_control(tmp_path) is None
    assert stamp(tmp_path) is None
    control = Control(True, {"capture_layers": [3, 7], "capture_every": 2})
    write_control(tmp_path, control)
    assert read_control(tmp_path) == control
    first = stamp(tmp_path)
    write_control(tmp_path, Control(False, {}))
    assert stamp(tmp_path) != first
    assert [path.name for path in tmp_path.iterdir()] == ["control.json"]


def test_apply():
    base = pw.Config(window=64, capture_every=5, capture_max_mb=7)
    control = Control(True, {"capture_layers": [3], "capture_every": 2})
    assert control.apply(base) == pw.Config(window=64, capture_every=2, capture_max_mb=7, capture_layers=(3,))
    assert Control(False, {}).apply(base) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
        ("3", "must hold enabled and settings"),
        ('{"enabled": true}', "must hold enabled and settings"),
        ('{"enabled": 1, "settings": {}}', "enabled must be true or false, and settings a mapping"),
        ('{"enabled": true, "settings": []}', "enabled must be true or false, and settings a mapping"),
        ('{"enabled": true, "settings": {"mode": "native"}}', "unknown settings mode; allowed: capture_layers"),
        ('{"enabled": true, "settings": {"capture_dir": "x"}}', "unknown settings capture_dir"),
        ('{"enabled": true, "settings": {"capture_max_mb": 0}}', "capture_max_mb: got 0; allowed: an integer >= 1"),
    ],
)
def test_broken_files(tmp_path, text, message):
    (tmp_path / "control.json").write_text(text)
    with pytest.raises(CaptureError, match=rf"control\.json: .*{message}"):
        read_control(tmp_path)


def test_wrong_settings_are_not_written(tmp_path):
    with pytest.raises(pw.ConfigError, match="capture_every"):
        write_control(tmp_path, Control(True, {"capture_every": 0}))
    assert list(tmp_path.iterdir()) == []


def test_states(tmp_path):
    assert read_states(tmp_path / "none") == []
    write_json(tmp_path / "state-rank1.json", {"rank": 1})
    write_json(tmp_path / "state-rank0.json", {"rank": 0})
    (tmp_path / "state-rank2.json").write_text("{")
    assert read_states(tmp_path) == [{"rank": 0}, {"rank": 1}]
