"""Random calls of the public functions, each compared with plain masked attention; what ``pageweaver fuzz`` runs.

A seed is a call: :mod:`.draw` turns it into numbers on the host, :mod:`.build` into tensors, :mod:`.dense` says what
must come out and how far off it may be, :mod:`.trial` makes the call and judges it, :mod:`.campaign` spreads seeds over
processes.
"""
