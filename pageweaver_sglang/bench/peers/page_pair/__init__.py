"""The page-pair control: pages paired by common queries, one partial output per query and pair, then a merge.

It turns the sharing around: not queries share a union of pages, but two pages the queries that picked both.
:mod:`.pairing` is the host's part, :mod:`.kernels` has the two kernels, :mod:`.arm` the arm.
"""
