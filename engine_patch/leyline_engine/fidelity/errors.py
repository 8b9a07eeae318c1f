"""The error of an evaluation whose model can't be measured."""


class SubjectError(Exception):
    """A model that can't be loaded or measured; the message names it and the reason."""
