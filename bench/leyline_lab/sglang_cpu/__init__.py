"""SGLang on a machine without an accelerator, in plain PyTorch.

An SGLang platform of its own, apart from everything else here: it lets tests, demonstrations and
benchmarks run the real engine on any x86 or ARM machine. It gives way if PyTorch sees an
accelerator, or if SGLang's own CPU engine was asked for (``SGLANG_USE_CPU_ENGINE=1``).
"""
