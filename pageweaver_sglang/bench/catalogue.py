"""All arms of ``pageweaver bench``, and which count of :mod:`.work` says how many pages each loads."""

from __future__ import annotations

from dataclasses import dataclass

from pageweaver_sglang.config import Config

from .arms import SIXTEEN_BITS_NRMS, Bf16CacheArm, NativeArm, PortableArm, comparison_arms, regrouping_arm
from .inputs import FEW_ROWS, CallSize
from .offline_arms import OfflineArm, ReorderedArm
from .orders import OFFLINE, FoundOrder
from .peers.flashinfer import Fa2Arm, XqaArm
from .peers.native_short import NativeShortArm
from .peers.page_pair.arm import PagePairArm
from .peers.pr37236 import Pr37236Arm
from .protocol import Arm
from .work import order_count, portable_count

_OFFLINE_TEXT = {
    "identity": "original order written out as ids",
    "random": "random order inside each request",
    "w512": "greedy in windows of 512, order found on the CPU beforehand",
    "w2048": "greedy in windows of 2048, order found on the CPU beforehand",
    "hash-w512": "all queries sorted by min-hashes of their pages, then greedy in windows of 512, found beforehand",
}
REORDERED = "offline-w512-reordered"


@dataclass(frozen=True)
class Entry:
    """An arm, the key of its page count, and its kind: ``main``, ``control`` (page-pair), ``offline`` or ``apart``."""

    arm: Arm
    count: str
    kind: str = "main"


def catalogue(orders: dict[str, FoundOrder], size: CallSize = FEW_ROWS) -> list[Entry]:
    """Every arm in the order of the tables, for calls of that size; ``orders`` must hold the offline ones."""
    portable = portable_count(size.heads_per_kv_head)
    pageweaver = {arm.name: arm for arm in comparison_arms(size)}
    unions = size.queries_per_union(Config())
    entries = [
        Entry(pageweaver.pop("native"), "per-query"),
        Entry(Pr37236Arm(), "per-query"),
        Entry(XqaArm(), "per-query"),
        Entry(Fa2Arm(), "per-query"),
        *(Entry(arm, _count_key(name, size)) for name, arm in pageweaver.items()),
        Entry(PortableArm(size), portable),
        Entry(PagePairArm(), "page-pair", "control"),
    ]
    for name in OFFLINE:
        arm = OfflineArm(f"offline-{name}", _OFFLINE_TEXT[name], orders[name])
        entries.append(Entry(arm, order_count(name, unions), "offline"))
    moved = "the order of offline-w512 with Q and picks moved into it in the call, and the output moved back"
    entries.append(Entry(ReorderedArm(REORDERED, moved, orders["w512"]), order_count("w512", unions), "offline"))
    return [
        *entries,
        Entry(NativeShortArm(), "per-query", "apart"),
        Entry(Bf16CacheArm(NativeArm()), "per-query", "apart"),
        Entry(
            Bf16CacheArm(regrouping_arm(64, size), SIXTEEN_BITS_NRMS),
            order_count("w64", unions),
            "apart",
        ),
        Entry(Bf16CacheArm(PortableArm(size)), portable, "apart"),
    ]


def _count_key(name: str, size: CallSize) -> str:
    """Count of a :func:`..arms.comparison_arms` arm: ``unionN...``, ``pageweaver-WINDOW...`` or ``auto``.

    An arm that names no window has the default one. ``auto`` says after its calls whether it did regroup.
    """
    first, *rest = name.split("-")
    queries = 8 if "paper" in rest else size.queries_per_union(Config())
    if first == "union4":
        return order_count("original", 4)
    if first == "union8":
        return order_count("original", queries)
    window = rest[0] if rest and rest[0].startswith("w") else f"w{Config().window}"
    return order_count(f"{window}{'-unguarded' if 'paper' in rest else ''}", queries)


def arm_names() -> list[str]:
    """Names of all arms, without making orders."""
    nothing = FoundOrder(None, 0.0)
    return [entry.arm.name for entry in catalogue(dict.fromkeys(OFFLINE, nothing))]
