"""PageWeaver inside SGLang: everything that imports SGLang lives in this subpackage.

SGLang finds :func:`register` through the entry point group ``sglang.srt.plugins`` and calls it once in every process
of a server. Importing this package imports neither SGLang nor torch.

========== ======================================================================================================
compat     which SGLang this is, what differs between its versions, and whether the places used here still exist
options    what ``pageweaver`` means among SGLang's server arguments, before SGLang resolves them
hooks      the hooks, and the guard that stops a server in which one of them did not take
backend    the attention backend: SGLang's own, with Step 3 of prefill routed to ``step3``
step3      one Step 3 call: PageWeaver or SGLang's own function, counters, comparison of the two
fallback   FlashInfer's XQA for calls that the kernels don't cover, where the setting fallback_engine asks for it
operations the switch, what disables PageWeaver after an error, and the thread that tells how the process stands
control    the folder of ``pageweaver switch``
metrics    counters and histograms in SGLang's Prometheus endpoint
capture    what a recording of Step 3 calls needs to know of SGLang
timing     how long Step 3 takes, where the setting ``timing`` asks for it
kernels    compiles and loads the CUDA kernels while the server starts
========== ======================================================================================================
"""

from __future__ import annotations

NAME = "pageweaver"
"""The value of ``--attention-backend`` that asks for PageWeaver."""


def register() -> None:
    """Add ``pageweaver`` to SGLang's attention backends and install the hooks; safe to call again.

    SGLang's plugin loader logs and swallows exceptions, so nothing here relies on raising: where a place in SGLang
    is missing, the name still exists and choosing it stops the server with a message (see :mod:`.hooks`).
    """
    from .hooks import install

    install()
