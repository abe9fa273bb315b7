"""The arms that are compared, and the stages of PageWeaver's own call. Adding one: see CONTRIBUTING.md."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

import pageweaver_sglang as pw
from pageweaver_sglang.capture.snapshot import HostLengths
from pageweaver_sglang.cuda import support

from .inputs import FEW_ROWS, CallSize, Step3Inputs
from .protocol import Arm, ArmUnavailable, first_line, raise_if_lost

SIXTEEN_BITS_NRMS = 0.005
"""Largest NRMS of an arm that computes in 16 bits."""


def _workspace(
    sets: Sequence[Step3Inputs], window: int, group_size: int, pool_pages: int | None = None
) -> pw.Workspace:
    """A workspace that fits every set. Sets are alike but for their contents, so the first one gives the sizes."""
    first = sets[0]
    kv_heads, tokens, topk = first.topk_idx.shape
    return pw.Workspace(
        tokens,
        len(first.prefix_lens),
        kv_heads=kv_heads,
        topk=topk,
        q_heads=first.q.shape[1],
        window=window,
        group_size=group_size,
        dtype=first.q.dtype,
        pool_pages=pool_pages,
        device=first.q.device,
    )


def _pool_pages(inputs: Step3Inputs) -> int:
    return inputs.v_cache.shape[0] // inputs.page_size


def native_step3() -> tuple[Callable[..., torch.Tensor], Any]:
    """SGLang's Step 3, and the object with which Triton tunes its kernel (None where this version doesn't tune it).

    Raises:
        ArmUnavailable: SGLang can't be imported.
    """
    try:
        from sglang.kernels.ops.attention.minimax_sparse.prefill import topk_sparse
    except Exception as error:  # SGLang raises anything at import when it doesn't like the machine
        raise ArmUnavailable(f"SGLang's Step 3 can't be imported ({first_line(error)})") from error
    kernel = getattr(topk_sparse, "_gqa_share_sparse_fwd_kernel", None)
    while kernel is not None and not hasattr(kernel, "configs"):
        kernel = getattr(kernel, "fn", None)
    return topk_sparse.flash_prefill_with_gqa_share_sparse, kernel


class NativeArm(Arm):
    """SGLang's own Step 3, as installed, tuned on the measured size.

    Triton tunes this kernel once per process, on whatever size comes first (its key holds no length), which can cost
    half its speed. Here every tuned choice is dropped before the first call, and the disk cache of choices is not read.
    """

    name = "native"
    description = "SGLang's own Step 3 as installed (Triton), tuned on the measured size"
    max_nrms = 0.02

    def __init__(self) -> None:
        self.tuned: str | None = None
        self._tuned_on: tuple[tuple[int, ...], ...] | None = None
        self._choices: dict[Any, Any] = {}

    def prepare(self, sets: Sequence[Step3Inputs]) -> None:
        """Import SGLang's function and let Triton tune it on the first set, unless it has on the same sizes."""
        function, kernel = native_step3()
        self._sets = sets
        self._function = function
        sizes = (sets[0].q.shape, sets[0].topk_idx.shape, sets[0].k_cache.shape, sets[0].cu_seqlens.shape)
        if kernel is not None:
            kernel.cache.clear()
            kernel.cache_results = False
            if sizes == self._tuned_on:
                kernel.cache.update(self._choices)
        try:
            self.call(0)
            torch.cuda.synchronize()
        except Exception as error:  # Triton's own errors share no base class
            raise ArmUnavailable(f"SGLang's Step 3 fails on this input ({first_line(error)})") from error
        if kernel is not None:
            self._tuned_on, self._choices = sizes, dict(kernel.cache)
        self.tuned = str(getattr(kernel, "best_config", None))

    def call(self, index: int) -> torch.Tensor:
        """One call with the arguments that SGLang's backend gives; query blocks of one are the queries themselves."""
        s = self._sets[index]
        return self._function(
            q=s.q,
            k_cache=s.k_cache,
            v_cache=s.v_cache,
            sink=None,
            req_to_token=s.req_to_token,
            slot_ids=s.slot_ids,
            topk_idx=s.topk_idx,
            block_size_q=1,
            block_size_k=s.page_size,
            cu_seqlens=s.cu_seqlens,
            seq_lens=s.seq_lens,
            prefix_lens=s.prefix_lens,
            max_seqlen_q=s.max_seqlen_q,
            cu_seqblocks_q=s.cu_seqlens,
            max_seqblock_q=s.max_seqlen_q,
        )

    def notes(self) -> dict[str, Any]:
        """What Triton chose."""
        return {"tuned": self.tuned}

    def release(self) -> None:
        """Forget the inputs."""
        del self._sets


class PublicArm(Arm):
    """The public call as a user makes it, with a workspace: everything from the page choices to the output."""

    def __init__(self, name: str, description: str, config: pw.Config) -> None:
        self.name, self.description, self._config = name, description, config
        if config.precision == "high":
            self.max_nrms = 0.005

    def prepare(self, sets: Sequence[Step3Inputs]) -> None:
        """Build the kernels if need be and allocate the workspace.

        Raises:
            ArmUnavailable: another engine than the arm's would serve, on this GPU or for calls of this kind.
        """
        first, engine = sets[0], self._config.engine
        kind = support.call_kind(first.q, first.k_cache, first.page_size)
        served = support.engine_on(engine, support.capability_of(first.q.device), kind)
        if served != engine:
            raise ArmUnavailable(f"engine {engine} does not serve here: {served or 'SGLang'} would")
        self._sets = sets
        pool_pages = _pool_pages(first) if support.reads_value_tiles(engine, first.v_cache.dtype) else None
        group_size = support.call_group_size(self._config, first.q, first.k_cache, first.page_size)
        self._space = _workspace(sets, self._config.window, group_size, pool_pages)

    def call(self, index: int) -> torch.Tensor:
        """One ``sparse_prefill``."""
        return pw.sparse_prefill(**self._sets[index].kwargs(), config=self._config, workspace=self._space)

    def release(self) -> None:
        """Free the workspace."""
        del self._sets, self._space


class AutoArm(PublicArm):
    """Mode ``auto`` as it is after some calls on these picks: ``prepare`` makes them and lets their counters arrive.

    Eager calls go on as in a server, measurements and probes included; a CUDA Graph holds what was decided last.
    """

    settling_calls = 4

    def prepare(self, sets: Sequence[Step3Inputs]) -> None:
        """Call until the history has settled."""
        super().prepare(sets)
        first = sets[0]
        self._lengths = HostLengths(tuple(first.prefix_lens.tolist()), tuple(first.cu_seqlens.diff().tolist()))
        self._history = pw.History(self._config, page_size=first.page_size, heads_per_kv_head=first.heads_per_kv_head)
        self._decisions: Counter[str] = Counter()
        for _ in range(self.settling_calls):
            self.call(0)
            if first.q.is_cuda:
                torch.cuda.synchronize()

    def call(self, index: int) -> torch.Tensor:
        """One decision, one ``sparse_prefill``."""
        inputs = self._sets[index]
        self._last = self._history.decide(0, inputs.topk_idx, self._lengths)
        self._decisions[self._last.reason] += 1
        return pw.sparse_prefill(**inputs.kwargs(), config=self._config, workspace=self._space, decision=self._last)

    def notes(self) -> dict[str, Any]:
        """What it decided: ``order`` of the last call that was no probe, the gain expected of it, calls by reason.

        ``group_size``: queries per union.
        """
        regrouped = self._last.regroup and self._last.reason != "probe"
        return {
            "order": f"w{self._config.window}" if regrouped else "original",
            "group_size": self._space.group_size,
            "expected_gain_us": self._last.gain_us,
            "decisions": dict(self._decisions),
        }

    def release(self) -> None:
        """Free the workspace and the history."""
        super().release()
        del self._history


class PortableArm(PublicArm):
    """The public call by the engine in Triton, which computes in 16 bits.

    Args:
        size: of the calls, on which the size of its groups depends.
    """

    max_nrms = SIXTEEN_BITS_NRMS

    def __init__(self, size: CallSize = FEW_ROWS) -> None:
        config = pw.Config(mode="pageweaver", engine="portable")
        super().__init__(
            "portable",
            f"regrouped inside windows of 64 while it runs, groups of {size.queries_per_union(config)}, in Triton as "
            "on other GPUs (16-bit arithmetic)",
            config,
        )


class Bf16CacheArm(Arm):
    """Another arm on a BF16 KV cache of the same values.

    Args:
        arm: one that takes such a cache; its name gets the ending ``-bf16``.
        max_nrms: largest NRMS, where the arm computes otherwise than on an FP8 cache; None for the arm's own.
    """

    cache_element_bytes = 2

    def __init__(self, arm: Arm, max_nrms: float | None = None) -> None:
        self._arm = arm
        self.name, self.description = f"{arm.name}-bf16", f"{arm.description}, BF16 KV cache"
        self.max_nrms = arm.max_nrms if max_nrms is None else max_nrms

    def prepare(self, sets: Sequence[Step3Inputs]) -> None:
        """Widen K and V, then prepare the arm."""
        self.sets = [replace(s, k_cache=s.k_cache.bfloat16(), v_cache=s.v_cache.bfloat16()) for s in sets]
        self._arm.prepare(self.sets)

    def call(self, index: int) -> torch.Tensor:
        """The arm's call."""
        return self._arm.call(index)

    def notes(self) -> dict[str, Any]:
        """The arm's notes."""
        return self._arm.notes()

    def release(self) -> None:
        """Free the copies and what the arm made."""
        self._arm.release()
        del self.sets


class Stages:
    """PageWeaver's kernels on some input sets, callable one by one.

    Args:
        sets: input sets of one size.
        window: queries per window.
        group_size: queries per group, of the order and of the unions; None for those of a whole call by the engine.
        guard: as in :func:`pageweaver_sglang.regroup`.
        own_plans: keep a plan and V's tiles for every set, so that :meth:`attend` can be called alone, instead of one
            of each for all.
        engine: as in :class:`pageweaver_sglang.Config`; None for the default, of the group size where it is given.
        precision: as in :class:`pageweaver_sglang.Config`.
    """

    def __init__(
        self,
        sets: Sequence[Step3Inputs],
        *,
        window: int,
        group_size: int | None = None,
        guard: str = "window",
        own_plans: bool = False,
        engine: str | None = None,
        precision: str = "fp8",
    ) -> None:
        from pageweaver_sglang.cuda import ops

        self.sets, self.window, self.guard = sets, window, guard
        if group_size is None:
            config, first = pw.Config(engine=engine or support.STREAM, precision=precision), sets[0]
            sizes = support.call_grouping(config, first.q, first.k_cache, first.page_size)
            self._order_size, union_size = sizes.order, sizes.union
        else:
            self._order_size = union_size = group_size
        self.engine, self.precision = engine or ops.default_engine(union_size), precision
        spaces = [_workspace(sets, window, union_size) for _ in range(len(sets) if own_plans else 1)]
        self._spaces = spaces * (len(sets) if len(spaces) == 1 else 1)

    def regroup(self, index: int, perm: torch.Tensor | None = None) -> torch.Tensor:
        """Order of the queries, int32 ``[kv_heads, tokens]``, into ``perm`` or the workspace."""
        from pageweaver_sglang.cuda import ops

        s = self.sets[index]
        perm = self._spaces[index].perm(s.topk_idx.shape[1]) if perm is None else perm
        ops.regroup(
            s.topk_idx,
            s.cu_seqlens,
            s.prefix_lens,
            perm,
            window=self.window,
            group_size=self._order_size,
            page_size=s.page_size,
            capacity=None,
            guard=self.guard,
        )
        return perm

    def plan(self, index: int) -> pw.UnionPlan:
        """The plan's arrays in the workspace of set ``index``, as they are."""
        s = self.sets[index]
        return self._spaces[index].plan(s.topk_idx.shape[1], len(s.prefix_lens), page_size=s.page_size)

    def prepare_unions(self, index: int, perm: torch.Tensor | None) -> pw.UnionPlan:
        """The union plan of an order (None: the original one), physical pages and their marks included.

        Calls without :meth:`value_tiles` in between mark the same pages again.
        """
        from pageweaver_sglang.cuda import ops

        s, plan, tiles = self.sets[index], self.plan(index), self.tiles(index)
        ops.prepare_unions(
            s.topk_idx,
            perm,
            s.cu_seqlens,
            s.seq_lens,
            s.prefix_lens,
            plan,
            window=self.window,
            req_to_token=s.req_to_token,
            slot_ids=s.slot_ids,
            num_pool_pages=_pool_pages(s),
            marks=None if tiles is None else tiles.marks,
        )
        return plan

    def tiles(self, index: int) -> pw.ValueTiles | None:
        """V's tiles in the workspace of set ``index``, as they are; None for an engine that reads V itself."""
        inputs = self.sets[index]
        if not support.reads_value_tiles(self.engine, inputs.v_cache.dtype):
            return None
        return self._spaces[index].value_tiles(_pool_pages(inputs))

    def value_tiles(self, index: int) -> pw.ValueTiles | None:
        """Transpose the pages of V that :meth:`prepare_unions` marked, and order the groups; nothing without tiles."""
        from pageweaver_sglang.cuda import ops

        tiles = self.tiles(index)
        if tiles is not None:
            ops.value_tiles(self.sets[index].v_cache, tiles, self.plan(index))
        return tiles

    def attend(self, index: int, plan: pw.UnionPlan) -> torch.Tensor:
        """Attention over a plan and its pages' tiles, into the workspace's output."""
        from pageweaver_sglang.cuda import ops

        s, tiles = self.sets[index], self.tiles(index)
        out = self._spaces[index].out(len(s.q))
        scale = s.q.shape[-1] ** -0.5
        ops.union_attention(
            s.q,
            s.k_cache,
            s.v_cache,
            plan,
            out,
            sm_scale=scale,
            engine=self.engine,
            precision=self.precision,
            tiles=None if tiles is None else tiles.tiles,
        )
        return out


class StagedArm(Arm):
    """Some of the stages: what is in ``timed`` is called, what comes before it is done in ``prepare``.

    Args:
        name: the arm's name.
        description: one sentence.
        timed: a part of ``("regroup", "unions", "tiles", "attention")`` without gaps. ``tiles`` alone clears the marks
            that it goes by, so that its call begins with a copy of them (4 bytes per page of the pool).
        window: queries per window.
        group_size: as in :class:`Stages`.
        regrouped: False for the original order.
    """

    def __init__(
        self,
        name: str,
        description: str,
        timed: Sequence[str],
        *,
        window: int = 128,
        group_size: int | None = None,
        regrouped: bool = True,
    ) -> None:
        self.name, self.description, self._timed = name, description, tuple(timed)
        self._options: dict[str, Any] = {"window": window, "group_size": group_size}
        self._regrouped = regrouped

    def prepare(self, sets: Sequence[Step3Inputs]) -> None:
        """Do the stages that aren't timed."""
        self._stages = Stages(sets, **self._options, own_plans="unions" not in self._timed)
        self._perms: list[torch.Tensor | None] = [None] * len(sets)
        if self._regrouped:
            for index, s in enumerate(sets):
                perm = torch.empty(s.topk_idx.shape[:2], dtype=torch.int32, device=s.topk_idx.device)
                self._perms[index] = self._stages.regroup(index, perm)
        self._marks: list[torch.Tensor] = []
        if "unions" not in self._timed and self._timed != ("regroup",):
            for index, perm in enumerate(self._perms):
                self._stages.prepare_unions(index, perm)
                if "tiles" in self._timed and (tiles := self._stages.tiles(index)) is not None:
                    self._marks.append(tiles.marks.clone())
                self._stages.value_tiles(index)
        torch.cuda.synchronize()

    def call(self, index: int) -> torch.Tensor:
        """The timed stages."""
        perm, plan, tiles = self._perms[index], None, None
        if "regroup" in self._timed:
            perm = self._stages.regroup(index)
        if "unions" in self._timed:
            plan = self._stages.prepare_unions(index, perm)
        if "tiles" in self._timed:
            if self._marks:
                self._stages.tiles(index).marks.copy_(self._marks[index])
            tiles = self._stages.value_tiles(index)
        if "attention" in self._timed:
            return self._stages.attend(index, plan or self._stages.plan(index))
        if tiles is not None:
            return tiles.tiles
        return plan.pages if plan is not None else perm

    def release(self) -> None:
        """Free what ``prepare`` made."""
        del self._stages, self._perms, self._marks


def regrouping_arm(window: int, size: CallSize = FEW_ROWS) -> PublicArm:
    """The public call that regroups, for calls of that size."""
    config = pw.Config(mode="pageweaver", window=window)
    queries = size.queries_per_union(config)
    text = f"regrouped inside windows of {window} while it runs, groups of {queries}"
    return PublicArm(f"pageweaver-w{window}", text, config)


def comparison_arms(size: CallSize = FEW_ROWS) -> list[Arm]:
    """Whole Step 3 calls of that size, the arms of the README's table."""
    original = pw.Config(mode="union8")
    whole = ("unions", "tiles", "attention")
    arms: list[Arm] = [
        NativeArm(),
        StagedArm("union4", "original order, groups of 4", whole, group_size=4, regrouped=False),
        PublicArm("union8", f"original order, groups of {size.queries_per_union(original)}", original),
        PublicArm(
            "union8-paper",
            "original order, groups of 8, on the paper's kernel",
            pw.Config(mode="union8", engine="union8"),
        ),
    ]
    for window in (64, 128):
        arms += [
            regrouping_arm(window, size),
            StagedArm(
                f"pageweaver-w{window}-fixed",
                f"the same with window {window}'s order computed beforehand",
                whole,
                window=window,
            ),
        ]
    arms.append(AutoArm("auto", "original order or regrouped, by what earlier calls saved", pw.Config(mode="auto")))
    high = pw.Config(mode="pageweaver", window=64, precision="high")
    queries = size.queries_per_union(high)
    text = f"as pageweaver-w64, groups of {queries}, Q and softmax weights in two FP8 terms"
    arms.append(PublicArm("pageweaver-high", text, high))
    paper = pw.Config(mode="pageweaver", engine="union8", guard="none")
    text = "regrouped inside windows of 128, groups of 8, on the paper's kernel"
    arms.append(PublicArm("pageweaver-w128-paper", text, paper))
    return arms


def stage_arms() -> list[Arm]:
    """PageWeaver's kernels alone."""
    return [
        StagedArm("regroup-w64", "regroup kernel, windows of 64", ("regroup",), window=64),
        StagedArm("regroup-w128", "regroup kernel, windows of 128", ("regroup",)),
        StagedArm("unions-original", "union preparation kernel, original order", ("unions",), regrouped=False),
        StagedArm("unions-w128", "union preparation kernel, order of windows of 128", ("unions",)),
        StagedArm("value-tiles", "value tile kernel: V's picked pages transposed", ("tiles",), regrouped=False),
        StagedArm("attention-original", "attention kernel, original order", ("attention",), regrouped=False),
        StagedArm("attention-w64", "attention kernel, order of windows of 64", ("attention",), window=64),
        StagedArm("attention-w128", "attention kernel, order of windows of 128", ("attention",)),
    ]


def prepare_arms(
    arms: Sequence[Arm], sets: Sequence[Step3Inputs], on_begin: Callable[[str], None] | None = None
) -> tuple[list[Arm], dict[str, str]]:
    """Prepare every arm on ``sets``; returns those that are ready, and the reason by name for those that aren't.

    ``on_begin`` is called with an arm's name before it begins. Raises :class:`..protocol.DeviceLost`.
    """
    ready, unavailable = [], {}
    for arm in arms:
        if on_begin is not None:
            on_begin(arm.name)
        try:
            arm.prepare(sets)
            ready.append(arm)
        except ArmUnavailable as reason:
            raise_if_lost(arm.name, reason)
            unavailable[arm.name] = str(reason)
            release(arm)
        except Exception as error:  # an arm is anybody's code: whatever it raises, the others go on
            raise_if_lost(arm.name, error)
            unavailable[arm.name] = f"fails ({first_line(error)})"
            release(arm)
    return ready, unavailable


def release(arm: Arm) -> None:
    """Have an arm drop what it made, also when its ``prepare`` failed halfway."""
    # What a failed `prepare` never made can't be dropped.
    with contextlib.suppress(AttributeError):
        arm.release()


def build_kernels() -> float:
    """Compile PageWeaver's kernels if that has not been done; returns the seconds it took.

    Raises :class:`ArmUnavailable` when they can't be had here.
    """
    from pageweaver_sglang.cuda import loader

    start = time.perf_counter()
    try:
        loader.load()
    except (loader.KernelBuildError, OSError) as error:
        raise ArmUnavailable(f"PageWeaver's kernels can't be built or loaded ({first_line(error)})") from error
    return time.perf_counter() - start
