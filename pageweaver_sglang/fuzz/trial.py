"""One call, made and judged: what it gave against what it must give, without waiting for the device."""

from __future__ import annotations

import collections
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import pageweaver_sglang as pw

from . import orders, refusals
from .build import Pools, Tensors, build
from .dense import Expected, expected
from .draw import MAX_PADDING, MAX_TOKENS, Call, draw_call
from .variants import FLOAT64, VARIANTS, Arithmetic, available

MOST_REQUESTS = 5
_KEPT = 12
"""Workspaces, and value tiles, kept from call to call, so that a call meets what others have left in them."""

_AGREEMENT = 1e-9
"""Largest difference of the dense attention from the reference engine, relative to the call's largest value."""


@dataclass
class Verdict:
    """What was found in one call.

    Attributes:
        wrong: int64 on the device, rows (of one token and head) beyond their bound or not finite.
        ratio: float64 on the device, the largest error of a row in units of its bound.
        different: bool on the device, whether the twin engine's bits or the orders differ; None when not compared.
        problems: what the host has found itself, in words.
        features: what was checked besides, as ``dimension=value``.
    """

    wrong: torch.Tensor
    ratio: torch.Tensor
    different: torch.Tensor | None
    problems: list[str]
    features: list[str]


class Trials:
    """Makes calls on one device, in one process.

    Args:
        device: ``cuda`` or ``cpu``.
        largest: see :func:`.draw.draw_call`.
        variants: likewise; None for all that run on the device.
        pools: of that device; None makes them.
        alone: make every call with fresh buffers, and compare everything that can be compared.
    """

    def __init__(
        self,
        device: torch.device | str,
        *,
        largest: int,
        variants: tuple[str, ...] | None = None,
        pools: Pools | None = None,
        alone: bool = False,
    ) -> None:
        self.device = torch.device(device)
        self.largest = largest
        self.variants = available(self.device) if variants is None else variants
        self.alone = alone
        self.pools = pools or Pools(self.device)
        self._workspaces: collections.OrderedDict[Any, pw.Workspace] = collections.OrderedDict()
        self._tiles: collections.OrderedDict[Any, pw.ValueTiles] = collections.OrderedDict()

    def draw(self, seed: int) -> Call:
        """The call of a seed."""
        return draw_call(seed, self.variants, self.largest)

    def arithmetic(self, call: Call) -> Arithmetic:
        """How the engine of a call rounds on this device."""
        return VARIANTS[call.variant].arithmetic if self.device.type == "cuda" else FLOAT64

    def compile(self, number: int, jobs: int) -> None:
        """Make one call of every kind that is compiled apart, where this is process ``number`` of ``jobs``: its share.

        The processes find each other's results in Triton's cache.
        """
        kinds = {}
        for name in self.variants:
            if self.device.type == "cuda" and VARIANTS[name].compiled_apart:
                for seed in range(1000):
                    call = draw_call(seed, (name,), 100)
                    if call.tokens:
                        kinds.setdefault((name, call.shape, call.k_scale_tensor), call)
        for call in list(kinds.values())[number::jobs]:
            self._attend(call, build(call, self.pools))

    def run(self, seed: int, *, thorough: bool = False) -> tuple[Call, Verdict]:
        """Draw, make and judge the call of a seed; ``thorough`` compares everything that can be compared."""
        call = self.draw(seed)
        thorough = thorough or self.alone
        problems, features = [], []
        tensors = build(call, self.pools)
        if call.invalid is not None:
            names = refusals.possible(tensors, call.variant)
            name = names[call.invalid % len(names)]
            features.append(f"refused={name}")
            if problem := refusals.refused(tensors, name):
                problems.append(problem)
        wanted = expected(call, tensors, self.arithmetic(call))
        out = self._attend(call, tensors)
        wrong, ratio = judge(out, wanted)
        different = None
        twin_of = VARIANTS[call.variant].twin
        if twin_of is not None and (call.twin or thorough):
            features.append("compared=other engine")
            twin = self._attend(call, tensors, variant=twin_of)
            different = (out.view(torch.int16) != twin.view(torch.int16)).any()
        if call.orders or thorough:
            features.append("compared=orders and unions")
            problems += orders.compare(call, tensors)
        if call.cross_check or thorough:
            features.append("compared=dense with reference")
            problems += cross_check(call, tensors)
        return call, Verdict(wrong, ratio, different, problems, features)

    def explain(self, seed: int) -> list[str]:
        """Make the call of a seed again, alone in fresh buffers, and say what is wrong with it; empty: nothing is."""
        trials = Trials(self.device, largest=self.largest, variants=self.variants, pools=self.pools, alone=True)
        call, verdict = trials.run(seed)
        problems = list(verdict.problems)
        if int(verdict.wrong):
            tensors = build(call, self.pools)
            out = trials._attend(call, tensors)
            problems += describe_rows(out, expected(call, tensors, self.arithmetic(call)))
        if verdict.different is not None and bool(verdict.different):
            problems.append("the engines' outputs differ in some bits")
        return problems

    def _attend(self, call: Call, tensors: Tensors, variant: str | None = None) -> torch.Tensor:
        """Make the call; another ``variant`` gets buffers of its own. The output's memory is NaN before."""
        config = pw.Config(**{**call.config, **VARIANTS[variant or call.variant].config})
        output = call.output if variant is None else "out"
        options: dict[str, Any] = dict(tensors.scales)
        if output == "workspace":
            options["workspace"] = self._workspace(call)
            options["workspace"].out(call.tokens).fill_(float("nan"))
        elif output == "out":
            like = tensors.arguments["q"]
            options["out"] = torch.full(like.shape, float("nan"), dtype=like.dtype, device=like.device)
        if call.tiles == "given" and variant is None:
            options["value_tiles"] = self._value_tiles(call)
        return pw.sparse_prefill(**tensors.arguments, **options, page_size=call.page_size, config=config)

    def _workspace(self, call: Call) -> pw.Workspace:
        shape, window = call.shape, int(str(call.config["window"]))

        def make() -> pw.Workspace:
            return pw.Workspace(
                MAX_TOKENS + MAX_PADDING,
                MOST_REQUESTS,
                kv_heads=call.kv_heads,
                topk=call.k,
                q_heads=call.kv_heads * shape.ratio,
                window=window,
                group_size=call.group_size,
                head_dim=shape.head_dim,
                device=self.device,
            )

        key = (call.kv_heads, call.k, window, call.group_size, shape.ratio, shape.head_dim)
        return self._kept(self._workspaces, key, make)

    def _value_tiles(self, call: Call) -> pw.ValueTiles:
        def make() -> pw.ValueTiles:
            tiles = pw.ValueTiles.empty(call.kv_heads, call.pool_pages, device=self.device)
            tiles.tiles.fill_(0x7F)
            return tiles

        return self._kept(self._tiles, (call.kv_heads, call.pool_pages), make)

    def _kept(self, store: collections.OrderedDict[Any, Any], key: Any, make: Callable[[], Any]) -> Any:
        if self.alone or key not in store:
            store[key] = make()
        store.move_to_end(key)
        if len(store) > _KEPT:
            store.popitem(last=False)
        return store[key]


def judge(out: torch.Tensor, wanted: Expected) -> tuple[torch.Tensor, torch.Tensor]:
    """Return how many rows are beyond their bound, and the largest error in units of its bound, on the device."""
    error = (out.double() - wanted.out).norm(dim=2)
    wrong = ~(error <= wanted.bound)  # also where it is not a number
    ratio = torch.where(error == 0, 0.0, error / wanted.bound)
    return wrong.sum(), ratio.amax() if ratio.numel() else ratio.new_zeros(())


def describe_rows(out: torch.Tensor, wanted: Expected, most: int = 5) -> list[str]:
    """The first rows beyond their bound, in words."""
    error = (out.double() - wanted.out).norm(dim=2)
    rows = (~(error <= wanted.bound)).nonzero().tolist()
    words = [
        f"token {row} head {head}: error {float(error[row, head]):.3e}, bound {float(wanted.bound[row, head]):.3e}"
        for row, head in rows[:most]
    ]
    return words + ([f"... and {len(rows) - most} rows more"] if len(rows) > most else [])


def cross_check(call: Call, tensors: Tensors) -> list[str]:
    """Compare the dense attention with the reference engine. Waits for the device."""
    dense = expected(call, tensors, FLOAT64).out
    arguments = {name: value.cpu() for name, value in tensors.arguments.items()}
    arguments["q"] = arguments["q"].double()  # so that the result is not rounded
    scales = {name: float(value) if value is not None else None for name, value in tensors.scales.items()}
    out = pw.reference.sparse_prefill(**arguments, **scales, page_size=call.page_size)
    largest = float(out.abs().max()) if out.numel() else 0.0
    error = float((dense.cpu() - out).abs().max()) if out.numel() else 0.0
    if error <= _AGREEMENT * largest:
        return []
    return [f"the dense attention differs from the reference engine by {error:.3e} (largest value {largest:.3e})"]
