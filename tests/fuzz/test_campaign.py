"""Campaigns on the CPU: what is counted, how failures are told, and that no process's end goes unnoticed."""

import json

import pytest
import torch

import pageweaver_sglang as pw
from pageweaver_sglang.cli import main
from pageweaver_sglang.fuzz import campaign, refusals
from pageweaver_sglang.fuzz.build import build
from pageweaver_sglang.fuzz.campaign import Settings
from pageweaver_sglang.fuzz.draw import draw_call
from pageweaver_sglang.fuzz.trial import Trials
from pageweaver_sglang.fuzz.variants import VARIANTS

LARGEST = 100


@pytest.fixture(scope="module")
def trials():
    return Trials("cpu", largest=LARGEST)


def test_a_block_of_good_calls(trials):
    tally = campaign.run_block(trials, 0, 12, batch=5, thorough=True)
    assert tally.failures == []
    assert tally.calls == 12
    assert sum(tally.features[f"page size={size}"] for size in (64, 128)) == 12
    assert tally.features["compared=orders and unions"] >= 1
    assert tally.features["compared=dense with reference"] >= 1
    assert 0 < max(tally.largest.values()) < 1


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda out: out.mul_(1.02), "rows beyond their bound"),
        (lambda out: out[-1:].fill_(float("nan")), "rows beyond their bound"),
        (lambda out: 1 / 0, "raised ZeroDivisionError"),
    ],
)
def test_a_wrong_call_is_told_by_its_seed(trials, monkeypatch, wrong, words):
    right = pw.sparse_prefill

    def spoiled(*arguments, **options):
        out = right(*arguments, **options)
        if int(options["prefix_lens"].sum()) == int(chosen.prefixes.sum()):
            wrong(out)
        return out

    chosen = next(call for seed in range(20, 100) if (call := draw_call(seed, largest=LARGEST)).prefixes.sum() > 200)
    monkeypatch.setattr(pw, "sparse_prefill", spoiled)
    tally = campaign.run_block(trials, chosen.seed - 2, 5, batch=3, thorough=False)
    assert tally.calls == 5
    assert [failure.seed for failure in tally.failures] == [chosen.seed]
    assert words in tally.failures[0].problems[0]


def test_wrong_orders_and_unions_are_told(trials, monkeypatch):
    call = next(c for seed in range(1000) if (c := draw_call(seed, largest=LARGEST)).orders and c.tokens > 20)
    assert trials.run(call.seed)[1].problems == []
    monkeypatch.setattr(pw, "regroup", lambda *a, **k: pw.reference.regroup(*a, **k).flip(1))
    assert "regroup: the order differs" in trials.run(call.seed)[1].problems[0]
    monkeypatch.undo()

    def one_bit_more(*arguments, **options):
        plan = pw.reference.prepare_unions(*arguments, **options)
        plan.masks.flatten()[0] ^= 1
        return plan

    monkeypatch.setattr(pw, "prepare_unions", one_bit_more)
    assert [p.partition(" (")[0] for p in trials.run(call.seed)[1].problems] == ["prepare_unions: masks differ"] * 2


def test_a_twin_that_differs_in_a_bit_is_told(trials, monkeypatch):
    calls = (draw_call(seed, largest=LARGEST) for seed in range(1000))
    call = next(call for call in calls if call.twin and call.variant == "stream" and call.tokens > 2)
    right = pw.sparse_prefill

    def other_engine_differs(*arguments, config, **options):
        out = right(*arguments, config=config, **options)
        if config.engine != call.variant and out.numel():
            out.view(torch.int16)[0, 0, 0] ^= 1
        return out

    monkeypatch.setattr(pw, "sparse_prefill", other_engine_differs)
    tally = campaign.run_block(trials, call.seed, 1, batch=1, thorough=False)
    assert "the engines' outputs differ in some bits" in tally.failures[0].problems


@pytest.mark.parametrize("name", [name for name, one in refusals.REFUSALS.items() if not one.hopper_only])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_refusal(trials, name, variant, monkeypatch):
    calls = (draw_call(seed, (variant,), LARGEST) for seed in range(100))
    tensors = build(next(call for call in calls if call.tokens > 4), trials.pools)
    assert name in refusals.possible(tensors, variant)
    assert refusals.refused(tensors, name) is None
    monkeypatch.setattr(pw, "sparse_prefill", lambda **_: None)
    assert refusals.refused(tensors, name) == f"{name}: not refused"


def run_command(tmp_path, *options):
    code = main(["fuzz", "--device", "cpu", "--largest", str(LARGEST), "--json", str(tmp_path / "f.json"), *options])
    return code, json.loads((tmp_path / "f.json").read_text())


def test_the_command(tmp_path, capsys):
    options = ("--calls", "70", "--jobs", "2", "--seed", "5", "--commit", "abc", "--engines", "stream,portable")
    code, document = run_command(tmp_path, *options)
    assert code == 0
    assert document["passed"] is True
    assert document["calls"] == 70
    assert document["environment"]["commit"] == "abc"
    assert sum(document["coverage"]["engine"].values()) == 70
    assert set(document["coverage"]["engine"]) == {"stream", "portable"}
    assert document["settings"]["seed"] == 5
    assert "nothing wrong" in capsys.readouterr().out


def test_a_process_that_cannot_start_is_a_failure():
    tally, _ = campaign.run(Settings(calls=200, jobs=2, device="no such device"))
    assert len(tally.failures) == 2
    assert "no such device" in tally.failures[0].problems[0]
    assert campaign.report(Settings(device="cpu"), tally, {}, {})["passed"] is False


def test_a_process_that_says_nothing_is_a_failure():
    tally, _ = campaign.run(Settings(calls=10, jobs=1, device="cpu", patience=0.01))
    assert "a call hangs" in tally.failures[0].problems[0]
    assert (tally.failures[0].seed, tally.failures[0].last_seed) == (0, 9)


def test_an_unknown_engine(capsys):
    with pytest.raises(SystemExit):
        main(["fuzz", "--engines", "stream,fast"])
    assert "list of engines" in capsys.readouterr().err


def test_without_a_gpu_the_command_says_so(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert main(["fuzz", "--calls", "1"]) == 2
    assert "no CUDA device; --device cpu" in capsys.readouterr().err
