"""``python -m pageweaver_sglang.cli``: the ``pageweaver`` command where it isn't on ``PATH``."""

from . import main

raise SystemExit(main())
