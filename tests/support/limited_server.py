"""`rdzv serve` with other limits: `python -m support.limited_server '{"runs": 50}' --bind 127.0.0.1:0`."""

from __future__ import annotations

import json
import sys
from functools import partial

from rdzv.__main__ import main
from rdzv.engines.embedded import server_core
from rdzv.engines.embedded.limits import Limits

if __name__ == "__main__":
    server_core.Limits = partial(Limits, **json.loads(sys.argv[1]))
    sys.argv[1:2] = ["serve"]
    main()
