"""The embedded engine alone, on a port that is its argument."""

from __future__ import annotations

import sys

import uvicorn

from leyline_proxy.upstream.embedded import create_embedded_engine

if __name__ == "__main__":
    app = create_embedded_engine("replay", {"device": "cpu", "pool_tokens": 65_536})
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
