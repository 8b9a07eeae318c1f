"""The options of ``leyline serve``: examples, their panels, and their settings."""

from __future__ import annotations

EPILOG = """[bold]Examples[/bold]

Try it, no GPU needed:  leyline serve

In front of SGLang:  leyline serve --upstream http://gpu1:30000

In front of several engines:

leyline serve --upstream a=http://gpu1:30000 --upstream b=http://gpu2:30000

Shorten old tool output:

leyline serve --policy "truncate_older_than:n=2,max_chars=200"

A harness truncates its history:  leyline serve --undeclared tool=amortize

Two teams:  leyline serve --api-key red:KEY1 --api-key blue:KEY2

Every flag is also a setting LEYLINE_NAME in the environment and a key in the file of --config.
Flags override the environment, and the environment overrides the file.
"""
PANELS = {
    "Address": "host port allowed_host admin_port tls_cert tls_key",
    "Engines": "upstream router affinity_header engine engine_option model",
    "Policies": "policy policies_file fidelity_profile on_fault edit_timing request_policy",
    "Cache": (
        "splice undeclared reasoning_edits compaction_edits reuse reuse_margin retained_turns "
        "warm_start_path"
    ),
    "Tenants": "api_key api_keys_file",
    "Audit log": "audit_file audit_key_file audit_turns audit_redis",
    "Operation": "config workers session_store trace log_level log_format",
}
"""Titles, and the names of parameters."""

SETTINGS = {
    "allowed_host": "allowed_hosts",
    "api_key": "api_keys",
    "engine_option": "engine_options",
    "request_policy": "allow_request_policy",
}
"""Settings of flags with another name."""
