"""The switch, errors at run time, the state files and the thread behind them. Needs no SGLang."""

from __future__ import annotations

import json
import logging
import os
import stat
import subprocess
import sys
import time

import pytest
import torch
from test_step3 import Native, make_call

from pageweaver_sglang.api import sparse_prefill
from pageweaver_sglang.checks import UnsupportedError
from pageweaver_sglang.cli import main
from pageweaver_sglang.config import Config
from pageweaver_sglang.plugin import control, operations, step3, timing
from pageweaver_sglang.plugin.options import BackendError
from pageweaver_sglang.serving_ab.serverlog import read_log
from tests.waiting import wait_for


@pytest.fixture
def running(tmp_path):
    """Operations of this process with a folder of their own."""
    started = []

    def start(**settings):
        folder = settings.pop("control_dir", str(tmp_path))
        started.append(operations.Operations(Config(control_dir=folder, **{"mode": "pageweaver"} | settings)))
        return started[-1]

    yield start
    for each in started:
        each.close()


def serve(switch, **settings):
    return step3.Step3(Config(**{"mode": "pageweaver"} | settings), pool_page_size=128, switch=switch)


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# The switch ----------------------------------------------------------------------------------------------------------


def test_switch_is_looked_at_several_times_a_second():
    assert operations.POLL_SECONDS <= 0.3


def test_off_and_on_again(running, tmp_path, caplog):
    ours = running()
    native, served = Native(error=0.1), serve(ours.switch)
    expected = served(native, 1, make_call())
    assert native.calls == 0
    control.write_switch(tmp_path, False)
    wait_for(lambda: ours.switch.reason == "switched off")
    for _ in range(3):
        assert torch.equal(served(native, 1, make_call()), native(**make_call()))
    assert served.stats.fallbacks_by_reason == {"switched off": 3}
    control.write_switch(tmp_path, True)
    wait_for(lambda: ours.switch.reason is None)
    assert torch.equal(served(native, 1, make_call()), expected)
    assert served.stats.calls_by_arm == {"pageweaver": 2, "native": 3}
    assert read_log(caplog.text).fallbacks == [f"switched off by {tmp_path}: SGLang's own Step 3 serves from now on"]
    off, on = warnings(caplog)  # once each, however many calls there were
    assert "switched off by" in off
    assert "switched on by" in on


def test_off_before_the_server_starts(running, tmp_path, caplog):
    control.write_switch(tmp_path, False)
    assert running().switch.reason == "switched off"
    assert "switched off by" in warnings(caplog)[0]


def test_taking_the_file_away_means_on(running, tmp_path):
    control.write_switch(tmp_path, False)
    ours = running()
    (tmp_path / "switch.json").unlink()
    wait_for(lambda: ours.switch.reason is None)


def test_a_malformed_switch_changes_nothing_and_is_told_once(running, tmp_path, caplog):
    ours = running()
    control.write_switch(tmp_path, False)
    wait_for(lambda: ours.switch.reason)
    (tmp_path / "broken").write_text("{")
    os.replace(tmp_path / "broken", tmp_path / "switch.json")
    wait_for(lambda: any("cannot be read" in line for line in warnings(caplog)))
    for _ in range(3):  # it looks again and again
        before = control.state_path(tmp_path).stat().st_mtime_ns
        wait_for(lambda before=before: control.state_path(tmp_path).stat().st_mtime_ns != before)
    assert sum("cannot be read" in line for line in warnings(caplog)) == 1
    assert ours.switch.reason == "switched off"
    (tmp_path / "switch.json").write_text('{"on": true}')
    wait_for(lambda: ours.switch.reason is None)


@pytest.mark.parametrize("content", ["", "[]", '{"on": 1}', '{"on": true, "x": 1}', '{"timing": true}', "[" * 5000])
def test_malformed_switches_are_errors(tmp_path, content):
    (tmp_path / "switch.json").write_text(content)
    with pytest.raises(control.ControlError, match=r"switch\.json: "):
        control.read_switch(tmp_path)


def test_timing_is_switched_apart_from_serving(running, tmp_path):
    ours = running()
    timer = timing.Step3Timer(timing.HostClock())
    served = step3.Step3(Config(mode="pageweaver"), pool_page_size=128, switch=ours.switch, timer=timer)
    served(Native(), 1, make_call())
    assert timer.calls == 0  # the setting `timing` is off
    control.write_switch(tmp_path, True, timing=True)
    wait_for(lambda: ours.switch.timing)
    served(Native(), 1, make_call())
    assert (timer.calls, served.stats.calls_by_arm) == (1, {"pageweaver": 2})
    wait_for(lambda: control.read_states(tmp_path)[0]["timing"])
    control.write_switch(tmp_path, False)  # `pageweaver switch off` says nothing of timing
    wait_for(lambda: ours.switch.reason and not ours.switch.timing)


def test_every_process_follows_the_command(tmp_path, capsys, monkeypatch):
    """Two processes, as two ranks of a server; the command waits for both and says what they do."""
    monkeypatch.setattr("pageweaver_sglang.cli.switch.WAIT_SECONDS", 100)  # however slow the machine
    monkeypatch.setattr(control, "STALE_SECONDS", 600.0)
    program = (
        "import sys, time\n"
        "from pageweaver_sglang.config import Config\n"
        "from pageweaver_sglang.plugin.operations import Operations\n"
        f"Operations(Config(mode='pageweaver', control_dir={str(tmp_path)!r}), rank=int(sys.argv[1]))\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", program]
    ranks = [subprocess.Popen([*command, str(rank)], stdin=subprocess.PIPE) for rank in range(2)]
    try:
        wait_for(lambda: len(control.read_states(tmp_path)) == 2)
        for action, words in (("off", "native (switched off)"), ("on", "pageweaver"), ("status", "pageweaver")):
            begin = time.monotonic()
            assert main(["switch", action, "--dir", str(tmp_path)]) == 0
            assert time.monotonic() - begin < 90, "it does not wait longer than for the last to follow"
            shown = capsys.readouterr().out
            assert shown.count(words) == 2
            assert f": {'off' if action == 'off' else 'on'}" in shown
    finally:
        for rank in ranks:
            rank.communicate(timeout=600)
    assert list(tmp_path.glob("state-*")) == []  # a process that ends takes its state away
    assert main(["switch", "off", "--dir", str(tmp_path)]) == 1
    assert "No server uses this folder now" in capsys.readouterr().out


def test_a_process_that_does_not_confirm(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("pageweaver_sglang.cli.switch.WAIT_SECONDS", 0.1)
    monkeypatch.setattr(control, "STALE_SECONDS", 600.0)
    state = {"rank": 0, "pid": 7, "serving": "pageweaver", "why": None, "followed": None, "captured_calls": 3}
    (tmp_path / "state-7.json").write_text(json.dumps(state))
    assert main(["switch", "off", "--dir", str(tmp_path)]) == 1
    assert "has not confirmed" in (shown := " ".join(capsys.readouterr().out.split()))
    assert "hold 3 calls" in shown
    os.utime(tmp_path / "state-7.json", (0, 0))  # the process is gone
    assert control.read_states(tmp_path) == []


def test_the_command_and_a_folder_that_cannot_be_used(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["switch", "on", "--dir", str(tmp_path / "file")]) == 2
    assert "file: cannot be written" in " ".join(capsys.readouterr().err.split())


def test_the_command_finds_the_folder_of_the_settings(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PAGEWEAVER_CONTROL_DIR", str(tmp_path))
    main(["switch", "off"])
    assert control.read_switch(tmp_path) is False
    monkeypatch.setenv("PAGEWEAVER_WINDOW", "5")
    assert main(["switch", "off"]) == 2
    assert "PAGEWEAVER_WINDOW" in capsys.readouterr().err


# The folder ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(control.tempfile, "gettempdir", lambda: str(tmp_path))
    return control.default_folder()


def test_the_default_folder_is_this_users_alone(temporary, running):
    ours = operations.Operations(Config())
    try:
        assert ours.folder == temporary
        assert stat.S_IMODE(temporary.stat().st_mode) == 0o700
    finally:
        ours.close()


@pytest.mark.parametrize("taken", ["others can write it", "a link", "a file"])
def test_a_default_folder_that_others_could_have_made_is_not_used(temporary, tmp_path, taken, caplog):
    """Everyone can make folders in the temporary one: nobody else may switch this server."""
    if taken == "a file":
        temporary.touch()
    elif taken == "a link":
        (tmp_path / "theirs").mkdir()
        temporary.symlink_to(tmp_path / "theirs")
    else:
        temporary.mkdir()
        temporary.chmod(0o777)
    ours = operations.Operations(Config())
    try:
        assert ours.folder is None
        assert "no switch at run time" in caplog.text
        assert ours.switch.reason is None
    finally:
        ours.close()


def test_a_folder_that_was_asked_for_must_be_usable(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(control.ControlError, match="cannot be written"):
        operations.Operations(Config(control_dir=str(tmp_path / "file")))


def test_a_server_stops_where_it_is_not_usable(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(operations, "make_metrics", lambda runner: None)
    monkeypatch.setattr(operations, "_operations", None)
    with pytest.raises(BackendError, match=r"^--attention-backend pageweaver: control_dir: .*cannot be written"):
        operations.of_this_process(Config(control_dir=str(tmp_path / "file")), runner=None)
    assert operations._operations is None


def test_states_of_long_ago_are_swept_out(running, tmp_path):
    (old := tmp_path / "state-1.json").write_text("{}")
    os.utime(old, (0, 0))
    running()
    assert not old.exists()


def test_the_state_says_what_the_process_does(running, tmp_path):
    ours = running()
    served = serve(ours.switch)
    ours.add(served.stats)
    served(Native(), 1, make_call())
    served(Native(), 1, make_call(sink=torch.zeros(32)))

    def state():
        return (control.read_states(tmp_path) or [{}])[0]

    wait_for(lambda: state().get("calls") == {"pageweaver": 1, "native": 1})
    assert state()["fallbacks"] == {"attention sink": 1}
    assert (state()["serving"], state()["why"]) == ("pageweaver", None)
    ours.switch.trip(RuntimeError("no room"))
    wait_for(lambda: state().get("why") == "RuntimeError: no room")
    assert state()["serving"] == "native"


def test_calls_in_cuda_graphs_are_named_when_switching_off(running, tmp_path, caplog, monkeypatch):
    """The switch cannot reach them, and the log must not say otherwise."""
    monkeypatch.setattr(step3, "_capturing", lambda tensor: True)
    ours = running()
    served = serve(ours.switch)
    ours.add(served.stats)
    served(Native(), 1, make_call())
    control.write_switch(tmp_path, False)
    wait_for(lambda: "1 calls that CUDA graphs have captured stay PageWeaver's" in caplog.text)


# Errors --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def broken(monkeypatch):
    calls = []

    def broken(*args, **kwargs):
        calls.append(1)
        raise RuntimeError(f"no such kernel, attempt {len(calls)}")

    monkeypatch.setattr(step3, "sparse_prefill", broken)
    return calls


def test_an_error_disables_pageweaver_for_the_process_loudly_and_once(broken, caplog):
    switch = operations.Switch()
    first, second = serve(switch), serve(switch)  # two backends of one process, as with two-batch overlap
    native = Native()
    for served in (first, second, first):
        assert torch.equal(served(native, 1, make_call()), Native()(**make_call()))
    assert native.calls == 3
    assert len(broken) == 1
    assert first.stats.fallbacks_by_reason == {"error: RuntimeError": 1, "disabled after an error": 1}
    assert second.stats.fallbacks_by_reason == {"disabled after an error": 1}
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert record.levelno == logging.ERROR
    assert "DISABLED" in record.getMessage()
    assert "RuntimeError: no such kernel, attempt 1" in record.getMessage()
    assert record.exc_info[1].args
    (told,) = read_log(caplog.text).fallbacks  # what `pageweaver ab` would report
    assert "by RuntimeError: no such kernel, attempt 1" in told


def test_switching_on_tries_again_after_an_error(broken, monkeypatch, running, tmp_path):
    ours = running()
    native, served = Native(), serve(ours.switch)
    served(native, 1, make_call())
    assert ours.switch.reason == "disabled after an error"
    control.write_switch(tmp_path, False)
    wait_for(lambda: ours.switch.reason == "switched off")
    monkeypatch.setattr(step3, "sparse_prefill", sparse_prefill)
    control.write_switch(tmp_path, True)
    wait_for(lambda: ours.switch.reason is None)
    served(native, 1, make_call())
    assert (native.calls, served.stats.calls_by_arm["pageweaver"]) == (1, 1)


def test_on_error_raise(broken):
    switch = operations.Switch()
    with pytest.raises(RuntimeError, match="no such kernel"):
        serve(switch, on_error="raise")(lambda **call: pytest.fail("fell back"), 1, make_call())
    assert switch.reason is None


@pytest.mark.parametrize("on_error", ["native", "raise"])
def test_what_is_not_supported_falls_back_for_that_call_only(monkeypatch, on_error):
    def unsupported(*args, **kwargs):
        raise UnsupportedError("sparse_prefill: q must be bfloat16, got float16")

    served = serve(operations.Switch(), on_error=on_error)
    native = Native()
    monkeypatch.setattr(step3, "sparse_prefill", unsupported)
    served(native, 1, make_call())
    monkeypatch.setattr(step3, "sparse_prefill", sparse_prefill)
    served(native, 1, make_call())
    assert served.switch.reason is None
    assert served.stats.fallbacks_by_reason == {"sparse_prefill: q must be bfloat16, got float16": 1}
    assert served.stats.calls_by_arm == {"native": 1, "pageweaver": 1}


def test_an_error_of_sglangs_function_is_sglangs():
    """It is raised as it would be without PageWeaver, and disables nothing."""

    def failing(**call):
        raise torch.OutOfMemoryError("SGLang's own")

    served = serve(operations.Switch())
    with pytest.raises(torch.OutOfMemoryError, match="SGLang's own"):
        served(failing, 1, make_call(sink=torch.zeros(32)))
    assert served.switch.reason is None


def test_reasons_are_bounded():
    served = serve(operations.Switch())
    for number in range(100):
        served(Native(), 1, make_call(block_size_q=2 + number))
    reasons = served.stats.fallbacks_by_reason
    assert len(reasons) == step3.MAX_REASONS + 1
    assert reasons[step3.OTHER_REASONS] == 100 - step3.MAX_REASONS
    assert len(served._logged) == step3.MAX_REASONS + 1
