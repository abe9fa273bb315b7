"""``mode: auto``: whether a call regroups or keeps the original order, without ever waiting for the device.

model      what regrouping costs and what a saved page visit is worth, from committed measurements
readback   counters of a call that reach the host on their own
history    what earlier calls saved, per layer and context, and the decision for the next one
"""
