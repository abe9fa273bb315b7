"""FlashInfer as a server of Step 3: its XQA decode kernel, with every query as a decode request of its own.

Used by the benchmark (``bench/peers``) and by the SGLang plugin (setting ``fallback_engine``). Importing this package
does not import FlashInfer.

========== =========================================================================================
page_lists one list of physical pages per query, built on the device
xqa        loads FlashInfer's function, says which calls it covers, and computes ``sparse_prefill`` with it
========== =========================================================================================
"""
