"""All arms of ``pageweaver bench``, and which count of :mod:`.work` says how many pages each loads."""

from __future__ import annotations

from dataclasses import dataclass

from pageweaver_sglang.config import Config

from .arms import SIXTEEN_BITS_NRMS, Bf16CacheArm, NativeArm, PortableArm, comparison_arms, regrouping_arm
from .inputs import QUERY_HEADS_PER_KV_HEAD
from .offline_arms import OfflineArm, ReorderedArm
from .orders import OFFLINE, FoundOrder
from .peers.flashinfer import Fa2Arm, XqaArm
from .peers.native_short import NativeShortArm
from .peers.page_pair.arm import PagePairArm
from .peers.pr37236 import Pr37236Arm
from .protocol import Arm
from .work import portable_count

_OFFLINE_TEXT = {
    "identity": "original order written out as ids",
    "random": "random order inside each request",
    "w512": "greedy in windows of 512, order found on the CPU beforehand",
    "w2048": "greedy in windows of 2048, order found on the CPU beforehand",
    "hash-w512": "all queries sorted by min-hashes of their pages, then greedy in windows of 512, found beforehand",
}
AUTO_REGROUPED = "w64-8"
"""Count of the arm ``auto`` where it regroups; where it keeps the original order, ``original-8``."""
REORDERED = "offline-w512-reordered"


@dataclass(frozen=True)
class Entry:
    """An arm, the key of its page count, and its kind: ``main``, ``control`` (page-pair), ``offline`` or ``apart``."""

    arm: Arm
    count: str
    kind: str = "main"


def catalogue(orders: dict[str, FoundOrder], heads_per_kv_head: int = QUERY_HEADS_PER_KV_HEAD) -> list[Entry]:
    """Every arm in the order of the tables; ``orders`` must hold the offline ones."""
    portable = portable_count(heads_per_kv_head)
    pageweaver = {arm.name: arm for arm in comparison_arms()}
    entries = [
        Entry(pageweaver.pop("native"), "per-query"),
        Entry(Pr37236Arm(), "per-query"),
        Entry(XqaArm(), "per-query"),
        Entry(Fa2Arm(), "per-query"),
        *(Entry(arm, _count_key(name)) for name, arm in pageweaver.items()),
        Entry(PortableArm(heads_per_kv_head), portable),
        Entry(PagePairArm(), "page-pair", "control"),
    ]
    for name in OFFLINE:
        entries.append(Entry(OfflineArm(f"offline-{name}", _OFFLINE_TEXT[name], orders[name]), f"{name}-8", "offline"))
    moved = "the order of offline-w512 with Q and picks moved into it in the call, and the output moved back"
    entries.append(Entry(ReorderedArm(REORDERED, moved, orders["w512"]), "w512-8", "offline"))
    return [
        *entries,
        Entry(NativeShortArm(), "per-query", "apart"),
        Entry(Bf16CacheArm(NativeArm()), "per-query", "apart"),
        Entry(Bf16CacheArm(regrouping_arm(64), SIXTEEN_BITS_NRMS), "w64-8", "apart"),
        Entry(Bf16CacheArm(PortableArm(heads_per_kv_head)), portable, "apart"),
    ]


def _count_key(name: str) -> str:
    """Count of a :func:`..arms.comparison_arms` arm: ``unionN...``, ``pageweaver-WINDOW...`` or ``auto``, groups of 8.

    An arm that names no window has the default one.
    """
    if name == "auto":
        return AUTO_REGROUPED
    first, *rest = name.split("-")
    if first.startswith("union"):
        return f"original-{first.removeprefix('union')}"
    window = rest[0] if rest[0].startswith("w") else f"w{Config().window}"
    return f"{window}{'-unguarded' if 'paper' in rest else ''}-8"


def arm_names() -> list[str]:
    """Names of all arms, without making orders."""
    nothing = FoundOrder(None, 0.0)
    return [entry.arm.name for entry in catalogue(dict.fromkeys(OFFLINE, nothing))]
