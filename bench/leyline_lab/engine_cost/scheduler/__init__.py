"""SGLang's scheduler without a model, for measuring the time of its own steps."""

import sys
from pathlib import Path

# Its pool and its tree are those of the tests.
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "sglang" / "support"))
