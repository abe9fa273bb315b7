"""Measuring: the timing protocol, the arms that are compared, their inputs, and how far an arm's output is off.

``docs/measuring.md`` says what is measured and how. Nothing here imports CUDA code or SGLang until an arm asks for it.
"""
