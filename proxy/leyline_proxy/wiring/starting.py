"""Checks in front of a start: an engine takes long to load, and workers take seconds to begin."""

from __future__ import annotations

from leyline_policies.config import load_policies

from ..edits.sensitive import sensitive_content
from ..settings import Settings
from ..tenants import build_directory
from .audit import audit_key
from .tls import check_tls


def check_start(settings: Settings) -> None:
    """Read the files and the policies that a proxy needs at its start.

    Raises:
        leyline_policies.PolicyError, leyline_proxy.model.fields.OptionError: a policy or a rule is
            wrong.
        leyline_proxy.settings.named_files.NamedFileError: a file can't serve.
    """
    build_directory(settings)
    sensitive_content(settings.sensitive)
    if settings.policies_file is not None:
        load_policies(settings.policies_file)
    check_tls(settings)
    if settings.audit_file is not None:
        audit_key(settings)
