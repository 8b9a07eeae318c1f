"""The benchmarks: for each, its commands and the reader of its result files."""

from .base import Benchmark, Endpoint, Job, Source, Step, check_checkout
from .complexity_trap import ComplexityTrap
from .custom import Custom, ResultFormat
from .debug_gym import DebugGym
from .loca_bench import LocaBench

__all__ = [
    "Benchmark",
    "ComplexityTrap",
    "Custom",
    "DebugGym",
    "Endpoint",
    "Job",
    "LocaBench",
    "ResultFormat",
    "Source",
    "Step",
    "check_checkout",
]
