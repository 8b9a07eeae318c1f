"""A scheduler's side for the HTTP process: it answers commands, and each envelope with a record.

Written into a folder as a distribution of its own, it is one more general plugin of vLLM.
"""

from __future__ import annotations

from pathlib import Path

NAME = "leyline_stand_in"
API_KEY = "engine-key"
"""The key of the shared server."""
_MODULE = """
import msgspec
from leyline_engine.contract import (
    Capability, ClaimReply, Receipt, TurnRecord,
)
from leyline_engine.packed_hints import hints_secret
from leyline_engine.server.channel import open_sender
from leyline_engine.server.claim_clock import ClaimAnswer, ClaimMessage


def register():
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore
    from leyline_engine.vllm.hints import take_hints

    made, added = Scheduler.__init__, Scheduler.add_request

    def init(self, vllm_config, *args, **kwargs):
        made(self, vllm_config, *args, **kwargs)
        self.sender = open_sender(attn_tp_rank=0, dp_rank=0)
        model = vllm_config.model_config
        self.sender.announce(Capability(
            engine="vllm", engine_version="0", model=model.served_model_name,
            model_fingerprint="f", architecture="llama", vocab_size=4096,
            max_context=model.max_model_len, splices=False, unsupported_reason="a stand-in",
        ))

    def add_request(self, request):
        hints = take_hints(request, hints_secret())
        if hints.message_id is not None:
            receipt = Receipt(
                message_id=hints.message_id, detail=hints.detail, reason=hints.invalid
            )
            self.sender.send(TurnRecord(receipt=receipt, finished=True, output_ids=(1, 2)))
        added(self, request)

    def leyline_control(self, message: str) -> str:
        asked = msgspec.json.decode(message, type=ClaimMessage)
        answer = ClaimAnswer(asked.order, ClaimReply(seq=asked.order))
        return msgspec.json.encode(answer).decode()

    Scheduler.__init__, Scheduler.add_request = init, add_request
    EngineCore.leyline_control = leyline_control
"""


def write_stand_in(folder: Path) -> dict[str, str]:
    """Write the plugin; returns the environment of a server that loads it."""
    about = folder / f"{NAME}-0.dist-info"
    about.mkdir(parents=True)
    (folder / f"{NAME}.py").write_text(_MODULE, encoding="utf-8")
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 0\n")
    entry = f"[vllm.general_plugins]\n{NAME} = {NAME}:register\n"
    (about / "entry_points.txt").write_text(entry)
    return {"PYTHONPATH": str(folder), "VLLM_PLUGINS": f"leyline,{NAME}"}
