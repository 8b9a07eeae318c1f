"""The error of an evaluation whose model can't be measured."""


class SubjectError(Exception):
    """A model that can't be loaded or measured; the message names it and the reason."""


class NothingCopiedError(SubjectError):
    """An edit after which an engine copies nothing, as too little follows it."""
