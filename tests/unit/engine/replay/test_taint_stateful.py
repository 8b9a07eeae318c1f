"""Readers of the secret when spans are unknown: a forget spares the prompt alone."""

from hypothesis import settings
from support.examples import examples
from taint_machine import TaintMachine

TestTaint = TaintMachine.TestCase
TestTaint.settings = settings(max_examples=examples(20), stateful_step_count=30, deadline=None)
