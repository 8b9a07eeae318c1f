"""SGLang on a machine without an accelerator, in plain PyTorch.

An SGLang platform of its own, apart from everything else here: it lets tests, demonstrations and
benchmarks run the real engine on any x86 or ARM machine. It steps aside wherever PyTorch sees an
accelerator, and where SGLang's own CPU engine was asked for (``SGLANG_USE_CPU_ENGINE=1``).
"""
