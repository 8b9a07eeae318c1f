"""The contract where an engine caches whole pages only, decided page by page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from oracle_reference import SINK, Fresh, Keep, Piece, Remembered


@dataclass(frozen=True, slots=True, eq=False)
class _Token:
    token: int
    turn: Remembered | None = None
    place: int = 0

    def held(self, page: int, ahead: int) -> bool:
        """True if the engine may have its KV: it lies in a whole page of a turn."""
        return self.turn is not None and self.place < (self.turn.computed - ahead) // page * page


def in_whole_pages(
    pieces: Sequence[Piece], prefix: int, page: int, *, min_copy: int = 1, ahead: int = 0
) -> list[Piece]:
    """Pieces of a prompt, of which no page is kept in part; what isn't kept is computed again.

    A page is kept if all its tokens are, whichever turns they are of, and if it lies with others
    that are enough together.

    Args:
        prefix: tokens that the prompt has in common with what is cached; they aren't copied.
        min_copy: the least tokens of neighbouring pages that are copied.
        ahead: tokens after a page that are needed to find it.
    """
    tokens = list(_tokens(pieces))
    prefix = (prefix - ahead) // page * page
    kept, run = set(range(prefix)), list[int]()
    for number in range(prefix // page, len(tokens) // page + 1):
        whole = range(number * page, (number + 1) * page)
        # The prompt's last token is always computed.
        inside = whole.start >= SINK and whole.stop < len(tokens) - ahead
        if inside and all(tokens[at].held(page, ahead) for at in whole):
            run += whole
            continue
        kept |= set(run if len(run) >= min_copy else ())
        run = []
    return _joined([t if at in kept else _Token(t.token) for at, t in enumerate(tokens)], prefix)


def _tokens(pieces: Sequence[Piece]) -> Iterator[_Token]:
    for piece in pieces:
        if isinstance(piece, Keep):
            for place in range(piece.start, piece.end):
                yield _Token(piece.turn.tokens[place], piece.turn, place)
        else:
            for token in piece.tokens:
                yield _Token(token)


def _joined(tokens: Sequence[_Token], prefix: int) -> list[Piece]:
    """Pieces of these tokens; the prefix is one of its own."""
    pieces: list[Piece] = []
    for at, token in enumerate(tokens):
        last = pieces[-1] if pieces else None
        match last, token.turn:
            case Fresh(before), None:
                pieces[-1] = Fresh((*before, token.token))
            case _, None:
                pieces.append(Fresh((token.token,)))
            case Keep(turn, start, end), same if (
                turn is same and end == token.place and at != prefix
            ):
                pieces[-1] = Keep(turn, start, end + 1)
            case _, turn:
                pieces.append(Keep(turn, token.place, token.place + 1))
    return pieces
