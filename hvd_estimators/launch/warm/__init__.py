"""Warm start: ranks forked from processes that have imported a framework."""
