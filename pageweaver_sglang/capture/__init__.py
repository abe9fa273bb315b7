"""Recording Step 3 calls of a running server into workload files, off the hot path.

========== ======================================================================================================
control    the file in the capture folder that switches a running server's recording on and off, and its state
snapshot   one call's tensors, copied on the device in stream order, and the workload they become on the CPU
recorder   decides which calls are recorded, hands snapshots to a writer thread, keeps the bounds
========== ======================================================================================================

Nothing here imports SGLang. A call is never held up by more than a few device copies and never fails because of a
recording: what cannot be recorded is dropped and counted.
"""
