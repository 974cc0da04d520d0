"""Measures trajstore beside what a user would use instead: `python -m benchmarks --help`.

Every number is taken in a process of its own pair, ours and the rival in turns: so the ratio holds on a noisy machine.
"""
