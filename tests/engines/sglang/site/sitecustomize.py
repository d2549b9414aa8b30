"""Loaded by every process of the suite, SGLang's own too: they find stand-ins for what a CPU lacks."""

from sglang_on_cpu import prepare

prepare()
