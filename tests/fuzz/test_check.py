"""The check finds a single wrong page, row or token, and takes the rounding of FP8 for none."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from pageweaver_sglang.fuzz.build import Pools, build
from pageweaver_sglang.fuzz.dense import expected
from pageweaver_sglang.fuzz.draw import EXACT_STYLES, STYLES, Call, draw_call
from pageweaver_sglang.fuzz.trial import cross_check, describe_rows, judge
from pageweaver_sglang.fuzz.variants import FLOAT64, FP8, VARIANTS

from .emulation import FP8_ENGINES, emulate, picked, visible_cells, with_ids, with_limit

LARGEST = 300


@pytest.fixture(scope="module")
def pools():
    return Pools("cpu")


def calls_of(style: str, count: int, *, most_tokens: int = 60) -> list[Call]:
    found = []
    for seed in range(10_000):
        call = draw_call(seed, FP8_ENGINES, LARGEST)
        if call.style == style and 8 <= call.tokens <= most_tokens and not call.padding:
            found.append(call)
        if len(found) == count:
            return found
    raise AssertionError(f"too few calls of style {style}")


@pytest.mark.parametrize("style", STYLES)
def test_rounding_is_within_the_bound(pools, style):
    largest = 0.0
    for call in calls_of(style, 12):
        tensors = build(call, pools)
        wrong, ratio = judge(emulate(call, tensors, call.seed), expected(call, tensors, FP8))
        assert int(wrong) == 0, (call.seed, float(ratio))
        largest = max(largest, float(ratio))
    assert largest > 0.1, "a bound far above what rounding does would find nothing"


def test_the_reference_engine_gives_the_same(pools):
    for name, variant in VARIANTS.items():
        shapes = set()
        for seed in range(300):
            call = draw_call(seed, (name,), 60)
            if call.shape not in shapes or (len(variant.shapes) == 1 and seed < 12):
                assert cross_check(call, build(call, pools)) == [], seed
                shapes.add(call.shape)
        assert shapes == set(variant.shapes)


def test_a_wrong_dense_attention_would_be_found(pools):
    call = calls_of("random", 1)[0]
    tensors = build(call, pools)
    token = next(t for t in range(call.tokens) if int(tensors.limit[t]) // 128 in picked(tensors, t, 0))
    # The dense attention reads limits and page tables of its own; the reference engine reads the call's.
    assert cross_check(call, with_limit(tensors, token, -1))
    shifted = dataclasses.replace(tensors, page_base=tensors.page_base + 1)
    assert cross_check(call, shifted)


def plants(call: Call, tensors, style: str):
    """Mistakes: name, token, and the emulated output with it.

    In styles whose weights FP8 rounds, pages come and go as a whole: there, one token of 2,000 is less than rounding.
    """
    clean = emulate(call, tensors)
    for token in range(0, call.tokens, 5):
        head, limit = token % call.kv_heads, int(tensors.limit[token])
        pages, cells = picked(tensors, token, head), sees(call, tensors, token)
        whole = [page for page in range(limit // 128 + 1) if style in EXACT_STYLES or page * 128 + 127 <= limit]
        less = [page for page in whole if page in pages]
        if len(pages) > 1 and less:
            dropped = with_ids(tensors, token, head, [page for page in pages if page != less[token % len(less)]])
            yield "a page less", token, emulate_token(call, dropped, token, clean)
        more = [page for page in whole if page not in pages]
        if pages and more and len(pages) < call.k:
            added = with_ids(tensors, token, head, sorted([*pages, more[token % len(more)]]))
            yield "a page more", token, emulate_token(call, added, token, clean)
        other = (token + 7) % call.tokens
        if cells != sees(call, tensors, other):
            swapped = clean.clone()
            swapped[[token, other]] = clean[[other, token]]
            yield "rows swapped", token, swapped
        if any(cells):
            unwritten = clean.clone()
            unwritten[token] = 0
            yield "a row not written", token, unwritten
        if any(cells) and style in EXACT_STYLES:
            for name, change in (("a token more", 1), ("a token less", -1)):
                planted = with_limit(tensors, token, change)
                if sees(call, planted, token) != cells:
                    yield name, token, emulate_token(call, planted, token, clean)


def sees(call: Call, tensors, token: int) -> list[list[int]]:
    return [visible_cells(call, tensors, token, head) for head in range(call.kv_heads)]


def emulate_token(call: Call, planted, token: int, clean: torch.Tensor) -> torch.Tensor:
    """``clean`` with one token's rows as the planted call gives them."""
    alone = dataclasses.replace(call, topk_idx=call.topk_idx[:, token : token + 1])
    arguments = planted.arguments | {
        "q": planted.arguments["q"][token : token + 1],
        "topk_idx": planted.arguments["topk_idx"][:, token : token + 1],
    }
    rows = {name: getattr(planted, name)[token : token + 1] for name in ("page_base", "page_count", "limit")}
    out = clean.clone()
    out[token] = emulate(alone, dataclasses.replace(planted, arguments=arguments, **rows), token)[0]
    return out


@pytest.mark.parametrize("style", [style for style in STYLES if style not in ("sharp", "rounded")])
def test_every_planted_mistake_is_found(pools, style):
    """In style ``sharp`` a page can weigh too little to matter, in ``rounded`` less than Q's rounding does."""
    found = set()
    for call in calls_of(style, 24):
        tensors = build(call, pools)
        wanted = expected(call, tensors, FP8)
        for name, token, out in plants(call, tensors, style):
            wrong, _ = judge(out, wanted)
            assert int(wrong) > 0, (call.seed, name, token)
            assert f"token {token} " in describe_rows(out, wanted)[0] or name == "rows swapped"
            found.add(name)
    usual = {"a page less", "a page more", "rows swapped", "a row not written"}
    assert found == usual | ({"a token more", "a token less"} if style in EXACT_STYLES else set())


def test_one_token_of_a_thousand_is_found(pools):
    """The hardest case: eight pages of equal weight, and one query sees one token too many of the last."""
    for seed in range(10_000):
        call = draw_call(seed, FP8_ENGINES)
        if call.style == "flat" and 1 <= call.tokens <= 60 and not call.padding and call.kv_heads == 1:
            tensors = build(call, pools)
            for token in range(call.tokens):
                seen = sees(call, tensors, token)
                planted = with_limit(tensors, token, 1)
                if 900 < len(seen[0]) < 1024 and sees(call, planted, token) != seen:
                    clean = emulate(call, tensors)
                    wanted = expected(call, tensors, FP8)
                    assert int(judge(clean, wanted)[0]) == 0
                    assert int(judge(emulate_token(call, planted, token, clean), wanted)[0]) > 0
                    return
    raise AssertionError("no such call")


def test_rounding_q_to_e4m3_changes_nothing(pools):
    """But in style ``rounded``: one of the scales that the engines try leaves every element as it is."""
    for style in STYLES:
        q = build(calls_of(style, 1)[0], pools).arguments["q"].float()
        largest = q.abs().amax(dim=2, keepdim=True).clamp_min(1e-12)
        errors = []
        for target in (256.0, 288.0, 448.0):
            scaled = q * (target / largest)
            errors.append((scaled.to(torch.float8_e4m3fn).float() - scaled).norm(dim=2) / target)
        least = torch.stack(errors).amin(dim=0)
        assert bool((least > 1e-3).all() if style == "rounded" else (least < 1e-6).all()), style


def test_garbage_is_found(pools):
    call = calls_of("random", 1)[0]
    tensors = build(call, pools)
    wanted = expected(call, tensors, FLOAT64)
    out = wanted.out.to(torch.bfloat16)
    assert int(judge(out, wanted)[0]) == 0
    for value in (float("nan"), float("inf"), 3e38):
        spoiled = out.clone()
        spoiled[3, 1, 100] = value
        wrong, _ = judge(spoiled, wanted)
        assert int(wrong) == 1


def test_a_row_that_sees_nothing_must_be_zero(pools):
    for seed in range(1000):
        call = draw_call(seed, largest=LARGEST)
        if not call.padding or not call.tokens:
            continue
        wanted = expected(call, build(call, pools), FP8)
        assert bool((wanted.bound[-call.padding :] == 0).all())
        out = wanted.out.to(torch.bfloat16)
        out[-1, 0, 0] = 1e-30
        assert float(judge(out, wanted)[1]) == float("inf")
        return
