"""Arms that aren't PageWeaver: other kernels for the same Step 3, each behind a check of whether it is installed."""
