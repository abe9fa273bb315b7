"""Serve a model in several arms and compare them: what ``pageweaver ab`` does.

========== ======================================================================================================
settings   what is compared: arms, prompt lengths, concurrency, blocks; the order in which arms are served
launch     command lines and environments of the servers and of SGLang's benchmark client
client     SGLang's client, load after load, and what its result file says
worker     the process that imports the client once and runs one load after the other
warmup     prompts sent before anything is measured
idle       what a server says it is doing
serverlog  what a server's log says: mode, calls handed back, Triton's choices, Step 3's time
switching  arms switched inside one running server
session    all blocks of all arms, one driven at a time; a report that is complete after every arm of every block
statistics figures of a report: spread over blocks, ratios paired by block, Step 3's share
========== ======================================================================================================

Nothing here imports torch or SGLang, but for the worker: servers and client are processes of their own.
"""
