"""The fuzzer on the kernels: some calls pass, and a mistake planted in a call's inputs is found in its output."""

import pytest
import torch

from pageweaver_sglang.fuzz import campaign, refusals
from pageweaver_sglang.fuzz.build import BITS, build
from pageweaver_sglang.fuzz.dense import expected
from pageweaver_sglang.fuzz.draw import EXACT_STYLES, draw_call
from pageweaver_sglang.fuzz.trial import Trials, judge
from pageweaver_sglang.fuzz.variants import FP8, VARIANTS

from .emulation import FP8_ENGINES, ahead, emulate, further, picked, with_ids

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(scope="module")
def trials():
    return Trials("cuda", largest=3000)


def test_some_hundred_calls(trials):
    tally = campaign.run_block(trials, 1_000_000, 400, batch=32, thorough=True)
    assert tally.failures == []
    assert max(tally.largest.values()) < 1


def test_the_same_call_on_both_devices(trials):
    """A seed found on one machine means the same numbers on another."""
    on_cpu = Trials("cpu", largest=3000)
    for seed in range(8):
        call = draw_call(seed, largest=3000)
        here, there = build(call, on_cpu.pools), build(call, trials.pools)
        for name, value in here.arguments.items():
            other = there.arguments[name].cpu()
            if value.dtype in BITS:
                value, other = (x.contiguous().view(BITS[x.dtype]) for x in (value, other))
            assert torch.equal(value, other), name
        torch.testing.assert_close(
            expected(call, here, FP8).out, expected(call, there, FP8).out.cpu(), rtol=1e-9, atol=1e-9
        )


def test_the_emulation_rounds_as_the_kernels_do(trials):
    """What the check is tested with on the CPU is as far from the exact output as the kernels are."""
    for seed in range(60):
        call = draw_call(seed, FP8_ENGINES, 3000)
        if call.style != "random" or call.tokens <= 20:
            continue
        tensors = build(call, trials.pools)
        wanted = expected(call, tensors, FP8)
        errors = []
        for out in (trials._attend(call, tensors), emulate(call, build(call, Trials("cpu", largest=3000).pools))):
            errors.append(float((out.double().cpu() - wanted.out.cpu()).norm()))
        if errors[1] > 0:
            assert 0.9 < errors[0] / errors[1] < 1.1
            return
    raise AssertionError("no such call")


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("style", ["random", *EXACT_STYLES])
def test_planted_mistakes_are_found(trials, style, variant):
    found = 0
    for seed in range(400):
        call = draw_call(seed, (variant,), 3000)
        if call.style != style or call.tokens < 8 or call.padding:
            continue
        tensors = build(call, trials.pools)
        wanted = expected(call, tensors, VARIANTS[variant].arithmetic)
        token = call.tokens // 2
        pages = picked(tensors, token, 0, call.page_size)
        if len(pages) > 1 and (pages[0] + 1) * call.page_size <= int(tensors.limit[token]):
            out = trials._attend(call, with_ids(tensors, token, 0, pages[1:]))
            assert int(judge(out, wanted)[0]) > 0, seed
            found += 1
        # A request's queries one token further on; the first of them then sees a token more of its own page.
        if style in EXACT_STYLES and (request := further(call, tensors)) is not None:
            planted = ahead(call, tensors, request)
            # Far enough off that nothing within the bound of the one is within the bound of the other.
            exact = expected(call, planted, VARIANTS[variant].arithmetic).out
            assert float(judge(exact, wanted)[1]) > 2, seed
            assert int(judge(trials._attend(call, planted), wanted)[0]) > 0, seed
            found += 1
    assert found > 10


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_refusal(trials, variant):
    for seed in (seed for seed in range(40) if draw_call(seed, (variant,), 3000).tokens > 4):
        tensors = build(draw_call(seed, (variant,), 3000), trials.pools)
        for name in refusals.possible(tensors, variant):
            assert refusals.refused(tensors, name) is None
