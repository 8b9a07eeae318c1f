"""Sessions as bytes: everything that is needed to go on with them, compressed."""

from .format import FORMAT, UNENCODABLE, decode_session, encode_session

__all__ = ["FORMAT", "UNENCODABLE", "decode_session", "encode_session"]
